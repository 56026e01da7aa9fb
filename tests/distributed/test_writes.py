"""Writes to parameters beside the optimizer, on real ranks: they count, or are refused in a sentence."""

from pathlib import Path

import pytest
import torch

from tests.distributed import writes
from tests.ranks import run_ranks


@pytest.mark.parametrize("n", [*(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 2)), 3])
def test_what_is_written_is_trained(n: int, tmp_path: Path, thorough: bool) -> None:
    """In every run, as below, of every other engine."""
    assert len(set(run_ranks(n, writes.every_way, str(tmp_path), 1 if thorough else 2))) == 1


def test_what_is_not_written_stays(tmp_path: Path, thorough: bool) -> None:
    run_ranks(2, writes.untouched, str(tmp_path), 1 if thorough else 2)


@pytest.mark.thorough
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.thorough), 3])
def test_weights_from_the_disk_become_masters_and_parameters(n: int, tmp_path: Path) -> None:
    run_ranks(n, writes.weights_from_disk, str(tmp_path))


def test_writes_inside_the_forward_count_in_every_stage() -> None:
    for found in run_ranks(2, writes.inside_forward):
        for dtype in ("float32", "bfloat16"):
            (losses, state), *others = [value for name, value in found.items() if name.endswith(dtype)]
            for other, weights in others:
                assert other == losses
                assert all(torch.equal(value, weights[name]) for name, value in state.items())
                assert max(value.abs().max() for name, value in state.items() if "weight" in name) < 0.2


def test_writes_that_a_forward_would_lose_are_refused(tmp_path: Path) -> None:
    run_ranks(2, writes.lost_inside_forward, str(tmp_path))


def test_writes_to_param_groups_are_refused_until_all_ranks_take_them(tmp_path: Path, thorough: bool) -> None:
    run_ranks(2, writes.to_param_groups, str(tmp_path), 1 if thorough else 2)


def test_parameters_in_parts_are_not_written_to_in_silence() -> None:
    run_ranks(2, writes.sharded)
