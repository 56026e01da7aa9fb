"""Figures drawn from rows made by hand: a grid with holes, failures, several launches, missing intervals."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from analysis import largest_model, table1
from analysis.__main__ import DRAWN_AS, DRAWN_HERE, FIGURES, PLOTTED
from tests.cells import cell
from tests.made_up import GRID, MIB, NUMBERS, figure_of, results_of, run, texts, tops
from zerobench.plots.panels import model_of
from zerobench.records import CATEGORIES, STATES
from zerobench.results.summary import summarize
from zerobench.sweep.cell import _blank_row


def test_memory_bars_are_the_fullest_ranks_at_either_instant() -> None:
    figure = figure_of("memory", results_of([run("ddp", 2)]), capacity=100 * MIB)
    axes = figure.axes[0]
    states = sum(2 * NUMBERS[name] + MIB // 2 for name in STATES)
    assert tops(axes) == pytest.approx({-0.2: states / MIB, 0.2: 2 * sum(NUMBERS.values()) / MIB})
    assert {line.get_segments()[0][0][1] for line in axes.collections} == {14.5, 10.0}
    assert [line.get_ydata()[0] for line in axes.lines] == [100.0]
    assert axes.get_ylim()[1] > 100


def test_what_is_outside_the_ledger_stands_on_top_of_it() -> None:
    results = results_of([run("ddp", 2, outside_ledger_bytes=7 * MIB)])
    axes = figure_of("memory", results).axes[0]
    assert tops(axes)[0.2] == pytest.approx(2 * sum(NUMBERS.values()) / MIB + 7)
    shown = [text.get_text() for text in axes.texts]
    assert f"{2 * sum(NUMBERS.values()) / MIB:.1f}" in shown, "a bar's number is the ledger's peak, as in the table"


def test_volume_bars_are_the_parts_by_collective() -> None:
    axes = figure_of("volume", results_of([run("zero3", 2)])).axes[0]
    assert [bar.get_height() for bar in axes.patches] == [0.0, 1.0, 2.0, 0.0]
    assert axes.collections[0].get_segments()[0][0][1] == 2.9


@pytest.mark.slow
def test_a_traced_cell_has_a_second_bar() -> None:
    traced = {"traced_step_s": 0.5, "communication_s": 0.2, "exposed_s": 0.05, "overlap": 0.75}
    [axes] = figure_of("step_time", results_of([run("ddp", 2), run("zero2", 2, **traced)])).axes
    heights = tops(axes)
    assert sorted(heights) == [0.0, 0.8, 1.2]
    assert heights[1.2] == pytest.approx(500)
    parts = [bar.get_height() for bar in axes.patches if bar.get_x() + bar.get_width() / 2 == pytest.approx(1.2)]
    assert parts == pytest.approx([300, 150, 50])
    plain, both = ([run("ddp", 2)], [run("ddp", 2), run("zero2", 2, **traced)])
    captions = [figure_of("step_time", results_of(rows)).get_suptitle() for rows in (plain, both)]
    assert ["profiler" in caption for caption in captions] == [False, True]


@pytest.mark.parametrize(("name", "place"), [("activation", 1), ("step_time", 0)])
def test_a_bar_of_phases_is_as_high_as_its_number_says(name: str, place: int) -> None:
    axes = figure_of(name, results_of([run("zero2", 2)])).axes[place]
    assert tops(axes)[0.0] == pytest.approx(100), "the step's median; those of its phases add up to 90"
    assert [text.get_text() for text in axes.texts] == ["100"]
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([100 / 3, 500 / 9, 100 / 9])


@pytest.mark.slow
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
    assert tops(figure.axes[0])[1.0] == pytest.approx(100)
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


@pytest.mark.slow
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
    assert [line.get_xdata()[0] for line in axes.lines[:-1]] == pytest.approx([0, 100 / 3, 200 / 3, 100])
    assert axes.lines[-1].get_ydata()[0] == pytest.approx(sum(NUMBERS.values()) / MIB), "the peak"


@pytest.mark.slow
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


def test_pareto_fills_the_front_and_joins_it_with_a_staircase() -> None:
    rows = [run("ddp", 2, peak_bytes=4 * MIB, step=0.2), run("zero1", 2, peak_bytes=8 * MIB, step=0.1)]
    rows += [run("zero2", 2, peak_bytes=6 * MIB, step=0.3), run("zero3", 2, "crash")]
    axes = figure_of("pareto", results_of(rows)).axes[0]
    points = {line.get_gid(): line for line in axes.lines if line.get_gid()}
    assert {name: line.get_fillstyle() for name, line in points.items()} == {
        "ddp-2-2-0": "full", "zero1-2-2-0": "full", "zero2-2-2-0": "none",
    }  # fmt: skip
    (steps,) = [line for line in axes.lines if line.get_label() == "front"]
    assert list(steps.get_xdata())[:2] == [4, 8]
    assert list(steps.get_ydata())[:2] == [640, 1280]
    assert "zero3: crash" in axes.get_xlabel()


def test_a_busy_machine_has_no_front() -> None:
    rows = [run("ddp", 2, peak_bytes=4 * MIB, step=0.2), run("zero1", 2, peak_bytes=8 * MIB, cores=2, threads=1)]
    rows[1].others_cores = 1.5
    axes = figure_of("pareto", results_of(rows)).axes[0]
    assert {line.get_fillstyle() for line in axes.lines if line.get_gid()} == {"none"}
    assert not any(line.get_label() == "front" for line in axes.lines)
    assert "no front: the machine was busy while 1 of 2 cells ran" in " ".join(axes.get_xlabel().split())
    assert not any("Pareto front" in text.get_text() for legend in axes.figure.legends for text in legend.get_texts())


def test_cells_of_one_strategy_are_told_apart() -> None:
    rows = [run("zero2", 2), run("ddp", 2)]
    other = _blank_row(cell("zero2", 2, micro_batch=2, bucket_bytes=4096))
    rows.append(replace(rows[0], config=other.config, cell_id=other.cell_id, run_id="other"))
    ticks = [label.get_text() for label in figure_of("volume", results_of(rows)).axes[0].get_xticklabels()]
    assert ticks == ["–\nddp", "64.0 KiB\nzero2", "4.0 KiB\nzero2"]


def test_every_figure_has_its_experiment_and_is_drawn() -> None:
    root = Path(__file__).parents[2]
    for name, experiment in FIGURES.items():
        assert name in (root / f"conf/experiment/{experiment}.yaml").read_text()
    assert {*FIGURES} == {*PLOTTED, *DRAWN_AS, *DRAWN_HERE}


ROOT = Path(__file__).parents[2]


def legend_of(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


@pytest.mark.slow
def test_a_front_is_of_one_batch_on_as_many_ranks() -> None:
    rows = [run("ddp", n, micro_batch=m, peak_bytes=(4 + m) * MIB) for n in (1, 2) for m in (1, 8)]
    figure = figure_of("pareto", results_of(rows))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert [title.split(", ")[1:3] for title in titles] == [
        ["N = 1", "batch 1 × 32"], ["N = 1", "batch 8 × 32"], ["N = 2", "batch 2 × 32"], ["N = 2", "batch 16 × 32"],
    ]  # fmt: skip
    assert all(sum(line.get_label() == "front" for line in axes.lines) == 1 for axes in figure.axes)


@pytest.mark.slow
def test_losses_that_are_equal_are_one_line_and_no_axis_of_zeros() -> None:
    rows = [run(strategy, 2) for strategy in ("ddp", "zero1", "zero3")]
    (axes,) = figure_of("losses", results_of(rows)).axes
    assert [line.get_label() for line in axes.lines] == ["ddp = zero1 = zero3, to the bit"]
    both = figure_of("losses", results_of([*rows, run("zero2", 2)], {"zero2": [3.0, 2.0, 1.5]}))
    assert len(both.axes) == 2


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("gpt_tiny", "layers=5 hidden=128 heads=4 vocabulary=256", "gpt_tiny"),
        ("gpt_tiny", "layers=2 hidden=96 heads=4 vocabulary=256", "gpt_tiny with layers=2 hidden=96"),
        ("a_users_own", "layers=2", "a_users_own"),
    ],
)
def test_a_models_name_stands_for_its_own_shape_alone(name: str, shape: str, words: str) -> None:
    assert model_of(name, shape) == words


@pytest.mark.slow
@pytest.mark.parametrize(("cores", "shaded"), [(2, True), (64, False)])
def test_throughput_says_how_many_cores_all_ranks_have(cores: int, shaded: bool) -> None:
    figure = figure_of("throughput", results_of([replace(run("ddp", n), cores=cores) for n in (1, 2, 4)]))
    assert f"all ranks on {cores} cores" in figure.get_suptitle()
    assert ("more ranks than cores" in legend_of(figure)) == shaded
    spans = [patch.get_x() for patch in figure.axes[0].patches]
    assert spans == ([2.5] if shaded else [])


@pytest.mark.slow
def test_what_table_1_and_the_largest_models_lack_is_drawn_as_missing() -> None:
    cells = table1.read(ROOT / "results/table1")
    assert "× missing" not in texts(table1.draw_table(cells))
    kept = cells[(cells["size"] != "1T") | (cells["ranks"] != 16)]
    assert texts(table1.draw_table(kept)).count("× missing") == 3
    rows = [one for one in largest_model.read(ROOT / "results/largest_model") if one.gpus != 64]
    assert "× missing" not in texts(largest_model.draw(rows))
    assert texts(largest_model.draw(rows[1:])).count("× missing") == 1
