"""Every committed figure on the page that it is printed on: no text too small, on another text, or beyond the edge."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from analysis import calibration, compare, largest_model, table1
from analysis.common import FIGURES, REFERENCE, main_of, module_of
from tests.figure_faults import faults, texts_of
from zerobench.calibrate.collectives import load_calibration
from zerobench.commands.plot import load_all
from zerobench.plots.page import Page, settle

ROOT = Path(__file__).parents[2]
OTHERS = {
    "calibration": lambda: calibration.draw(load_calibration(ROOT / "results/calibration/cpu/N=2")),
    "compare": lambda: compare.draw(load_all([ROOT / "results/compare/cpu"])),
    "largest_model": lambda: largest_model.draw(
        [one for one in largest_model.read(ROOT / "results/largest_model") if one.gpus != 64]
    ),
    **{name: lambda draw=draw: draw(table1.load(ROOT / "results/table1")) for name, draw in table1.FIGURES.items()},
}
EVERY = (*FIGURES, *OTHERS)
CROWDED = ("offload", "pareto", "zeropp")
"""Figures that stand for all others in the quick tests: most text to an inch."""

TOO_MUCH = (
    "calibration", "table1", "in_flight", "memory_cap", "offload", "offload_time", "pareto",
    "shard_group",
)  # fmt: skip
"""Figures with more in them than a column or a slide holds: they are for the whole page of a paper."""

PAGES = [Page(width=width, style=style) for width in ("page", "column") for style in ("paper", "slides")]


def drawn(name: str, page: Page) -> Figure:
    with page.used():
        if name in OTHERS:
            figure = OTHERS[name]()
        else:
            figure = module_of(name).draw(load_all([ROOT / REFERENCE / FIGURES[name]]))
        settle(figure)
    return figure


def cases() -> Iterator[object]:
    for name in EVERY:
        for page in PAGES[:1] if name in TOO_MUCH else PAGES:
            quick = name in CROWDED and page == PAGES[0]
            marks = [] if quick else [pytest.mark.thorough]
            yield pytest.param(name, page, id=f"{name}-{page.width}-{page.style}", marks=marks)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "page"), list(cases()))
def test_every_figure_is_readable_as_printed(name: str, page: Page) -> None:
    figure = drawn(name, page)
    assert texts_of(figure)
    found = faults(figure)
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_figures_of_a_paper_have_its_width_their_fonts_and_their_captions(tmp_path: Path) -> None:
    """One run of a script: PDF of a column; the caption beside it."""
    source = str(ROOT / REFERENCE / "stages")
    arguments = ["--out", str(tmp_path), "--width", "column", "--format", "pdf"]
    assert main_of("volume")([source, *arguments]) == 0
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
        main_of("volume")(["--out", "figures", "--format", "pdf,tiff"])
    assert left.value.code == 2
    assert "'tiff' is no format of figures; there are pdf, svg, png" in capsys.readouterr().err
