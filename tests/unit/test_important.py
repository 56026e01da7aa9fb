"""An update in two parts, the important elements first, is the whole update."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cells import cell
from zerobench.config.schema_memory import CpuOffload
from zerobench.config.schema_training import Adamw8bit, AdamwBf16, Muon
from zerobench.zero import Offload, initialize
from zerobench.zero.low_bit import AdamW8bit, AdamWBf16, LowBitAdamW
from zerobench.zero.optim.important import important, others_alone, update_important
from zerobench.zero.optim.segments import ELEMENTWISE
from zerobench.zero.optim.step_by_tiles import raw_step
from zerobench.zero.precision import Share

NUMEL = 647


class OneShare(Share):
    def __init__(self, master: torch.Tensor) -> None:
        super().__init__(master)
        self.given: torch.Tensor | None = None

    def gradient(self) -> torch.Tensor | None:
        return self.given


def trained(kind: type, fraction: float | None, steps: int = 4) -> tuple[torch.Tensor, dict[str, Any]]:
    """Weights and states after some updates, each whole or in two parts."""
    share = OneShare(torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)))
    more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind([share.tensor], lr=1e-2, **more)
    for step in range(steps):
        share.given = torch.randn(NUMEL, generator=torch.Generator().manual_seed(10 + step))
        if fraction is not None:
            update_important(optimizer, [share], 0.5, fraction)
            assert share.given.isnan().any() == (step > 0 or kind is torch.optim.Adagrad)  # states must be there
        share.tensor.grad = share.given * 0.5
        if fraction is None:
            raw_step(optimizer)
        else:
            with others_alone(optimizer, [share]):
                raw_step(optimizer)
    return share.tensor.detach(), optimizer.state[share.tensor]


@pytest.mark.parametrize("kind", [kind for kind in ELEMENTWISE if not issubclass(kind, LowBitAdamW)])
def test_two_parts_are_the_whole(kind: type) -> None:
    whole, states = trained(kind, None)
    for fraction in (0.01, 0.35, 1.0):
        found, others = trained(kind, fraction)
        assert torch.allclose(found, whole, rtol=0, atol=1e-7)
        for key, value in states.items():
            assert value is None or torch.allclose(others[key], value, rtol=1e-6), key


def test_the_largest_elements_are_important() -> None:
    gradient = torch.arange(10.0) - 4
    gradient[2] = torch.nan
    assert set(important(gradient, 0.25).tolist()) == {2, 8, 9}
    assert sorted(important(gradient.bfloat16(), 1.0).tolist()) == list(range(10))
    assert important(gradient[:0], 0.1).numel() == 0


@pytest.mark.parametrize("optimizer", [Adamw8bit(), AdamwBf16(), Muon()])
def test_optimizers_of_blocks_and_matrices_are_refused(optimizer: Any) -> None:
    problems = cell("zero2", 2, optimizer=optimizer, offload=CpuOffload(delayed=True, on_time=0.35)).problems
    assert f"offload.on_time=0.35: optimizer={optimizer.name} does not update single elements" in " ".join(problems)


@pytest.mark.parametrize("kind", [AdamW8bit, AdamWBf16])
def test_the_engine_refuses_them_as_well(kind: type) -> None:
    model = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"on_time: Adam\w+ is not an elementwise torch optimizer"):
        initialize(model, kind(model.parameters()), "zero2", offload=Offload(delayed_after=0, on_time=0.35))
