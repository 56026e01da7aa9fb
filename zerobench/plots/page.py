"""Pages that figures are made for: formats, width, style; and the layout that fits a figure to them.

A *page* is the choice of the options --format, --width and --style. Its width is in inches, as printed: a *column* of a
two-column paper, or the whole *page*. Its *style* is the size of text: at least 7 pt for a paper; larger for slides,
where a figure is enlarged to the width of the slide. A *sheet* is a figure with its caption and the height of each of
its axes, in inches of a paper. It is *settled* once its layout is final: titles are wrapped, colliding labels are
rotated, numbers have room above their bars, and the surroundings of the axes do not shrink them.

Lengths of the layout are in dots of the figure, as in matplotlib's bounding boxes. *Numbers* are texts of the group
NUMBER, which are above their bars.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter
from matplotlib.transforms import Bbox

from ..host.pipes import print_line
from ..sizes import escape_control

WIDTHS = {"column": 3.35, "page": 7.0}
"""Size of a figure, in inches."""

POINTS = {"paper": 8.5, "slides": 10.5}
"""Style -> size of a title; all other text is "small", which is 5/6 of it."""

DOTS = {"paper": 150, "slides": 300}
"""Style -> dots per inch of a PNG."""

CAPTIONED = ("png", "svg")
"""Formats that stand alone, with their caption above; documents with the other formats have their own captions."""

ABOUT = 2
"""Inches for the surroundings of the axes until the layout knows their size: more than enough."""

FORMATS = ("pdf", "svg", "png")


@dataclass(frozen=True)
class Page:
    """A page: formats, width and style of its figures."""

    formats: tuple[str, ...] = CAPTIONED
    width: str = "page"
    style: str = "paper"

    @contextmanager
    def used(self) -> Iterator[None]:
        """Draws everything inside the block for this page."""
        with mpl.rc_context({**SETTINGS, **self._settings()}):
            yield

    def _settings(self) -> dict[str, Any]:
        size = (WIDTHS[self.width], 3.0)
        return {"font.size": POINTS[self.style], "savefig.dpi": DOTS[self.style], "figure.figsize": size}

    def save(self, figure: Sheet, out: Path, name: str) -> None:
        """Settles a figure, writes NAME in every format to `out` and its caption as NAME.txt, and prints the paths. The
        same figure gives the same bytes.
        """
        settle(figure)
        out.mkdir(parents=True, exist_ok=True)
        caption = escape_control(" ".join(figure.caption.split()))
        metadata = {
            "png": {"Description": caption},
            "svg": {"Description": caption, "Date": None},
            "pdf": {"Subject": caption, "CreationDate": None},
        }
        for ending in self.formats:
            figure.title.set_visible(ending in CAPTIONED)
            figure.title.set_in_layout(ending in CAPTIONED)  # without the caption, the axes get its room
            figure.savefig(out / f"{name}.{ending}", metadata=metadata[ending])
            print_line(f"figure: {out / f'{name}.{ending}'}")
        (out / f"{name}.txt").write_text(caption + "\n", encoding="utf-8")
        print_line(f"caption: {out / f'{name}.txt'}")


def add_page_options(parser: argparse.ArgumentParser) -> None:
    """Adds --format, --width and --style, which `pop_page` reads."""
    add = parser.add_argument
    formats = f"{', '.join(FORMATS)}; several: pdf,png (default: {','.join(CAPTIONED)})"
    add("--format", type=_formats, default=CAPTIONED, metavar="FORMAT", help=formats)
    inches = ", ".join(f"{name} {size:g} in" for name, size in WIDTHS.items())
    add("--width", choices=tuple(WIDTHS), default="page", help=f"{inches} (default: %(default)s)")
    styles = "paper: text of 7 pt and more as printed; slides: larger text, PNG of 300 dots an inch"
    add("--style", choices=tuple(POINTS), default="paper", help=f"{styles} (default: %(default)s)")


def pop_page(options: dict[str, Any]) -> Page:
    """Pops the page's options from `options`."""
    return Page(options.pop("format"), options.pop("width"), options.pop("style"))


def _formats(text: str) -> tuple[str, ...]:
    formats = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in formats:
        if name not in FORMATS:
            raise argparse.ArgumentTypeError(f"{name!r} is no format of figures; there are {', '.join(FORMATS)}")
    return formats


SETTINGS: dict[str, Any] = {
    **Page()._settings(),
    "figure.dpi": 150,
    "axes.titlesize": "medium",
    **dict.fromkeys(("axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize"), "small"),
    **dict.fromkeys(("figure.titlesize", "legend.title_fontsize"), "small"),
    "legend.frameon": False,
    "legend.columnspacing": 1.4,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.titlepad": 5,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
    "hatch.linewidth": 0.5,
    "text.parse_math": False,  # a dollar sign in a name begins no formula
    "pdf.fonttype": 42,  # whole fonts, as publishers ask for
    "svg.fonttype": "path",  # text looks alike where the font is not installed
    "svg.hashsalt": "zerobench",  # the same data give the same file
}
"""matplotlib's settings for every page: those of the default page, and the style."""


class Sheet(Figure):
    """A figure as wide as the page. `high`: height of each of its axes, in inches of a paper; `rows`: rows of axes."""

    def __init__(self, rows: int, high: float, caption: str) -> None:
        scale, width = mpl.rcParams["font.size"] / POINTS["paper"], mpl.rcParams["figure.figsize"][0]
        super().__init__(figsize=(width, rows * (high + ABOUT) * scale + ABOUT), layout="constrained")
        self.rows, self.high, self.caption = rows, high * scale, caption
        self.title = self.suptitle(caption, wrap=False)


def sheet(
    panels: Sequence[pd.DataFrame], most: int, size: tuple[float, float], caption: str, across: int = 1
) -> tuple[Sheet, list[tuple[Any, pd.DataFrame]]]:
    """Returns a figure, and the `across` axes of each panel; the caption says how many panels are left out.

    `size`: the least width of one of the axes with its labels, and the height of the axes alone, in inches of a paper.
    As many are placed side by side as fit the page.
    """
    shown = panels[:most]
    if len(panels) > most:
        caption += f" {most} of {len(panels)} panels are drawn; --panels {len(panels)} draws all."
    fitting = int(mpl.rcParams["figure.figsize"][0] / (size[0] * mpl.rcParams["font.size"] / POINTS["paper"]))
    abreast = min(max(1, fitting), across if across > 1 else len(shown))
    lines = ceil(across / abreast)  # of axes, for each panel
    rows = len(shown) * lines if across > 1 else ceil(len(shown) / abreast)
    figure = Sheet(rows, size[1], caption)
    axes = figure.subplots(rows, abreast, squeeze=False)
    by_panel = axes.reshape(len(shown), -1) if across > 1 else axes.reshape(-1, 1)
    for unused in [*by_panel[:, across:].flat, *by_panel[len(shown) :].flat]:
        unused.remove()
    return figure, list(zip([row[0] if across == 1 else row[:across] for row in by_panel], shown, strict=False))


def key(figure: Figure, handles: Iterable[Any]) -> None:
    """Draws the figure's legend below it, in as many columns as fit the page."""
    entries = list(handles)
    labels = [entry.get_label() for entry in entries]
    for columns in range(len(entries), 0, -1):
        legend = figure.legend(entries, labels, loc="outside lower center", ncols=columns)
        if columns == 1 or legend.get_window_extent().width <= 0.98 * figure.bbox.width:
            return
        legend.remove()


def settle(figure: Sheet) -> None:
    """Finalizes the layout: nothing collides, leaves the figure or squeezes the axes."""
    lay_out(figure)
    for axes in figure.axes:
        for title in (axes.title, axes._left_title):
            _wrap(title, axes.get_window_extent().width)
    _wrap(figure.title, 0.94 * figure.bbox.width)
    # names below the x axis, and numbers above bars, that would collide are rotated
    for axes in figure.axes:
        names = axes.get_xticklabels()
        if run_together([name for name in names if name.get_text()]):
            if any("\n" in name.get_text() for name in names):
                axes.set_xticklabels([name.get_text().replace("\n", " ") for name in names])
            axes.tick_params(axis="x", labelrotation=90)
        numbers = [text for text in axes.texts if text.get_gid() == NUMBER]
        if run_together(numbers):
            for number in numbers:
                number.set(rotation=90, text=number.get_text().replace("\n", " "))
    for _ in range(2):
        lay_out(figure)
        for axes in figure.axes:
            headroom(axes)
        if figure.axes:  # its height changes so that axes get their intended height
            lowest = min(axes.get_position().height for axes in figure.axes) * figure.get_figheight()
            figure.set_figheight(figure.get_figheight() + figure.rows * (figure.high - lowest))
    lay_out(figure)


def lay_out(figure: Sheet) -> None:
    """Places axes and texts without drawing them."""
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        if isinstance(axis.get_major_formatter(), LogFormatter):
            for label in axis.get_ticklabels(which="both"):
                label.set_parse_math(True)  # powers of ten: the only formulas
    figure.get_layout_engine().execute(figure)


NUMBER = "number"
"""`gid` of the numbers above bars."""

TOGETHER = re.compile(r" (?=[=×%])|(?<=[=×]) |(?<=\d) (?=[A-Z])")
"""Spaces at which lines are not broken: within "N = 2" and "1.04 M"."""

GAP = 3
"""Least distance between two labels, in dots."""


def _wrap(text: Text, room: float) -> None:
    line = TOGETHER.sub("\N{NO-BREAK SPACE}", " ".join(text.get_text().split()))
    text.set_text(line)
    width = text.get_window_extent().width if line else 0
    if width > room:
        text.set_text(fill(line, max(8, int(len(line) * room / width)), break_long_words=False))


def run_together(labels: Sequence[Text]) -> bool:
    """Returns True if two neighbors touch."""
    boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.x0)
    return any(a.padded(GAP / 2).overlaps(b.padded(GAP / 2)) for a, b in pairwise(boxes))


def headroom(axes: Axes) -> None:
    """Raises the upper end of the y axis until all numbers are below it."""
    inside, high = axes.get_window_extent(), axes.transData
    for text in axes.texts:
        if text.get_gid() != NUMBER or not text.get_visible():
            continue
        box: Bbox = text.get_window_extent()
        over = box.y1 + GAP - inside.y1
        foot = high.transform((0, text.xy[1]))[1]
        if over <= 0 or foot <= inside.y0:
            continue
        grown = (foot - inside.y0) / (inside.y1 - inside.y0 - (box.y1 + GAP - foot))
        if grown > 0:
            top = high.inverted().transform((0, inside.y0 + grown * inside.height))[1]
            axes.set_ylim(top=max(top, axes.get_ylim()[1]))
