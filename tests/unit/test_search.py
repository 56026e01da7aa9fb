"""The search under a memory limit, against a machine that is made up."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.cells import cell, sound
from zerobench.config.cell import Cell
from zerobench.config.schema import Search as SearchConfig
from zerobench.records import RunRow
from zerobench.sweep.cell import new_row
from zerobench.sweep.search import combinations, is_search, run_searches

MIB = 2**20


@dataclass
class MadeUp:
    """Runs a cell by formula: 10 MiB, 4 a sequence (1 if recomputed), 5 more for DDP while it accumulates."""

    status: str = "ok"
    limit: int = 1000 * MIB
    more_later: int = 0  # bytes of a launch that measures again
    rows: list[RunRow] = field(default_factory=list)
    stopped: bool = False

    def run(self, cells: list[Cell], first: int = 0) -> None:
        rounds = max((one.config.measure.repeats for one in cells), default=0)
        self.rows += [self.row(one, first + repeat) for repeat in range(rounds) for one in cells]

    def row(self, one: Cell, repeat: int) -> RunRow:
        config = one.config
        recomputed = config.model.checkpointing
        size, parts = config.micro_batch, config.accumulation
        peak = 10 * MIB + size * (1 if recomputed else 4) * MIB + (self.more_later if repeat else 0)
        peak += 5 * MIB * (config.strategy.name == "ddp" and parts > 1)
        row = replace(new_row(replace(one, repeat=repeat)), run_id=f"{one.cell_id}-{repeat}", passes_agree=True)
        if self.status != "ok" or peak > self.limit:
            return replace(row, status="oom" if peak > self.limit else self.status, reason="made up")
        step = (1.0 + 0.1 * parts) * (1.3 if recomputed else 1.0) * (1 + 0.01 * repeat)
        times = {"step_s": step, "forward_s": step, "backward_s": step, "update_s": step}
        speed = config.batch * config.sequence / step
        return replace(row, **times, status="ok", peak_bytes=peak, tokens_per_s=speed)


def search_cell(strategy: str, limit: str, tmp_path: Any, **more: Any) -> Cell:
    asked = SearchConfig(memory_limit=limit, repeats=3)
    return sound(strategy, 2, "tiny", batch=16, search=asked, results_dir=str(tmp_path), **more)


def test_combinations_are_all_ways_to_split_the_batch(tmp_path) -> None:
    plain, recomputed = combinations(search_cell("zero2", "1 GiB", tmp_path))
    assert [(one.config.micro_batch, one.config.accumulation) for one in plain] == [(1, 8), (2, 4), (4, 2), (8, 1)]
    assert all(one.config.batch == 16 for one in (*plain, *recomputed))
    assert [one.config.model.checkpointing for one in recomputed] == [True] * 4
    assert not any(is_search(one) for one in plain)
    assert plain[0].cell_id == cell("zero2", 2, "tiny", micro_batch=1, accumulation=8).cell_id


@pytest.mark.shown(1)
@pytest.mark.parametrize(
    ("strategy", "limit", "best"),
    [
        ("zero2", "15 MiB", (4, 2, True)),
        ("zero2", "1 GiB", (8, 1, False)),
        ("zero2", "30 MiB", (4, 2, False)),
        ("ddp", "18 MiB", (8, 1, True)),
        ("ddp", "15 MiB", None),
    ],
)
def test_the_fastest_that_fits_is_found(tmp_path, strategy: str, limit: str, best: tuple | None) -> None:
    """Checked against all combinations, with the confirmed time."""
    asked = search_cell(strategy, limit, tmp_path)
    (found,) = run_searches([asked], MadeUp())
    if best is None:
        assert found.status == "nothing_fits"
        assert found.reason == "needs at least 16.0 MiB, and the limit is 15.0 MiB"
        return
    every = [MadeUp().row(one, 2) for ladder in combinations(asked) for one in ladder]
    fitting = [row for row in every if row.peak_bytes <= found.limit_bytes]
    fastest = max(fitting, key=lambda row: row.tokens_per_s)
    assert (found.micro_batch, found.accumulation, found.checkpointing) == best
    assert (fastest.micro_batch, fastest.accumulation, bool(fastest.checkpointing)) == best
    assert found.peak_bytes == fastest.peak_bytes
    assert found.tokens_per_s == pytest.approx(fastest.tokens_per_s, rel=1e-3)
    assert found.tokens_per_s_low < found.tokens_per_s < found.tokens_per_s_high
    assert len(found.run_ids.split()) == 3


def test_running_out_of_memory_is_not_fitting_and_crashes_are_told(tmp_path) -> None:
    (found,) = run_searches([search_cell("zero2", "1 GiB", tmp_path)], MadeUp(limit=20 * MIB))
    assert (found.status, found.checkpointing) == ("found", False)
    (found,) = run_searches([search_cell("zero2", "1 GiB", tmp_path)], MadeUp("crash"))
    assert (found.status, found.reason) == ("nothing_fits", "crash: made up")


@pytest.mark.parametrize(("more", "best"), [(2, (2, 4, False)), (20, None)])
def test_a_combination_that_exceeds_the_limit_when_measured_again_does_not_fit(tmp_path, more: int, best: Any) -> None:
    """At first 4 x 2 alone is within a tenth of the fastest, with 26 MiB."""
    (found,) = run_searches([search_cell("zero2", "27 MiB", tmp_path)], MadeUp(more_later=more * MIB))
    assert best in (None, (found.micro_batch, found.accumulation, found.checkpointing))
    assert found.reason == ("" if best else "needs at least 31.0 MiB, and the limit is 27.0 MiB")
