"""Checkpoints know nothing of tiers: what one wrote any other loads, to the bit, and training goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import tiers
from tests.ranks import run_ranks


@pytest.mark.thorough
@pytest.mark.parametrize("back", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_checkpoints_go_from_tier_to_tier_and_from_4_ranks_to_2_and_back(back: bool, tmp_path: Path) -> None:
    kinds = len(tiers.RESHARDED)
    run_ranks(4, tiers.save_all, str(tmp_path))
    assert run_ranks(2, tiers.load_all, str(tmp_path), False) == [3 * kinds] * 2
    if back:
        assert run_ranks(4, tiers.load_all, str(tmp_path), True) == [2 * kinds] * 4


@pytest.mark.thorough
def test_every_way_to_keep_a_state(tmp_path: Path) -> None:
    run_ranks(2, tiers.dicts, str(tmp_path))


@pytest.mark.thorough
def test_an_update_that_is_pending_is_part_of_the_state(tmp_path: Path) -> None:
    run_ranks(2, tiers.late, str(tmp_path))
