"""Forwards in other places than one before each backward: several in an autocast, several before backwards."""

from __future__ import annotations

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


def engine_for(strategy: str) -> Any:
    torch.manual_seed(0)
    model = Stack()
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
