"""Residual policies: nothing but bytes changes, under any strategy."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import residual
from tests.ranks import run_ranks


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_every_policy_trains_the_same_to_the_bit(n: int) -> None:
    """Dropout, views that share memory, blocks run twice, outputs in dataclasses; an arena, too."""
    models = ["dropping", "tied", "rich"] if n == 1 else ["dropping", "tied"]
    for found in run_ranks(n, residual.train_all, models, ["ddp", "zero2", "zero3"]):
        for (model, strategy, way), (losses, state) in found.items():
            plain_losses, plain_state = found[model, strategy, "none"]
            assert losses == plain_losses, (model, strategy, way)
            different = [key for key in state if not torch.equal(state[key], plain_state[key])]
            assert not different, (model, strategy, way, different)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_in_an_arena_nothing_is_allocated_from_the_second_step_on(strategy: str) -> None:
    """Neither full gradients nor their shards nor the inputs that blocks keep."""
    for without, within in run_ranks(2, residual.made_anew_both, strategy):
        assert all(count >= 4 for count in without)
        assert within[0] >= 4
        assert within[1:] == [0, 0, 0]
