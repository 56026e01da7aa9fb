"""All that composes trains the same as the plain stage."""

from pathlib import Path

import pytest

from tests import compositions
from tests.distributed import composed
from tests.ranks import run_ranks


def test_every_choice_of_every_strategy_trains_as_the_plain_stage_does(tmp_path: Path) -> None:
    compare(compositions.by_strategy(2), 2, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("n", [2, 4])
def test_states_of_fewer_bits_go_with_every_choice(n: int, tmp_path: Path) -> None:
    """On four ranks, which take longer, only groups that share a shard."""
    compare([row for row in compositions.low_bit(n) if n == 2 or row["shard_group"] == "2"], n, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize(("n", "count"), [(4, 40), (2, 80), (1, 40)])
def test_combinations_at_random_train_as_the_plain_stage_does(n: int, count: int, tmp_path: Path) -> None:
    compare(compositions.drawn_at_random(n, count), n, tmp_path)


def compare(rows: list[compositions.Combination], n: int, folder: Path) -> None:
    for wrong in run_ranks(n, composed.compare_all, rows, str(folder), timeout_s=300):
        assert not wrong, "\n".join(wrong)
