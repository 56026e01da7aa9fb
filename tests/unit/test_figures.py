"""What the figures draw, from rows made by hand: a grid with holes, failures, several launches, missing intervals."""

from __future__ import annotations

from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from analysis import all as every
from analysis.common import FIGURES
from tests.cells import cell
from zerobench.cell import _blank_row
from zerobench.records import CATEGORIES, STATES, MemoryRow, RunRow, SearchRow, StepRow, TimelineRow
from zerobench.summary import summarize
from zerobench.tables import ALL_TABLES, Results, collect, frame_of

MIB = 2**20
OF_RUNS = [name for name in FIGURES if name != "memory_cap"]  # that one is of searches
NUMBERS = {name: (number + 1) * MIB for number, name in enumerate(CATEGORIES)}
"""Bytes by category at the peak; the states' maximum holds half a MiB more of each."""


def run(strategy: str, ranks: int, status: str = "ok", repeat: int = 0, step: float = 0.1, **more: Any) -> RunRow:
    """A row with made-up values; of a failed run, without any."""
    row = _blank_row(cell(strategy, ranks, micro_batch=more.pop("micro_batch", 2)), repeat)
    row.run_id, row.status = f"{strategy}-{ranks}-{row.micro_batch}-{repeat}", status
    if status != "ok":
        return row
    sizes = {f"peak_{name}_bytes": size for name, size in NUMBERS.items()}
    values: dict[str, Any] = {
        **sizes, "psi": 10**6, "peak_bytes": sum(NUMBERS.values()), "states_bytes": 30 * MIB // ranks,
        "predicted_states_bytes": 29 * MIB // ranks, "floor_states_bytes": 20 * MIB // ranks, "volume_psi": 3.0,
        "predicted_volume_psi": 2.9, "volume_all_reduce_psi": 0.0, "volume_reduce_scatter_psi": 1.0,
        "volume_all_gather_psi": 2.0, "volume_other_psi": 0.0, "step_s": step, "step_s_low": step * 0.9,
        "step_s_high": step * 1.2, "forward_s": 0.03, "backward_s": 0.05, "update_s": 0.01,
        "tokens_per_s": row.batch * row.sequence / step, "passes_agree": True,
    }  # fmt: skip
    return replace(row, **(values | more))


def results_of(rows: list[RunRow], losses: dict[str, list[float]] | None = None) -> Results:
    """Tables of the runs: two ranks each, of which rank 1 holds more."""
    tables: dict[str, list[dict[str, Any]]] = {name: [] for name in ALL_TABLES}
    tables["runs"] = [asdict(row) for row in rows]
    for row in rows:
        if row.status != "ok":
            continue
        for rank in (0, 1):
            mine: dict[str, list[Any]] = {"memory": _memory(rank), "timeline": _timeline(rank)}
            curve = (losses or {}).get(row.strategy, [3.0, 2.0, 1.0])
            mine["steps"] = [
                StepRow(rank, mode, n, n < 1, loss + rank, 0.1, 0.03, 0.05, 0.01)
                for mode in ("timed", "accounted")
                for n, loss in enumerate(curve)
            ]
            for name, made in mine.items():
                tables[name] += [{"run_id": row.run_id, **asdict(one)} for one in made]
    frames = {}
    for name, kind in ALL_TABLES.items():
        frames[name] = frame_of(tables[name], kind)
        if name not in ("runs", "searches"):
            frames[name].insert(0, "run_id", [one["run_id"] for one in tables[name]])
    return Results(**frames)


def _memory(rank: int) -> list[MemoryRow]:
    def rows(phase: str, scale: int) -> list[MemoryRow]:
        own = [MemoryRow(rank, phase, n, s * scale, s * scale + MIB // 2, s * 9, None) for n, s in NUMBERS.items()]
        states = sum(NUMBERS[name] for name in STATES)
        total = sum(NUMBERS.values())
        return [
            *own,
            MemoryRow(rank, phase, "states", 0, 0, states * scale),
            MemoryRow(rank, phase, "total", 0, 0, total * scale),
        ]

    return [*rows("forward", 7), *rows("step", rank + 1)]


def _timeline(rank: int) -> list[TimelineRow]:
    phases = ["data", "forward", "backward", "update"]
    sizes = {f"{name}_bytes": size * (rank + 1) for name, size in NUMBERS.items()}
    return [TimelineRow(rank, n, n * 0.01, phase, **sizes) for n, phase in enumerate(phases)]


def texts(figure: Figure) -> list[str]:
    found = [text.get_text() for axes in figure.axes for text in axes.texts]
    return found + [axes.get_xlabel() for axes in figure.axes]


def figure_of(name: str, results: Results, **options: Any) -> Figure:
    figure: Figure = import_module(f"analysis.{name}").draw(results, **options)
    return figure


def tops(axes: Any) -> dict[float, float]:
    """Where a stacked bar stands -> how high it is."""
    found: dict[float, float] = {}
    for bar in axes.patches:
        middle = round(bar.get_x() + bar.get_width() / 2, 3)
        found[middle] = max(found.get(middle, 0.0), bar.get_y() + bar.get_height())
    return found


GRID = [
    run("ddp", 1), run("ddp", 2, step=0.08), run("zero1", 1), run("zero1", 2, "oom"), run("zero3", 1),
]  # fmt: skip
"""zero1 failed at N = 2, zero3 has no run there."""


@pytest.mark.parametrize("name", OF_RUNS)
def test_every_script_draws_what_is_not_there_and_saves_twice(name: str, tmp_path: Path) -> None:
    collect(results_of(GRID), tmp_path / "runs")
    assert import_module(f"analysis.{name}").main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {f"{name}.png", f"{name}.svg"}
    words = " ".join(texts(figure_of(name, results_of(GRID))))
    assert words.count("oom") >= 1
    assert words.count("missing") >= 1
    whole = results_of([row for row in GRID if row.world_size == 1])
    assert "missing" not in " ".join(texts(figure_of(name, whole)))


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_to_draw_is_one_sentence_and_exit_2(name: str, tmp_path: Path, capsys) -> None:
    main = import_module(f"analysis.{name}").main
    assert main([str(tmp_path / "nowhere")]) == 2
    assert main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", OF_RUNS)
def test_failures_alone_are_a_figure_of_failures(name: str) -> None:
    assert "timeout" in " ".join(texts(figure_of(name, results_of([run("ddp", 2, "timeout")]))))


def search(strategy: str, limit: int, rate: float | None, **more: Any) -> dict[str, Any]:
    row = SearchRow(
        f"{strategy}{limit}", strategy, "tiny", 2, 16, 32, "cpu", limit * MIB, "found" if rate else "nothing_fits", "",
        5, MIB, "a b c", tokens_per_s=rate, **more,
    )  # fmt: skip
    return asdict(row)


def test_memory_cap_has_a_point_a_limit_or_says_that_nothing_fits(tmp_path: Path) -> None:
    best = {"micro_batch": 4, "accumulation": 2, "checkpointing": True}
    interval = {"tokens_per_s_low": 180.0, "tokens_per_s_high": 230.0}
    rows = [search("ddp", 10, None), search("ddp", 20, 200.0, **best, **interval), search("zero1", 10, 100.0)]
    results = replace(results_of([]), searches=frame_of(rows, SearchRow))
    axes = figure_of("memory_cap", results).axes[0]
    words = texts(axes.figure)
    assert "4×2 r" in words
    assert [word for word in words if "nothing fits" in word] == ["× ddp: nothing fits"]
    assert [word for word in words if "missing" in word] == ["× zero1: missing"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["10", "20"]
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines if line.get_label() in ("ddp", "zero1")}
    assert lines == {"ddp": [pytest.approx(float("nan"), nan_ok=True), 200.0], "zero1": [100.0, lines["zero1"][1]]}
    ((whisker,),) = [[s[:, 1].tolist() for s in bar.get_segments()] for bar in axes.collections]
    assert whisker == [180.0, 230.0]
    collect(results, tmp_path / "runs")
    main = import_module("analysis.memory_cap").main
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 2, (
        "no runs: the search's are in the folder"
    )
    collect(replace(results_of([run("ddp", 2)]), searches=results.searches), tmp_path / "runs")
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0


def test_memory_bars_are_the_fullest_ranks_at_either_instant() -> None:
    figure = figure_of("memory", results_of([run("ddp", 2)]), capacity=100 * MIB)
    axes = figure.axes[0]
    states = sum(2 * NUMBERS[name] + MIB // 2 for name in STATES)
    assert tops(axes) == pytest.approx({-0.2: states / MIB, 0.2: 2 * sum(NUMBERS.values()) / MIB})
    assert {line.get_segments()[0][0][1] for line in axes.collections} == {14.5, 10.0}
    assert [line.get_ydata()[0] for line in axes.lines] == [100.0]
    assert axes.get_ylim()[1] > 100


def test_volume_bars_are_the_parts_by_collective() -> None:
    axes = figure_of("volume", results_of([run("zero3", 2)])).axes[0]
    assert [bar.get_height() for bar in axes.patches] == [0.0, 1.0, 2.0, 0.0]
    assert axes.collections[0].get_segments()[0][0][1] == 2.9


def test_step_times_whiskers_are_the_summarys_interval() -> None:
    rows = [run("ddp", 2, repeat=n, step=step) for n, step in enumerate((0.1, 0.11, 0.13))]
    rows += [run("zero1", 2, step_s_low=None, step_s_high=None)]
    figure = figure_of("step_time", results_of(rows))
    summary = summarize(results_of(rows).runs).iloc[0]
    whiskers = figure.axes[0].collections[0].get_segments()
    assert len(whiskers) == 1
    assert whiskers[0][:, 1] == pytest.approx([summary.step_s_low * 1000, summary.step_s_high * 1000])
    assert len(figure.axes[0].containers) - 2 * 3 == 2  # two dots beside three phases of two bars; one has whiskers
    assert len(figure.axes[0].collections) == 1
    assert tops(figure.axes[0])[1.0] == pytest.approx(90)
    caption = figure.get_suptitle()
    assert "over 3 launches" in caption
    assert "too few steps" in caption


def test_scaling_has_a_gap_where_a_cell_is_not_there() -> None:
    states, peak = figure_of("scaling", results_of(GRID)).axes
    drawn = {line.get_label(): line.get_ydata() for line in states.lines}
    assert list(drawn["ddp"]) == [30, 15]
    assert drawn["zero1"][0] == 30
    assert np.isnan(drawn["zero1"][1])
    dashed = [line.get_ydata()[0] for line in states.lines if line.get_linestyle() == "--"]
    dotted = [line.get_ydata()[0] for line in states.lines if line.get_linestyle() == ":"]
    assert dashed == [29, 29, 29]
    assert dotted == [20, 20, 20]
    assert {line.get_label() for line in peak.lines} == {"ddp", "zero1", "zero3"}
    assert peak.get_ylabel() == "peak (MiB)"


def test_throughput_drops_from_ddp_or_from_linear_scaling() -> None:
    rows = [run("ddp", 1), run("ddp", 2, step=0.2), run("zero2", 1, step=0.2), run("zero2", 2, step=0.25)]
    tokens, drop, _ = figure_of("throughput", results_of(rows)).axes
    lines = {line.get_label(): list(line.get_ydata()) for line in drop.lines}
    assert lines["zero2"] == pytest.approx([50, 20])
    assert lines["ddp"] == [0, 0]
    low, high = tokens.collections[0].get_segments()[0][:, 1]
    assert (low, high) == pytest.approx((64 / 0.12, 64 / 0.09))
    _, drop, _ = figure_of("throughput", results_of(rows), drop_from="linear").axes
    lines = {line.get_label(): list(line.get_ydata()) for line in drop.lines}
    assert lines["ddp"] == pytest.approx([0, 50])
    assert lines["zero2"] == pytest.approx([0, 20])
    alone = figure_of("throughput", results_of(rows[2:]))
    assert "zero2: no reference at N = 2" in " ".join(texts(alone))


def test_timeline_stacks_the_fullest_ranks_categories_and_marks_phases() -> None:
    axes = figure_of("timeline", results_of([run("zero2", 2)])).axes[0]
    assert [area.get_label() for area in axes.collections] == list(CATEGORIES)
    top = axes.collections[-1].get_paths()[0].vertices[:, 1].max()
    assert top == pytest.approx(2 * sum(NUMBERS.values()) / MIB)
    assert {text.get_text() for text in axes.texts} >= {"forward", "backward", "update"}
    assert [line.get_xdata()[0] for line in axes.lines] == pytest.approx([0, 10, 20, 30])


def test_losses_are_means_over_ranks_less_those_of_ddp() -> None:
    rows = [run(strategy, 2) for strategy in ("zero1", "ddp", "zero3")]
    found = results_of(rows, {"zero1": [3.0, 2.5, 1.0], "zero3": [3.0, float("nan"), 1.0]})
    left, right = figure_of("losses", found).axes
    assert [line.get_label() for line in left.lines if line.get_linestyle() == "-"] == ["ddp", "zero1", "zero3"]
    assert list(left.lines[0].get_ydata()) == [3.5, 2.5, 1.5]
    assert list(right.lines[1].get_ydata()) == [0, 0.5, 0]
    crosses = [line for line in left.lines if line.get_linestyle() == "None"]
    assert [list(line.get_xdata()) for line in crosses] == [[1]]
    assert right.get_title(loc="left") == "largest difference: 0.5"
    equal = figure_of("losses", results_of(rows)).axes[1]
    assert equal.get_title(loc="left") == "all differences are 0"


def test_the_front_is_what_a_scan_from_small_to_large_says() -> None:
    spots = np.random.default_rng(0).integers(1, 12, (30, 2))
    frame = pd.DataFrame({"peak_bytes": spots[:, 0] * MIB, "tokens_per_s": spots[:, 1] * 100.0})
    expected, best = set(), -1.0
    for size, tied in frame.groupby("peak_bytes"):
        most = tied.tokens_per_s.max()
        if most > best:
            expected |= {(size, most)}
            best = most
    on_front = frame[import_module("analysis.pareto").front(frame)]
    assert set(zip(on_front.peak_bytes, on_front.tokens_per_s, strict=True)) == expected
    assert len(on_front) == sum((p, r) in expected for p, r in zip(frame.peak_bytes, frame.tokens_per_s, strict=True))


def test_pareto_fills_the_front_and_joins_it_with_a_staircase() -> None:
    rows = [run("ddp", 2, micro_batch=m, peak_bytes=p * MIB, step=s) for m, p, s in ((1, 4, 0.1), (2, 8, 0.1))]
    rows += [run("zero1", 2, micro_batch=1, peak_bytes=6 * MIB, step=0.2), run("zero1", 2, "crash", micro_batch=2)]
    axes = figure_of("pareto", results_of(rows)).axes[0]
    points = {line.get_gid(): line for line in axes.lines if line.get_gid()}
    assert {name: line.get_fillstyle() for name, line in points.items()} == {
        "ddp-2-1-0": "full", "ddp-2-2-0": "full", "zero1-2-1-0": "none",
    }  # fmt: skip
    (steps,) = [line for line in axes.lines if line.get_label() == "front"]
    assert list(steps.get_xdata())[:2] == [4, 8]
    assert list(steps.get_ydata())[:2] == [640, 1280]
    assert "zero1 b=4: crash" in axes.get_xlabel()
    assert {text.get_text() for text in axes.texts} == {"b=2", "b=4"}


def test_too_many_panels_are_counted_in_the_figure() -> None:
    rows = [run("ddp", 1, micro_batch=m) for m in (1, 2, 3)]
    figure = figure_of("volume", results_of(rows), panels=2)
    assert sum(axes.axison for axes in figure.axes) == 2
    assert "2 of 3 panels are drawn" in figure.get_suptitle()


def test_cells_of_one_strategy_are_told_apart() -> None:
    rows = [run("zero2", 2), run("ddp", 2)]
    other = _blank_row(cell("zero2", 2, micro_batch=2, bucket_bytes=4096))
    rows.append(replace(rows[0], config=other.config, cell_id=other.cell_id, run_id="other"))
    ticks = [label.get_text() for label in figure_of("volume", results_of(rows)).axes[0].get_xticklabels()]
    assert ticks == ["ddp", "zero2\nbucket_bytes=65536", "zero2\nbucket_bytes=4096"]


def test_all_draws_what_it_has_and_names_the_rest(tmp_path: Path, capsys) -> None:
    assert every.main([str(tmp_path)]) == 2
    collect(results_of(GRID), tmp_path / "stages")
    capsys.readouterr()
    assert every.main([str(tmp_path)]) == 0
    of_stages = {name for name, experiment in FIGURES.items() if experiment == "stages"}
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == of_stages
    told = capsys.readouterr().err
    assert all(f"{name} is left out" in told for name in FIGURES if name not in of_stages)


def test_every_figure_has_its_experiment_and_every_script_is_run() -> None:
    root = Path(__file__).parents[2]
    for name, experiment in FIGURES.items():
        assert name in (root / f"conf/experiment/{experiment}.yaml").read_text()
    scripts = {path.stem for path in (root / "analysis").glob("*.py")}
    assert scripts == {*FIGURES, "all", "common", "style", "readme"}
