"""Ranks and passes become one row: the fullest rank, the slowest rank, warm-up apart, passes compared."""

from __future__ import annotations

from tests.cells import cell
from zerobench import tables
from zerobench.cell import run_cell
from zerobench.config import Measure
from zerobench.join import _join_losses, _join_memory, _join_time, _losses, median_interval
from zerobench.records import CATEGORIES, MemoryRow, StepRow
from zerobench.summary import summarize
from zerobench.worker import RankRecord


def row():
    from zerobench.cell import _blank_row

    return _blank_row(cell("zero2", 2))


def record(rank: int, mode: str, losses: list[float], seconds: list[float]) -> RankRecord:
    steps = [
        StepRow(rank, mode, number, number < 2, loss, s, s / 2, s / 4, s / 4)
        for number, (loss, s) in enumerate(zip(losses, seconds, strict=True))
    ]
    return RankRecord(rank, mode, steps, {}, None, [], [], [], [])  # type: ignore[arg-type]


def test_the_slowest_rank_of_each_step_after_warm_up() -> None:
    one = row()
    _join_time(
        one, [record(0, "timed", [1.0] * 5, [90, 90, 1, 5, 3]), record(1, "timed", [1.0] * 5, [99, 99, 2, 4, 9])]
    )
    assert one.step_s == 5
    assert one.tokens_per_s == one.batch * one.sequence / 5


def test_passes_that_differ_in_one_bit_are_told() -> None:
    losses = [3.0, 2.0, 1.0]
    timed = [record(rank, "timed", losses, [1.0] * 3) for rank in (0, 1)]
    same = [record(rank, "accounted", losses, [1.0] * 3) for rank in (0, 1)]
    other = [same[0], record(1, "accounted", [3.0, 2.0, 1.0000000000000002], [1.0] * 3)]
    one = row()
    _join_losses(one, timed)
    assert (one.loss_first, one.loss_last) == (3.0, 1.0)
    assert _losses(timed) == _losses(same)
    assert _losses(timed) != _losses(other)


def test_memory_is_that_of_the_fullest_rank() -> None:
    def rows(rank: int, size: int) -> list[MemoryRow]:
        parts = [MemoryRow(rank, "step", c, size, size, size + rank) for c in CATEGORIES]
        return [*parts, MemoryRow(rank, "step", "states", 5 * size, 5 * size, 5 * size),
                MemoryRow(rank, "step", "total", 8 * size, 8 * size, 8 * size)]  # fmt: skip

    one = row()
    _join_memory(one, [*rows(0, 10), *rows(1, 30), *rows(2, 20)])
    assert (one.peak_bytes, one.states_bytes) == (240, 150)
    assert one.peak_optimizer_bytes == 30
    assert one.max_inputs_bytes == 31


def test_interval_of_the_median_by_order_statistics() -> None:
    assert median_interval([float(v) for v in range(1, 11)]) == (2.0, 9.0)
    assert median_interval([1.0, 2.0, 3.0]) == (None, None)


def test_one_pass_alone_has_what_it_measures(tmp_path) -> None:
    """Timed: times, losses and a prediction; accounted: bytes, volumes and the same losses."""
    both, timed, accounted = (
        run_cell(cell("zero2", 2, results_dir=str(tmp_path), measure=Measure(3, 2, passes=passes)), lambda _: None)
        for passes in ("both", "timed", "accounted")
    )
    assert len({both.cell_id, timed.cell_id, accounted.cell_id}) == 3
    assert both.loss_last == timed.loss_last == accounted.loss_last
    assert [one.passes_agree for one in (both, timed, accounted)] == [True, None, None]
    assert (timed.peak_bytes, timed.volume_psi, accounted.step_s, accounted.resident_bytes) == (None,) * 4
    assert timed.step_s
    assert (accounted.peak_bytes, accounted.volume_psi) == (both.peak_bytes, both.volume_psi)
    assert timed.predicted_states_bytes == both.predicted_states_bytes == accounted.predicted_states_bytes
    assert set(tables.load(tmp_path / accounted.run_id).steps["mode"]) == {"accounted"}
    summarized = summarize(tables.load(tmp_path).runs)
    assert list(summarized["passes_agree"].isna()) == [False, True, True]


def test_what_is_not_a_pass_is_a_sentence() -> None:
    (problem,) = cell("zero2", 2, measure=Measure(3, 2, passes="none")).problems
    assert problem == "measure.passes=none: use one of both, timed, accounted"
    simulated = cell("zero2", 2, measure=Measure(3, 2, passes="timed"), backend="simulated")
    assert simulated.problems == ("measure.passes=timed: backend=simulated has no times; use accounted",)
    assert cell("zero2", 2, draw_on="disk").problems == ("draw_on=disk: use one of cpu, device",)
