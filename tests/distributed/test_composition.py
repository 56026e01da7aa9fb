"""All that composes trains the same: a combination for every pair of choices, against the plain stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import compositions
from tests.distributed import composed
from tests.ranks import run_ranks


@pytest.mark.parametrize("n", [2, *(pytest.param(n, marks=pytest.mark.thorough) for n in (4, 1))])
def test_every_pair_of_choices_trains_as_the_plain_stage_does(n: int, tmp_path: Path) -> None:
    """That it is every pair: tests/unit/test_composition.py."""
    rows = compositions.coverings()[n]
    for wrong in run_ranks(n, composed.compare_all, rows, str(tmp_path), timeout_s=300):
        assert not wrong, "\n".join(wrong)
