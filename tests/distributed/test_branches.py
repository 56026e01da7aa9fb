"""Parameters that one rank uses and another does not, in memory that holds NaN wherever nothing was written."""

from typing import Any
from unittest import mock

import torch
from torch import nn

from tests.ranks import run_ranks
from zerobench.zero import initialize
from zerobench.zero.arena import Heap

LR = 0.5


class Branches(nn.Module):
    """Rank r runs branch r; a third is run by no rank, and a shared layer by all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(15, 15)
        self.branches = nn.ModuleList(nn.Linear(15, 15) for _ in range(3))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.branches[rank](self.shared(x)).square().mean()


def poisoned(make: Any) -> Any:
    def made(heap: Heap, *args: Any) -> Any:
        found = make(heap, *args)
        (args[0] if found is None else found).fill_(torch.nan)
        return found

    return made


def inputs(rank: int) -> torch.Tensor:
    return torch.randn(5, 15, generator=torch.Generator().manual_seed(rank))


def step(rank: int, n: int, stage: str) -> dict[str, torch.Tensor]:
    """The state after a step. Weight decay would move whatever is updated."""
    module = Branches()
    optimizer = torch.optim.SGD(module.parameters(), lr=LR, weight_decay=0.1)
    with mock.patch.multiple(Heap, take=poisoned(Heap.take), restore=poisoned(Heap.restore)):
        engine = initialize(module, optimizer, stage, bucket_bytes=1024)
        engine.backward(engine(inputs(rank), rank))
        engine.step()
    return engine.full_state_dict()


def steps(rank: int, n: int) -> dict[str, dict[str, torch.Tensor]]:
    return {stage: step(rank, n, stage) for stage in ("zero1", "zero2")}


def expected(n: int) -> dict[str, torch.Tensor]:
    """By hand: the mean of all ranks' gradients; what no rank has used stays as it is."""
    module = Branches()
    sum(module(inputs(rank), rank) for rank in range(n)).backward()
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad /= n
    torch.optim.SGD(module.parameters(), lr=LR, weight_decay=0.1).step()
    return module.state_dict()


def test_what_a_rank_did_not_use_counts_as_zero_there_and_what_none_used_stays() -> None:
    right = expected(2)
    for mine in run_ranks(2, steps):
        for stage, state in mine.items():
            for name, value in right.items():
                torch.testing.assert_close(state[name], value, msg=f"{stage} {name}")
