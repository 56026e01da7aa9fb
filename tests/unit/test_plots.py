"""`results.plot`: axes by the code of the scripts, and sentences where there is nothing to draw."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from tests.made_up import GRID, MIB, NUMBERS, results_of, run, texts, tops
from zerobench import cli
from zerobench.commands.plot import plot
from zerobench.results.tables import collect


@pytest.fixture(autouse=True)
def _no_window() -> Iterator[None]:
    with mpl.rc_context({"backend": "agg"}):
        yield
    plt.close("all")


def titled(axes: Axes) -> str:
    return " ".join((axes.get_title("left") + axes.get_title()).split())


@pytest.mark.slow
def test_one_panel_is_axes_and_several_are_an_array() -> None:
    one = results_of([run("ddp", 2), run("zero2", 2)]).plot.memory(capacity="100 MiB")
    assert isinstance(one, Axes)
    assert tops(one)[0.2] == pytest.approx(2 * sum(NUMBERS.values()) / MIB)
    assert [line.get_ydata()[0] for line in one.lines] == [100.0]
    assert one.figure.number in plt.get_fignums(), "a notebook shows it"
    several = results_of(GRID).plot.volume()
    assert isinstance(several, np.ndarray)
    assert ["N = 2" in titled(axes) for axes in several] == [False, True]
    assert len(results_of(GRID).plot.volume(panels=1).figure.axes) == 1


@pytest.mark.slow
def test_a_users_matplotlib_keeps_its_settings() -> None:
    with mpl.rc_context({"font.size": 17, "axes.grid": False, "savefig.dpi": 33}):
        before = dict(mpl.rcParams)
        wide = results_of([run("ddp", 2)]).plot.step_time()
        narrow = results_of([run("ddp", 2)]).plot(width="column", style="slides").step_time()
        assert dict(mpl.rcParams) == before
    assert (wide.figure.get_figwidth(), narrow.figure.get_figwidth()) == (7.0, 3.35)


@pytest.mark.slow
def test_what_did_not_run_is_drawn_or_a_sentence() -> None:
    oom, crash = run("zero3", 2, "oom"), replace(run("zero1", 2, "crash"), reason="rank 1 died")
    drawn = results_of([run("ddp", 2), oom, crash]).plot.memory()
    assert "oom" in " ".join(texts(drawn.figure))
    assert "crash" not in " ".join(texts(drawn.figure)), "a failed attempt is left out, as by the scripts"
    mixed = replace(run("ddp", 2), device="cuda", run_id="gpu", cell_id="gpu")
    devices = ["cuda" in titled(axes) for axes in results_of([run("ddp", 2), mixed]).plot.memory()]
    assert sorted(devices) == [False, True], "one panel for each device"
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


@pytest.mark.slow
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


def test_a_format_that_is_none_is_one_sentence(capsys) -> None:
    with pytest.raises(SystemExit) as left:
        plot(["volume", "--out", "figures", "--format", "pdf,tiff"])
    assert left.value.code == 2
    assert "'tiff' is no format of figures; there are pdf, svg, png" in capsys.readouterr().err
