"""Comparisons of two sides: bytes exactly, times with an interval, and why something cannot be compared."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from tests.cells import cell
from zerobench.budgets.comparison import (
    Compared,
    Comparison,
    Judge,
    NoiseFloor,
    compare_runs,
    floor_from,
    measure_effect,
    pair_up,
    read_floors,
    write_floor,
)
from zerobench.config.cell import Cell
from zerobench.config.schema import Launch
from zerobench.records import CATEGORIES, COLLECTIVES, RunRow
from zerobench.results.frames import frame_of
from zerobench.sweep.cell import new_row

MIB = 2**20
Row = dict[str, Any]


def run(of: Cell, repeat: int = 0, step_s: float = 0.1, started: str = "2026-01-01T00:00:00", **more: Any) -> Row:
    """A row that is ok: 8 MiB at the peak, one in each category."""
    row = asdict(new_row(replace(of, repeat=repeat)))
    row |= {f"{kind}_{name}_bytes": MIB for name in CATEGORIES for kind in ("peak", "max")}
    row |= {f"volume_{name}_psi": 0.5 for name in COLLECTIVES}
    row |= {"run_id": f"{of.cell_id}-{started}-{repeat}", "status": "ok", "started": started, "psi": 1000}
    row |= {"peak_bytes": 8 * MIB, "states_bytes": 5 * MIB, "volume_psi": 2.0, "resident_bytes": 500 * MIB}
    row |= {"payload_bytes": 4000, "wire_bytes": 8000, "control_bytes": 0, "loss_first": 5.5, "loss_last": 5.25}
    row |= {"step_s": step_s, "forward_s": step_s / 4, "backward_s": step_s / 2, "update_s": step_s / 4}
    row |= {"tokens_per_s": of.config.batch * 32 / step_s, "passes_agree": True}
    return row | more


def compare(a: list[Row], b: list[Row], floors: list[NoiseFloor] | None = None) -> Comparison:
    return compare_runs(frame_of(a, RunRow), frame_of(b, RunRow), Judge(0.03, floors or []))


def only(found: Comparison) -> Compared:
    assert (len(found.pairs), found.only_a, found.only_b) == (1, [], [])
    return found.pairs[0]


def launches(of: Cell, times: list[float], hour: int, every: int = 2) -> list[Row]:
    """Launches that begin `every` minutes apart."""
    stamps = [f"2026-01-01T{hour:02}:{every * place:02}:00" for place in range(len(times))]
    return [run(of, place, t, stamp) for place, (t, stamp) in enumerate(zip(times, stamps, strict=True))]


def in_turns(of: Cell, a: list[float], b: list[float]) -> tuple[list[Row], list[Row]]:
    """A B, B A, ...: a launch a minute."""
    minutes = [(4 * n + 2 * (n % 2), 4 * n + 2 * (1 - n % 2)) for n in range(len(a))]
    sides = [
        [
            run(of, n, t, f"2026-01-01T{at[side] // 60:02}:{at[side] % 60:02}:00")
            for n, (t, at) in enumerate(zip(times, minutes, strict=True))
        ]
        for side, times in enumerate((a, b))
    ]
    return sides[0], sides[1]


def verdict(a: list[Row], b: list[Row], floors: list[NoiseFloor] | None = None) -> str:
    return only(compare(a, b, floors)).effects[0].verdict


def test_a_run_against_itself_is_equal_to_the_byte_and_noise() -> None:
    row = run(cell("zero1", 2))
    same = only(compare([row], [row]))
    assert same.moved == same.at_peak == same.differs == same.refused == ()
    assert len(same.equal) == 19
    assert all(change.difference == 0 for change in same.losses)
    assert {(effect.ratio, effect.verdict) for effect in same.effects} == {(1.0, "noise")}
    assert not same.worse


def test_the_category_that_moved_is_named() -> None:
    one = cell("zero1", 2)
    more = {"peak_bytes": 9 * MIB, "peak_communication_bytes": 2 * MIB, "max_communication_bytes": 2 * MIB}
    found = only(compare([run(one)], [run(one, **more)]))
    assert [(c.metric, c.difference) for c in found.moved] == [("peak_bytes", MIB), ("max_communication_bytes", MIB)]
    assert [(c.metric, c.difference) for c in found.at_peak] == [("peak_communication_bytes", MIB)]
    assert found.moved[0].relative == 1 / 8
    assert len(found.equal) == 17
    assert found.worse


@pytest.mark.slow
def test_one_byte_is_a_change_unless_launches_of_one_side_differ_by_it() -> None:
    one = cell("zero1", 2)
    a = [run(one), run(one, 1)]
    moved = only(compare(a, [run(one, wire_bytes=8001), run(one, 1, wire_bytes=8002)]))
    assert [(c.metric, c.difference) for c in moved.moved] == [("wire_bytes", 2)]
    b = [run(one), run(one, 1, wire_bytes=8001)]
    unsteady = only(compare(a, b))
    assert unsteady.unsteady == ("wire_bytes differs among launches of one side: 8,000 in A, 8,000 to 8,001 in B",)
    assert (len(unsteady.equal), unsteady.moved, unsteady.worse) == (18, (), False)
    assert len(only(compare(b, b)).equal) == 19


def test_launches_without_bytes_are_compared_by_those_that_have_them() -> None:
    """measure.passes=both_once: a cell's first launch alone counts bytes."""
    one = cell("zero1", 2)
    a = [run(one), run(one, 1, wire_bytes=None)]
    assert "wire_bytes" in only(compare(a, a)).equal
    moved = only(compare(a, [run(one, wire_bytes=8001), run(one, 1, wire_bytes=None)]))
    assert [(c.metric, c.difference) for c in moved.moved] == [("wire_bytes", 1)]


@pytest.mark.shown(1)
@pytest.mark.parametrize(
    ("strategy", "more", "words"),
    [
        ("zero1", {"model": "untied"}, "model.tied is true in A and false in B"),
        ("zero1", {"micro_batch": 8}, "batch is 8 in A and 16 in B"),
        ("zero1", {"sequence": 16}, "sequence is 32 in A and 16 in B"),
    ],
)
def test_other_work_is_not_comparable_and_the_field_is_named(strategy: str, more: Row, words: str) -> None:
    found = only(compare([run(cell("zero1", 2))], [run(cell(strategy, 2, **more), peak_bytes=1)]))
    assert words in found.refused
    assert found.moved == found.effects == found.losses == ()
    assert found.worse


@pytest.mark.thorough
def test_a_strategy_how_a_batch_is_cut_and_recomputing_are_what_is_compared() -> None:
    other = cell("zero2", 2, model="checkpointed", micro_batch=2, accumulation=2)
    found = only(compare([run(cell("zero1", 2))], [run(other, source_hash="new")]))
    assert found.refused == ()
    for words in ("strategy.name is zero1 in A", "accumulation is 1 in A and 2", "model.checkpointing is false in A"):
        assert any(words in sentence for sentence in found.differs)
    assert any(sentence.endswith("and new in B") for sentence in found.differs)


@pytest.mark.shown(1)
@pytest.mark.parametrize(("key", "other"), [("cores", 16), ("processor", "other"), ("backend", "mpi")])
def test_times_of_another_machine_are_not_comparable_and_bytes_are(key: str, other: object) -> None:
    one = cell("zero1", 2)
    there = one.changed(backend=other) if key == "backend" else one
    mine = {} if key == "backend" else {key: other}
    here = {} if key == "backend" else {key: 2 if key == "cores" else "mine"}
    found = only(compare([run(one, **here)], [run(there, **mine)]))
    assert len(found.time_refused) == 1
    assert found.time_refused[0].startswith(f"{key} is ")
    assert found.effects == ()
    assert len(found.equal) == 19
    assert not found.worse


@pytest.mark.slow
def test_cells_are_matched_by_work_then_by_name_and_the_rest_is_listed() -> None:
    a = [run(cell("ddp", 2)), run(cell("zero1", 2)), run(cell("zero2", 2))]
    b = [
        run(cell("zero1", 2).changed(launch=Launch(threads=2))),
        run(cell("zero3", 2)),
        run(cell("zero2", 2, bucket_bytes=2048)),
    ]
    found = compare(a, b)
    strategies = [(pair.a.row["strategy"], pair.b.row["strategy"]) for pair in found.pairs]
    assert strategies == [("zero1", "zero1"), ("zero2", "zero2")]
    assert found.pairs[1].differs[0].startswith("strategy.bucket_bytes is 65536 in A and 2048 in B")
    assert [one.row["strategy"] for one in found.only_a] == ["ddp"]
    assert [one.row["strategy"] for one in found.only_b] == ["zero3"]


A = [0.100, 0.104, 0.097, 0.101, 0.099]


@pytest.mark.slow
def test_slower_has_the_ratio_and_interval_that_scipy_says() -> None:
    one = cell("zero1", 2)
    factors = [1.06, 1.10, 1.08, 1.07, 1.09]
    b = [time * factor for time, factor in zip(A, factors, strict=True)]
    found = only(compare(*in_turns(one, A, b)))
    step = found.effects[0]
    low, high = stats.ttest_1samp(np.log(factors), 0).confidence_interval(0.95)
    assert step.ratio == pytest.approx(stats.gmean(factors), rel=1e-12)
    assert (step.low, step.high) == pytest.approx((np.exp(low), np.exp(high)), rel=1e-12)
    assert step.verdict == "slower"
    assert found.worse
    assert verdict(*in_turns(one, b, A)) == "faster"


def test_an_interval_with_1_is_noise_and_so_is_an_effect_below_the_least() -> None:
    one = cell("zero1", 2)
    wide = measure_effect("step_s", [1.0, 1.0, 1.0], [1.30, 0.95, 1.10], 0.03)
    assert wide.low < 1 < wide.ratio - 0.03
    assert wide.verdict == "noise"
    little = [time * factor for time, factor in zip(A, [1.019, 1.021, 1.02, 1.018, 1.022], strict=True)]
    small = only(compare(*in_turns(one, A, little))).effects[0]
    assert small.low > 1.01, "certainly slower, and by less than anyone cares for"
    assert small.verdict == "noise"


@pytest.mark.slow
def test_fewer_than_three_pairs_are_noise_or_undecided() -> None:
    one = cell("zero1", 2)
    assert verdict(*in_turns(one, [0.1, 0.1], [0.102, 0.102])) == "noise"
    undecided = only(compare(*in_turns(one, [0.1, 0.1], [0.2, 0.2])))
    assert len(undecided.pairs) == 2
    assert undecided.effects[0].verdict.startswith("undecided: measure.repeats=3 or more")
    assert undecided.effects[0].low is None
    assert not undecided.worse


@pytest.mark.slow
def test_a_failed_cell_is_told_of_and_compared_in_nothing() -> None:
    one = cell("zero1", 2)
    failed = asdict(new_row(one)) | {"status": "oom", "reason": "rank 0 was killed"}
    worse, better = only(compare([run(one)], [failed])), only(compare([failed], [run(one)]))
    assert (list(worse.failed), worse.moved, worse.effects) == (["B"], (), ())
    assert worse.worse
    assert not better.worse


def test_launches_are_paired_by_their_number_and_else_in_order() -> None:
    one = cell("zero1", 2)
    a, b = launches(one, [1, 2, 3], 1), launches(one, [1, 2, 3, 4], 2)
    assert [(x["step_s"], y["step_s"]) for x, y in pair_up(a[::-1], b[1:])] == [(2, 2), (3, 3)]
    assert [(x["step_s"], y["step_s"]) for x, y in pair_up(a[:2], b[:1:-1])] == [(1, 3), (2, 4)]


@pytest.mark.thorough
def test_a_recorded_floor_raises_the_threshold_where_it_holds(tmp_path: Path) -> None:
    one = cell("ddp", 2)
    floor = floor_from(launches(one, [0.1, 0.12, 0.09, 0.11], 0), one.config)
    path = write_floor(tmp_path, floor)
    assert path.name == "cpu.yaml"
    assert read_floors(tmp_path) == [floor]
    slower = [time * 1.08 for time in A]
    a, b = in_turns(one, A, slower)
    assert verdict(a, b) == "slower"
    assert verdict(a, b, [floor]) == "noise"
    found = only(compare(a, b, [floor]))
    assert found.floors == (floor,)
    blocks = only(compare(launches(one, A, 1), launches(one, slower, 2), [floor]))
    assert blocks.effects[0].threshold == floor.floors["step_s"], "drift does not average out"
    assert np.log1p(found.effects[0].threshold) == pytest.approx(np.log1p(floor.floors["step_s"]) / np.sqrt(5))
    elsewhere = [row | {"cores": 99} for row in (*a, *b)]
    assert only(compare(elsewhere[:5], elsewhere[5:], [floor])).floors == ()
