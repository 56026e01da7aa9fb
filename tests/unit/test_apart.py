"""Tensors that lived before are left out of a watch, unless its loop uses them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zerobench
from zerobench.watching.held_tensors import is_apart, leave_out

OTHERS = 4096


def peak_beside(others: list[torch.Tensor], used: bool) -> int:
    """The peak of a loop beside other tensors, whose first one it uses or not."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zerobench.watch(model, optimizer) as watch:
        for _ in range(3):
            batch = others[0][:8].view(2, 4) if used else torch.ones(2, 4)
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert watch.results is not None
    return int(watch.results.runs["peak_bytes"].iloc[0])


@pytest.mark.thorough
def test_what_lives_before_is_counted_only_where_the_loop_uses_it() -> None:
    others = [torch.zeros(OTHERS // 4), torch.zeros(OTHERS // 4)]
    with leave_out():
        alone, using = peak_beside(others, used=False), peak_beside(others, used=True)
        younger = torch.zeros(OTHERS // 4)
        beside_younger = peak_beside([younger], used=False)
    assert using - alone == OTHERS - 32, "the first one, in place of a batch of 32 bytes"
    assert beside_younger - alone == OTHERS
    del younger
    before = peak_beside(others, used=False)  # with what other tests have left in this process
    others.append(torch.zeros(OTHERS // 4))
    assert peak_beside(others, used=False) - before == OTHERS, "outside of the block all are counted"
    assert not is_apart(others[0])
