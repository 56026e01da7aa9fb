"""Figures drawn from rows made by hand: holes, failures, launches, states, limits; and `results.plot`."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from tests.made_up import MIB, NUMBERS, figure_of, results_of, run, texts, tops
from zerobench import cli
from zerobench.commands.plot import plot
from zerobench.records import STATES, MemoryRow
from zerobench.results.frames import frame_of
from zerobench.results.summary import summarize
from zerobench.results.tables import collect


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
    assert "too few steps or launches" in caption
    assert figure_of("step_time", results_of(rows[3:])).get_suptitle().startswith("Intervals: none, ")


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


@pytest.mark.slow
def test_show_sets_other_tiers_and_links_beside_their_formulas(tmp_path: Path, capsys) -> None:
    moved = {"down_bytes": 4 * MIB, "predicted_down_bytes": 3 * MIB, "up_bytes": 0, "predicted_host_states_bytes": MIB}
    results = results_of([run("zero2", 2, host_peak_all_bytes=5 * MIB, **moved)])
    elsewhere = [
        MemoryRow(0, "step", "master", MIB, MIB, MIB, None, "host"),
        MemoryRow(0, "step", "states", MIB, MIB, MIB, None, "host"),
        MemoryRow(0, "step", "total", 2 * MIB, MIB, 2 * MIB, None, "host"),
    ]
    frame = frame_of([vars(one) for one in elsewhere], MemoryRow)
    frame.insert(0, "run_id", results.runs["run_id"].iloc[0])
    collect(replace(results, memory=pd.concat([results.memory, frame], ignore_index=True)), tmp_path)
    assert cli.run(["show", "zero2", "--results", str(tmp_path)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "host states 1.0 MiB 1.0 MiB 1.0 MiB 0 B" in lines
    assert "host master 1.0 MiB 1.0 MiB – –" in lines
    assert "host a node of 2 – 5.0 MiB – –" in lines
    assert "device to host 4.0 MiB 3.0 MiB 1.0 MiB" in lines
    assert not any(line.startswith("host to device") for line in lines)
    assert sum("told apart by the engine's labels" in line for line in lines) == 1


@pytest.fixture(autouse=True)
def _no_window() -> Iterator[None]:
    with mpl.rc_context({"backend": "agg"}):
        yield
    plt.close("all")


def titled(axes: Axes) -> str:
    return " ".join((axes.get_title("left") + axes.get_title()).split())


@pytest.mark.slow
def test_what_did_not_run_is_drawn_or_a_sentence() -> None:
    oom, crash = run("zero3", 2, "oom"), replace(run("zero1", 2, "crash"), reason="rank 1 died")
    drawn = results_of([run("ddp", 2), oom, crash]).plot.memory()
    assert "oom" in " ".join(texts(drawn.figure))
    assert "crash" not in " ".join(texts(drawn.figure)), "a failed attempt is left out, as by the scripts"
    mixed = replace(run("ddp", 2), device="cuda", run_id="gpu", cell_id="gpu")
    devices = ["cuda" in titled(axes) for axes in results_of([run("ddp", 2), mixed]).plot.memory()]
    assert sorted(devices) == [False, True], "one panel for each device"
    timed = results_of([replace(run("ddp", 2), peak_bytes=None, volume_psi=None)])
    for name, word in {
        "volume": "no volumes",
        "pareto": "no bytes",
        "scaling": "no bytes",
        "throughput": "no bytes",
    }.items():
        assert word in " ".join(texts(figure_of(name, timed)))
    assert "no losses" in " ".join(texts(figure_of("losses", replace(timed, steps=timed.steps[:0]))))
    for results, sentence in (
        (results_of([]), "plot.memory: there are no runs in these results"),
        (results_of([crash]), "plot.memory: no run has a result; the last is crash: rank 1 died"),
    ):
        with pytest.raises(ValueError, match=sentence):
            results.plot.memory()
    with pytest.raises(ValueError, match="plot: style='big' is none of paper, slides"):
        results_of([]).plot(style="big")
    with pytest.raises(ValueError, match="'much' is no size"):
        results_of([oom]).plot.memory(capacity="much")
    assert isinstance(results_of([oom]).run("zero3-2-2-0").plot.memory(), Axes)


@pytest.mark.slow
def test_a_verb_draws_it_to_a_file_or_a_folder(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    collect(results_of([run("ddp", 2), run("zero2", 2)]), Path("runs"))
    assert cli.run(["plot", "volume", "runs", "--out", "below/mine.png", "--width", "column"]) == 0
    assert {path.name for path in Path("below").iterdir()} == {"mine.png", "mine.txt"}
    assert cli.run(["plot", "memory", "runs", "--out", "all", "--format", "pdf,png", "--capacity", "1 GiB"]) == 0
    assert {path.name for path in Path("all").iterdir()} == {"memory.pdf", "memory.png", "memory.txt"}
    for words, said in (
        (["nowhere", "--out", "x.pdf"], "zerobench plot volume: nowhere"),
        (["runs", "--out", "x.jpg"], "--out x.jpg: a figure ends in .pdf, .svg, .png; anything else must be a folder"),
        (["runs", "--out", "x.pdf", "--format", "svg"], "--out x.pdf with --format svg: give a folder, or no --format"),
    ):
        assert cli.run(["plot", "volume", *words]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.run(["plot", "volume", "runs", "--out", "x.pdf", "--capacity", "1 GiB"])
    assert "--capacity is an option of memory, not of volume" in capsys.readouterr().err
    assert not list(tmp_path.glob("x*"))


@pytest.mark.thorough
def test_figures_of_a_paper_have_its_width_their_fonts_and_their_captions(tmp_path: Path) -> None:
    """One run of a script: PDF of a column; the caption beside it."""
    source = str(Path(__file__).parents[2] / "results/reference/cpu/stages")
    arguments = ["--out", str(tmp_path), "--width", "column", "--format", "pdf"]
    assert plot(["volume", source, *arguments]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"volume.pdf", "volume.txt"}
    caption = (tmp_path / "volume.txt").read_text().strip()
    assert caption.endswith(".")
    pdf = (tmp_path / "volume.pdf").read_bytes()
    assert b"/Type3" not in pdf, "outlines that publishers refuse"
    assert b"/FontFile2" in pdf
    assert caption[:20].encode() in pdf
    assert b"/MediaBox [ 0 0 241.2 " in pdf, "3.35 inches of 72 points"
