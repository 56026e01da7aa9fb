"""Gradients of several micro-batches add up, wherever they lie until the update, as in plain torch."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zerobench.zero import NvmeOffload, Offload, initialize

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
