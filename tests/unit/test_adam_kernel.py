"""The kernel of Adam's update in Triton, which runs on a CPU by interpretation; `make test-triton` installs Triton."""

import os
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":  # read when Triton is imported, which another test's torch may have done
    pytest.skip("`make test-triton` installs Triton in build/, and interprets its kernels", allow_module_level=True)

from tests.plain_kernels import PlainKernels, acts_as_gpu, bits
from tests.unit.test_update_on_gpu import ALONE, engine_of, masters, rounded, step, weight_of
from zerobench.zero import optim
from zerobench.zero.optim import adam_kernel, one_pass
from zerobench.zero.optim.one_pass import OnePass, new_state, triton_kernels
from zerobench.zero.precision import UpdatedShare

CPU = torch.device("cpu")

LENGTHS = (1, 4096, 0, 7, 5000, 8192)
"""Elements of the segments: none, less than a program's, exactly as many, and more."""


def interpreted(_: torch.device) -> Any:
    return adam_kernel


def parts_of(
    optimizer: Any, shift: int, gradient: torch.dtype, parameter: torch.dtype | None
) -> Iterator[UpdatedShare]:
    """Segments of the optimizer's parameters, each `shift` elements behind an aligned address."""
    torch.manual_seed(1)
    for group in optimizer.param_groups:
        for number, p in enumerate(group["params"]):
            master = torch.empty(p.numel() + shift)[shift:].copy_(p.detach())
            grad = torch.empty(p.numel() + shift, dtype=gradient)[shift:]
            half = None if parameter is None else torch.empty(p.numel() + shift, dtype=parameter)[shift:].copy_(master)
            yield UpdatedShare(master, grad, half, new_state(master, group["amsgrad"]), group, number)


LR = 1e-3


def ulps(mine: torch.Tensor, other: torch.Tensor, before: torch.Tensor) -> float:
    """Difference in units of the last place of the larger of a master and its value before the step. A master that is
    hardly larger than its update has the update's error.
    """
    size = torch.maximum(other.abs(), before.abs()).clamp(min=32 * LR)
    return float(((mine - other).abs() / (torch.nextafter(size, size + 1) - size)).max()) if mine.numel() else 0.0


@pytest.mark.parametrize(
    ("kind", "options", "gradient", "parameter", "shift"),
    [
        ("AdamW", {}, torch.bfloat16, torch.bfloat16, 0),
        ("AdamW", {"amsgrad": True, "maximize": True}, torch.float16, torch.float16, 1),
        ("AdamW", {"lr": torch.tensor(LR), "betas": (0.0, 0.95)}, torch.bfloat16, None, 3),
        ("Adam", {"weight_decay": 0.1, "amsgrad": True}, torch.float32, torch.bfloat16, 0),
        ("Adam", {"maximize": True, "eps": 1e-4}, torch.bfloat16, torch.bfloat16, 1),
    ],
)
@pytest.mark.parametrize("factor", [None, 0.37])
def test_masters_differ_from_torchs_by_at_most_one_ulp(
    kind: str, options: dict[str, Any], gradient: torch.dtype, parameter: torch.dtype | None, shift: int,
    factor: float | None,
) -> None:  # fmt: skip
    """Two groups, of odd lengths; a CPU fuses multiplications and additions, the interpreter does not."""
    torch.manual_seed(0)
    others = [torch.nn.Parameter(torch.randn(numel)) for numel in LENGTHS]
    groups = [{"params": others[:3]}, {"params": others[3:], "lr": LR / 2, "weight_decay": 0.2}]
    optimizer = getattr(torch.optim, kind)(groups, **{"lr": LR} | options, fused=True)
    parts = [*parts_of(optimizer, shift, gradient, parameter)]
    scale = None if factor is None else torch.tensor(factor, dtype=torch.float64)
    for number in range(1, 4):
        before = [part.master.clone() for part in parts]
        for part, other in zip(parts, others, strict=True):
            part.gradient.copy_(torch.randn(other.shape))
            other.grad = part.gradient.float() * (1 if factor is None else factor)
        optimizer.step()
        adam_kernel.update(parts, scale, None, None)
        for part, other, earlier in zip(parts, others, before, strict=True):
            assert ulps(part.master, other.detach(), earlier) <= 1
            assert float(part.state["step"]) == number
            assert set(part.state) == set(optimizer.state[other])
            for name in part.state:
                torch.testing.assert_close(part.state[name], optimizer.state[other][name], rtol=1e-5, atol=1e-7)
            if part.parameter is not None:
                assert torch.equal(bits(part.parameter), bits(part.master.to(part.parameter.dtype)))
            part.master.copy_(other.detach())


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_torchs(dtype: torch.dtype) -> None:
    """Values are ties, numbers that overflow, the smallest ones, infinity and NaN."""
    exact = torch.tensor([1.0, 1.00390625, 1.01171875, 1e38, 3.4e38, 65519.0, 65520.0, 1e-40, 6e-8, -0.0, torch.inf])
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.cat([exact, -exact]))], lr=0.0, fused=True)
    (part,) = parts_of(optimizer, 0, dtype, dtype)
    part.gradient.fill_(1.0)
    adam_kernel.update([part], None, None, None)
    assert part.parameter is not None
    assert torch.equal(bits(part.parameter), bits(part.master.to(dtype)))
    part.master.fill_(torch.nan)
    adam_kernel.update([part], None, None, torch.zeros(1, dtype=torch.int32))
    assert part.parameter.isnan().all()


def test_overflow_changes_nothing() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.randn(5000))], amsgrad=True, fused=True)
    (part,) = parts_of(optimizer, 0, torch.float16, torch.float16)
    part.gradient.fill_(1.0)
    assert part.parameter is not None
    tensors = [part.master, part.parameter, *part.state.values()]
    for found, changes in ((1.0, False), (0.0, True)):
        before = [tensor.clone() for tensor in tensors]
        adam_kernel.update([part], None, torch.tensor(found), None)
        assert all(torch.equal(a, b) != changes for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize(
    ("stage", "options"), [("zero1", {}), ("zero2", {"gradient_dtype": torch.float32}), ("zero3", ALONE)]
)
def test_losses_of_an_engine_are_those_of_tiles(stage: str, options: dict[str, Any]) -> None:
    """Several buckets, clipping, and a write that is found."""
    found = []
    for kernels in (PlainKernels, interpreted):
        with acts_as_gpu(kernels):
            engine = engine_of(stage, bucket_bytes=2048, **options) if stage != "zero3" else engine_of(stage, **options)
            step(engine, 0, clips=True)
            step(engine, 1, clips=True)
            assert rounded(engine)
            found.append(torch.cat([one.flatten() for one in masters(engine)]))
            if stage != "zero3":
                weight_of(engine).data[0, 0] += 1
                step(engine, 2)
                with pytest.raises(RuntimeError, match=r"embedding\.weight: it was written to"):
                    step(engine, 3)
    assert (found[0] - found[1]).abs().max() <= 2.0**-22


def test_fallback_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is missing, the kernel fails, or it differs from torch's."""

    def fails(*_: Any) -> None:
        raise ValueError("no such device")

    def differs(parts: Any, *_: Any) -> None:
        parts[0].master.add_(1)

    problems: dict[str, Any] = {
        "it fails: ValueError: no such device": mock.patch.object(adam_kernel, "update", fails),
        "it differs from torch's by [0-9]+ units": mock.patch.object(adam_kernel, "update", differs),
        "Triton is missing": mock.patch.dict("sys.modules", {adam_kernel.__name__: None}),
    }
    share = mock.Mock(tier="device", crosses=False, tensor=torch.nn.Parameter(torch.zeros(4)))
    optimizer = torch.optim.AdamW([share.tensor], fused=True)
    with mock.patch.dict(one_pass.KERNELS, {"cpu": triton_kernels}):
        triton_kernels.cache_clear()
        assert OnePass.of(optimizer, [share], CPU) is not None
        for words, problem in problems.items():
            triton_kernels.cache_clear()
            with problem, monkeypatch.context() as patch:
                if "missing" in words:
                    patch.delattr(optim, "adam_kernel")
                with pytest.warns(UserWarning, match=f"^Adam's update on cpu does not use its kernel, and .*: {words}"):
                    assert OnePass.of(optimizer, [share], CPU) is None
                with warnings.catch_warnings(action="error"):
                    assert OnePass.of(optimizer, [share], CPU) is None
    triton_kernels.cache_clear()
