"""Forwards in other places than one before each backward: several in an autocast, several before backwards."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from tests.ranks import run_ranks
from zerobench import initialize

STRATEGIES = ("zero1", "zero2", "zero3", "megatron")
STEPS = 3


class Stack(nn.Module):
    """A root of its own parameters around blocks of unequal size."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 12)
        self.blocks = nn.ModuleList([nn.Linear(12, 20), nn.Linear(20, 12), nn.Linear(12, 12)])
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.first(x))
        for block in self.blocks:
            h = torch.tanh(block(h))
        return self.head(h)


def data(rank: int, number: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * rank + number))


def engine_for(strategy: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = Stack().to(dtype)
    return initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), strategy, bucket_bytes=1024)


def half() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


def distil(strategy: str, rank: int, around: Callable[[], Any], inside: Callable[[], Any]) -> list[torch.Tensor]:
    """A pass without gradients, then one with, `inside` each; `around` it all."""
    engine, losses = engine_for(strategy), []
    with around():
        for step in range(STEPS):
            x = data(rank, step)
            with inside(), torch.no_grad():
                target = engine(x)
            with inside():
                loss = (engine(x) - 0.5 * target).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
    return [*losses, *engine.full_state_dict().values()]


def everything_in_one_autocast(rank: int, n: int) -> list[str]:
    wrong = []
    for strategy in STRATEGIES:
        mine = distil(strategy, rank, half, nullcontext)
        expected = distil(strategy, rank, nullcontext, half)
        if not all(torch.equal(one, other) for one, other in zip(mine, expected, strict=True)):
            wrong.append(strategy)
    return wrong


def test_whole_loops_in_one_autocast_train_as_with_one_for_each_forward() -> None:
    assert run_ranks(2, everything_in_one_autocast) == [[], []]


def several(strategy: str, rank: int, backwards: str) -> list[torch.Tensor]:
    """Two forwards before backwards: one for each, in their order or the other, through their sum, or one by one.

    In fp64: a gradient of the sum is rounded elsewhere, and Adam makes of one rounding of a small gradient 1e-5.
    """
    engine, losses = engine_for(strategy, torch.float64), []
    for step in range(STEPS):
        inputs = [data(rank, 2 * step + micro).double() for micro in range(2)]
        if backwards == "one by one":
            for x in inputs:
                losses.append(engine(x).square().mean())
                engine.backward(losses[-1])
        else:
            pair = [engine(x).square().mean() for x in inputs]
            losses += pair
            order = {"in order": pair, "the last first": pair[::-1], "sum": [pair[0] + pair[1]]}[backwards]
            for loss in order:
                engine.backward(loss)
        engine.clip_grad_norm_(1.0)
        engine.step()
    return [*(loss.detach() for loss in losses), *engine.full_state_dict().values()]


def two_forwards(rank: int, n: int) -> list[str]:
    wrong = []
    for strategy in STRATEGIES:
        expected = several(strategy, rank, "one by one")
        for backwards in ("in order", "the last first", "sum"):
            for mine, other in zip(several(strategy, rank, backwards), expected, strict=True):
                if not torch.allclose(mine, other, rtol=1e-12, atol=0.0):
                    wrong.append(f"{strategy} {backwards}")
    return wrong


def gone_through(rank: int, n: int) -> list[str]:
    """Returns the errors of a second backward through a forward, and of a backward through a forward before a step."""
    said = []
    for before in ("backward", "step"):
        engine = engine_for("zero3")
        first, second = (engine(data(rank, number)).square().mean() for number in range(2))
        engine.backward(second + (first if before == "backward" else 0))
        if before == "step":
            engine.step()
        try:
            engine.backward(first)
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_two_forwards_before_two_backwards_train_as_one_after_the_other() -> None:
    assert run_ranks(2, two_forwards) == [[], []]


def test_a_forward_is_gone_through_once_and_before_a_step() -> None:
    for again, late in run_ranks(2, gone_through):
        assert "backward through the graph a second time" in again  # torch's own
        assert late.startswith("backward through a forward that a backward has gone through, or a step: zero3")
