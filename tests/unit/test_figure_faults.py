"""Faults that figures had: for each, what would find it again, on what the axes hold rather than on pixels."""

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from analysis import largest_model, table1
from tests.made_up import MIB, figure_of, results_of, run, texts
from zerobench.plots.panels import model_of

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
