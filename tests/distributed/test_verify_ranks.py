"""Certificates of two ranks: honest loops equal one process of plain torch, and failures between ranks are named."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zerobench
from tests.cells import cell
from tests.distributed.test_watch_ranks import batch_of, built
from tests.ranks import run_ranks
from zerobench import ExpectedTraining
from zerobench.predict.build import build_model
from zerobench.watching.held_tensors import leave_out
from zerobench.zero.modules.wrapping import default_units

MICRO, CLIP, STEPS = 2, 0.5, 4
CONFIG = cell("ddp", 2).config
HONEST = ("ddp", "zero_redundancy", "zero1", "zero2", "zero3", "fsdp2")
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def sharded(policy: MixedPrecisionPolicy | None = None, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    model, options = build_model(CONFIG).to(dtype), {"mesh": init_device_mesh("cpu", (2,))}
    options |= {"mp_policy": policy} if policy else {}  # type: ignore[dict-item]
    for unit in (*(unit for _, unit in default_units(model)), model):
        fully_shard(unit, **options)  # type: ignore[call-overload]
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(
    called: Any, optimizer: Any, ranks: Any, syncs: bool = False, local_norm: bool = False, averages: bool = False
) -> None:
    """Steps of MICRO micro-batches; `syncs`: each of them is reduced. `local_norm`: of the rank's own shards.
    `averages`: the loop itself averages gradients.
    """
    for step in range(STEPS):
        for micro in range(MICRO):
            parts = [batch_of(CONFIG, rank, 10 * step + micro) for rank in ranks]
            inputs, is_last = [torch.cat(some) for some in zip(*parts, strict=True)], micro == MICRO - 1
            if hasattr(called, "set_requires_gradient_sync"):
                called.set_requires_gradient_sync(is_last or syncs)
            delays = hasattr(called, "no_sync") and not (is_last or syncs)
            with called.no_sync() if delays else nullcontext():
                loss = called(*inputs) / MICRO
                (called if optimizer is called else torch.autograd).backward(loss)
        for parameter in called.parameters() if averages else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        if optimizer is called:
            called.clip_grad_norm_(CLIP)
        elif local_norm:
            norm = sum(p.grad.to_local().square().sum() for p in called.parameters()).sqrt()
            torch._foreach_mul_([p.grad.to_local() for p in called.parameters()], float(CLIP / norm))
        else:
            torch.nn.utils.clip_grad_norm_(called.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()


def certificate_of(rank: int, expected: ExpectedTraining, build: Callable[[], Any], **how: Any) -> Any:
    with leave_out():  # the loops before
        torch.manual_seed(0)
        called, optimizer = build()
        with zerobench.watch(called, optimizer, verify=expected) as watch:
            train(called, optimizer, [rank], **how)
        return watch.certificate


def summed() -> tuple[Any, Any]:
    """DDP whose gradients are the sum over the ranks: a division is missing."""
    model, optimizer = built("ddp", CONFIG, 2)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: 2 * gradient)
    return model, optimizer


def noisy() -> tuple[Any, Any]:
    """DDP whose optimizer adds noise, and each rank draws its own."""
    model, optimizer = built("ddp", CONFIG, 2)
    torch.manual_seed(dist.get_rank())

    def add_noise(*_: object) -> None:
        for parameter in model.parameters():
            parameter.grad.add_(1e-3 * torch.randn_like(parameter))

    optimizer.register_step_pre_hook(add_noise)
    return model, optimizer


def leaving_out() -> tuple[Any, Any]:
    """DDP that leaves a parameter to each rank, such as an expert's."""
    model = build_model(CONFIG)
    name = next(name for name, parameter in model.named_parameters() if parameter.dim() > 1)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [name])
    return DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), lr=1e-3)


def plain() -> tuple[Any, Any]:
    model = build_model(CONFIG)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def rounded() -> tuple[Any, Any]:
    """A model whose weights are rounded before the engine makes its masters."""
    model = build_model(CONFIG).bfloat16()
    engine = zerobench.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), strategy="zero1")
    return engine, engine


def judged(rank: int, n: int, reference: Path) -> dict[str, list[str]]:
    """Loop -> checks that differ, as found; only rank 0 has them."""
    honest = ExpectedTraining(reference=reference, accumulation=MICRO, reductions=1, clip=CLIP)
    wire = ExpectedTraining(wire={"all_gather": "bfloat16"}, accumulation=MICRO)
    made = {name: certificate_of(rank, honest, partial(built, name, CONFIG, n)) for name in HONEST}
    made["mixed"] = certificate_of(rank, wire, partial(sharded, MIXED))
    made["no delay"] = certificate_of(rank, honest, partial(built, "ddp", CONFIG, n), syncs=True)
    made["fsdp2, no delay"] = certificate_of(rank, honest, sharded, syncs=True)
    made["sum"] = certificate_of(rank, ExpectedTraining(reference=reference), summed)
    made["ignored wire"] = certificate_of(rank, wire, sharded)
    made["noise"] = certificate_of(rank, ExpectedTraining(), noisy)
    made["own loop"] = certificate_of(rank, ExpectedTraining(reference=reference, clip=CLIP), plain, averages=True)
    made["own parameter"] = certificate_of(rank, ExpectedTraining(), leaving_out)
    made["rounded first"] = certificate_of(rank, ExpectedTraining(reference=reference, clip=CLIP), rounded)
    made["low masters"] = certificate_of(rank, ExpectedTraining(), partial(sharded, dtype=torch.bfloat16))
    made["local norm"] = certificate_of(rank, ExpectedTraining(clip=CLIP), sharded, local_norm=True)
    unlike = ExpectedTraining(unlike=made["fsdp2, no delay"])
    made["ignored option"] = certificate_of(rank, unlike, sharded, syncs=True)
    made["live option"] = certificate_of(rank, unlike, sharded)
    return {
        name: [f"{row.subject}: {row.found}; {row.why}" for row in one.different] if one else []
        for name, one in made.items()
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("reference")
    torch.manual_seed(0)
    model = build_model(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with zerobench.watch(model, optimizer, to=folder, verify=True):
        train(model, optimizer, range(2))
    result: dict[str, list[str]] = run_ranks(2, judged, folder)[0]
    return result


@pytest.mark.parametrize("name", [*HONEST, "mixed", "live option", "own loop", "own parameter", "rounded first"])
def test_an_honest_loop_gets_no_accusation(name: str, found: dict[str, list[str]]) -> None:
    assert found[name] == []


def test_failures_between_ranks_are_named(found: dict[str, list[str]]) -> None:
    for name in ("no delay", "fsdp2, no delay"):  # the same collectives in each micro-batch
        (again,) = found[name]
        said, each = again.split(" times: ")[0], re.findall(r"1 \(([\d,]+ collectives, [\d,]+ bytes)\)", again)
        assert said == "each gradient is reduced over the ranks: 2"
        assert len(each) == MICRO
        assert len(set(each)) == 1
        assert ") in its micro-batches, 0 (" in again
    diverged, *later = found["noise"]
    assert diverged.startswith("values of all 40 parameters on all ranks: they differ in ")
    assert later == []
    assert "it is 2 times the reference's, as a sum over 2 ranks in place of the mean" in found["sum"][0]
    assert [line.split(" bytes in ")[1] for line in found["ignored wire"]] == ["float32; it is declared"]
    *dtypes, lost = found["low masters"]
    assert [line.split(";")[0] for line in dtypes] == [
        f"{kind} of all 40 parameters: bfloat16" for kind in ("masters", "moments")
    ]
    assert "norm.weight" in lost  # 1 + the learning rate is 1 in bf16
    assert ": never changed;" in lost
    assert [line.split(":")[0] for line in found["local norm"]] == ["after backward → at the update"]
    assert [line.split(": ")[1] for line in found["ignored option"]] == ["this option changed nothing"]
