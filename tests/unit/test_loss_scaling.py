"""Steps whose gradients overflow are left out, whoever decides it: the optimizer on the device, or the host."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from zerobench.zero import initialize
from zerobench.zero.precision import LOOKS_ITSELF, LossScaler, LossScaling, is_fused

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
    found = [0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0]
    policy = LossScaling(initial=1024.0, interval=3, minimum=2.0**-10)
    ours = LossScaler(policy, torch.device("cpu"))
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    parameter = nn.Parameter(torch.zeros(1))
    for overflowed in found:
        with ours.judging(optim.SGD([parameter]), lambda value=float(overflowed): torch.tensor(value)) as skips:
            assert skips == bool(overflowed)
        optimizer = optim.SGD([parameter])
        theirs.scale(parameter.sum() * 1.0).backward()
        parameter.grad.fill_(math.inf if overflowed else 1.0)
        theirs.step(optimizer)
        theirs.update()
        parameter.grad = None
        assert ours.scale == theirs.get_scale()
