"""Ranks and passes become one row: the fullest rank, the slowest rank, warm-up apart, passes compared."""

import math
from dataclasses import replace

import pytest

from tests.cells import cell
from zerobench.config.schema import Measure
from zerobench.rank_record import RankRecord
from zerobench.records import CATEGORIES, MemoryRow, RunRow, StepRow, TrafficRow
from zerobench.results import tables
from zerobench.results.summary import summarize
from zerobench.sweep.aggregate import (
    COLUMNS,
    TIMES,
    TRAINING,
    JoinedColumn,
    _agree,
    _fullest_node,
    _join_norms,
    join_columns,
)
from zerobench.sweep.cell import new_row, run_cell
from zerobench.theory.shapes import Schedule


def row():
    return new_row(cell("zero2", 2))


def record(rank: int, mode: str, losses: list[float], seconds: list[float]) -> RankRecord:
    steps = [
        StepRow(rank, mode, number, number < 2, loss, s, s / 2, s / 4, s / 4)
        for number, (loss, s) in enumerate(zip(losses, seconds, strict=True))
    ]
    schedule = Schedule((), (), (), 1, ())
    return RankRecord(rank=rank, mode=mode, steps=steps, process_memory={}, schedule=schedule, wall_s=20.0 - rank)


def fill(row: RunRow, columns: dict[str, JoinedColumn], *records: RankRecord, steps: int = 1) -> None:
    """Fills columns of a row from the records of its passes."""
    passes = {mode: [one for one in records if one.mode == mode] for mode in ("timed", "accounted", "traced")}
    join_columns(row, columns, passes, steps)


def test_the_slowest_rank_of_each_step_after_warm_up() -> None:
    one = row()
    ranks = [record(0, "timed", [1.0] * 5, [90, 90, 1, 5, 3]), record(1, "timed", [1.0] * 5, [99, 99, 2, 4, 9])]
    fill(one, TIMES, *ranks)
    assert (one.step_s, one.wall_s) == (5, 20)


def with_memory(rank: int, memory: list[MemoryRow]) -> RankRecord:
    made = record(rank, "accounted", [1.0], [1.0])
    total = [] if any(one.category == "total" for one in memory) else [MemoryRow(rank, "step", "total", 1, 1, 1)]
    made.memory.extend([*memory, *total])
    return made


def test_passes_that_differ_in_one_bit_are_told() -> None:
    losses = [3.0, 2.0, 1.0]
    timed = [record(rank, "timed", losses, [1.0] * 3) for rank in (0, 1)]
    same = [record(rank, "accounted", losses, [1.0] * 3) for rank in (0, 1)]
    other = [same[0], record(1, "accounted", [3.0, 2.0, 1.0000000000000002], [1.0] * 3)]
    one = row()
    fill(one, TRAINING, *timed)
    assert (one.loss_first, one.loss_last) == (3.0, 1.0)
    assert [_agree(passes) for passes in ([timed, same], [timed, other], [timed])] == [True, False, None]
    assert _agree([timed, same, other]) is False


def test_memory_is_that_of_the_fullest_rank() -> None:
    def rows(rank: int, size: int) -> list[MemoryRow]:
        parts = [MemoryRow(rank, "step", c, size, size, size + rank) for c in CATEGORIES]
        return [*parts, MemoryRow(rank, "step", "states", 5 * size, 5 * size, 5 * size),
                MemoryRow(rank, "step", "total", 8 * size, 8 * size, 8 * size),
                MemoryRow(rank, "update", "total", size, size, size + 7),
                MemoryRow(rank, "between", "activations", 0, 0, 50 - size),
                MemoryRow(rank, "step", "outside_ledger", None, None, 25 - 3 * size)]  # fmt: skip

    one = row()
    fill(one, COLUMNS, *(with_memory(rank, rows(rank, size)) for rank, size in enumerate((10, 30, 20))))
    assert (one.peak_bytes, one.states_bytes) == (240, 150)
    assert one.peak_optimizer_bytes == 30
    assert one.max_inputs_bytes == 31
    assert (one.update_peak_bytes, one.between_steps_activations_bytes) == (37, 40)
    assert one.outside_ledger_bytes == -65, "a rank above the allocator is not hidden by another below it"


def test_replicas_of_a_gradient_count_once_in_its_norm() -> None:
    for holders, norm in ((1, 5.0), (2, 5 / math.sqrt(2))):
        ranks = [record(rank, "accounted", [1.0], [1.0]) for rank in (0, 1)]
        for one, squares in zip(ranks, (9.0, 16.0), strict=True):
            one.gradient_holders, one.steps[0].grad_squares = holders, squares
        _join_norms(ranks)
        assert [one.steps[0].grad_norm for one in ranks] == [pytest.approx(norm)] * 2


def test_bytes_on_the_wire_are_the_mean_over_the_ranks_and_payload_that_of_the_rank_with_most() -> None:
    def sent(rank: int, size: int) -> RankRecord:
        of_step = TrafficRow(
            rank, 2, "backward", "send", "reduce_scatter", "reduce_scatter", "bucket 0", "float32", 2, 1, size // 4,
            size, size / 2, size / 4, control=False, known=True,
        )  # fmt: skip
        one = with_memory(rank, [])
        one.traffic.extend([of_step, replace(of_step, step=3), replace(of_step, control=True)])
        return one

    one = row()
    one.psi = 100
    fill(one, COLUMNS, sent(0, 400), sent(1, 800), steps=2)
    assert (one.payload_bytes, one.wire_bytes, one.control_bytes) == (800, 300, 400)
    assert one.volume_psi == one.volume_reduce_scatter_psi == 1.5, "the mean, as matrices may have uneven owners"


@pytest.mark.parametrize(
    ("per_node", "is_simulated", "expected"),
    [
        (4, False, 10 + 40 + 30 + 25),
        (2, False, 30 + 25),  # not the fullest rank's node, and not the sum of all
        (1, False, 40),
        (4, True, 4 * 105),  # every rank is as the one that ran
    ],
)
def test_host_memory_is_that_of_the_fullest_node(per_node: int, is_simulated: bool, expected: int) -> None:
    assert _fullest_node({0: 10, 1: 40, 2: 30, 3: 25}, per_node, is_simulated) == expected


@pytest.mark.slow
def test_one_pass_alone_has_what_it_measures(tmp_path) -> None:
    """Timed: times, losses and a prediction; accounted: bytes, volumes and the same losses."""
    timed, accounted = (
        run_cell(cell("zero2", 2, results_dir=str(tmp_path), measure=Measure(3, 2, passes=passes)), lambda _: None)
        for passes in ("timed", "accounted")
    )
    assert timed.cell_id != accounted.cell_id
    assert timed.loss_last == accounted.loss_last
    assert [one.passes_agree for one in (timed, accounted)] == [None, None]
    assert (timed.peak_bytes, timed.volume_psi, accounted.step_s, accounted.resident_bytes) == (None,) * 4
    assert timed.step_s
    assert accounted.peak_bytes
    assert accounted.volume_psi
    assert timed.predicted_states_bytes == accounted.predicted_states_bytes
    assert set(tables.load(tmp_path / accounted.run_id).steps["mode"]) == {"accounted"}
    assert list(summarize(tables.load(tmp_path).runs)["passes_agree"].isna()) == [True, True]
