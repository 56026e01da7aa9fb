"""Norms, clipping, loss scales, overflows, masters, micro-batches: the engine beside torch's own, in one process."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from zerobench.zero import NvmeOffload, Offload, initialize
from zerobench.zero.precision import (
    LOOKS_ITSELF,
    GradientScaling,
    LossScaling,
    clip_coefficient,
    is_fused,
    root_of_powers,
    sum_of_powers,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_the_norm_of_several_tensors_is_torchs(norm_type: float) -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(size)) for size in (3, 70_000, 1)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    gradients = [p.grad for p in parameters if p.grad is not None]
    ours = root_of_powers(sum_of_powers(gradients, norm_type, CPU), norm_type)
    theirs = nn.utils.get_total_norm([g.double() for g in gradients], norm_type)
    assert float(ours) == pytest.approx(float(theirs), rel=1e-12)


@pytest.mark.parametrize("size", [0.25, 1.0, 4.0])
def test_gradients_are_clipped_as_by_torch(size: float) -> None:
    """Gradients with a norm below the limit stay as they are."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.full((1,), size)
    nn.utils.clip_grad_norm_([parameter], 1.0)
    assert torch.equal(parameter.grad, size * clip_coefficient(torch.tensor(size), 1.0).reshape(1))


def trained(scaling: LossScaling | None, dtype: torch.dtype, lr: float, steps: int, stage: str) -> torch.Tensor:
    """The weight of a linear module, 1 in the beginning, after steps of SGD on losses whose gradient is 1."""
    module = nn.Linear(16, 1, bias=False).to(dtype)
    nn.init.ones_(module.weight)
    engine = initialize(module, optim.SGD(module.parameters(), lr=lr), stage, loss_scaling=scaling)
    for _ in range(steps):
        engine.backward(engine(torch.ones(1, 16, dtype=dtype)).float().sum())
        engine.step()
    return engine.full_state_dict()["weight"]


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_a_loss_scale_is_out_of_the_gradients_before_the_update(stage: str) -> None:
    """Scales are powers of two, so that nothing is rounded by them."""
    with_scale = trained(LossScaling(initial=256.0), torch.float16, 2.0**-4, 3, stage)
    assert torch.equal(with_scale, trained(None, torch.float16, 2.0**-4, 3, stage))
    assert torch.equal(with_scale, torch.full((1, 16), 1 - 3 * 2.0**-4, dtype=torch.float16))


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_updates_that_half_precision_would_round_away_add_up_in_masters(stage: str) -> None:
    """1 - 2^-10 is 1 in bfloat16, and 1 - 2^-5 is not."""
    assert torch.equal(trained(None, torch.bfloat16, 2.0**-10, 1, stage), torch.ones(1, 16, dtype=torch.bfloat16))
    after = trained(None, torch.bfloat16, 2.0**-10, 32, stage)
    assert torch.equal(after, torch.full((1, 16), 1 - 2.0**-5, dtype=torch.bfloat16))


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "on the device": lambda p: optim.AdamW(p, lr=0.1, fused=True),
    "by the host": lambda p: optim.AdamW(p, lr=0.1, foreach=True),
    "by the host, for its momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}


def squared(engine: Any, size: float) -> None:
    """Backward of a loss whose gradient has this size."""
    engine.backward(engine(torch.full((1, 4), size, dtype=torch.float16)).float().sum())


@pytest.mark.parametrize("who", OPTIMIZERS)
def test_a_step_that_overflows_changes_nothing(who: str) -> None:
    torch.manual_seed(0)
    module = nn.Linear(4, 4, bias=False).half()
    optimizer = OPTIMIZERS[who](module.parameters())
    assert (type(optimizer) in LOOKS_ITSELF and is_fused(optimizer)) == (who == "on the device")
    scaling = LossScaling(initial=4.0, interval=2, minimum=1.5)
    engine = initialize(module, optimizer, "zero1", loss_scaling=scaling)
    before = module.weight.detach().clone()
    for scale in (4.0, 2.0, 1.5):
        assert engine.loss_scale == scale
        squared(engine, 60000.0)  # times a scale above 1.1 it is infinite in fp16
        engine.step()
        assert engine.skipped
        assert torch.equal(module.weight, before)
    assert engine.loss_scale == 1.5
    for scale in (1.5, 3.0, 3.0, 6.0):  # grows after every second step that is taken
        before = module.weight.detach().clone()
        squared(engine, 0.5)
        engine.step()
        assert not engine.skipped
        assert module.weight.isfinite().all()
        assert not torch.equal(module.weight, before)
        assert engine.loss_scale == scale


def test_the_scale_is_that_of_torchs_own_scaler() -> None:
    overflows = [0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0]
    norms = iter([math.inf if overflowed else 1.0 for overflowed in overflows])
    policy = LossScaling(initial=1024.0, interval=3, minimum=2.0**-10)
    torch.set_default_dtype(torch.float64)
    try:  # which is the loop's, and not that of the scale
        ours = GradientScaling(policy, torch.device("cpu"), lambda _: torch.tensor(next(norms)))
    finally:
        torch.set_default_dtype(torch.float32)
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    parameter = nn.Parameter(torch.zeros(1))
    for overflowed in overflows:
        with ours.judging(optim.SGD([parameter])) as skips:
            assert skips == bool(overflowed)
        ours.forget()
        optimizer = optim.SGD([parameter])
        theirs.scale(parameter.sum() * 1.0).backward()
        parameter.grad.fill_(math.inf if overflowed else 1.0)
        theirs.step(optimizer)
        theirs.update()
        parameter.grad = None
        assert ours.scaler.scale == theirs.get_scale()


MICRO_BATCHES, STEPS = 3, 2


def module_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 1))


def inputs(step: int, micro: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + micro))


def plain() -> dict[str, torch.Tensor]:
    module = module_of()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            module(inputs(step, micro)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return module.state_dict()


PLACES: dict[str, Any] = {
    "device": lambda _: None,
    "host": lambda _: Offload(),
    "a half in host memory": lambda _: Offload(fraction=0.5),
    "gradients alone in host memory": lambda _: Offload(optimizer=False),
    "files": lambda folder: NvmeOffload(path=str(folder), block_bytes=4096),
}


CASES = [(stage, place) for stage in ("zero1", "zero2", "zero3") for place in PLACES]
CASES.remove(("zero1", "gradients alone in host memory"))  # it has whole gradients until the update


@pytest.mark.parametrize("kept", [False, True], ids=["reduced each", "no_sync"])
@pytest.mark.parametrize(("stage", "place"), CASES)
def test_micro_batches_add_up(stage: str, place: str, kept: bool, tmp_path: Path) -> None:
    offload = PLACES[place](tmp_path)
    module = module_of()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    engine = initialize(module, optimizer, stage, bucket_bytes=1024, offload=offload)
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            with engine.no_sync() if kept and micro < MICRO_BATCHES - 1 else nullcontext():
                engine.backward(engine(inputs(step, micro)).square().mean())
        engine.step()
    state = engine.full_state_dict()
    for name, value in plain().items():
        torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-7, msg=name)
