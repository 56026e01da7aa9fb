"""A figure per metric of a history: a line per cell over the commits, with a mark and a number at each step.

Entries stand side by side, in the order of the commits; a line is dotted where commits between them were not measured,
and breaks where a cell has failed, with the word for it at the axis.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from zlib import crc32

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...sizes import show_bytes
from ...strategies import Look, find, spare_look
from ..bisect.report import show_value
from .entries import Entry
from .series import Point, Series

SETTINGS = {
    "figure.dpi": 150, "font.size": 9, "legend.fontsize": 8, "legend.frameon": False, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "axes.grid.axis": "y", "grid.alpha": 0.3, "axes.axisbelow": True,
    "svg.hashsalt": "zerobench",
}  # fmt: skip
MOST_TICKS = 24
LINES = ("-", "--", ":", "-.")


def draw(found: Sequence[Series], entries: Sequence[Entry]) -> Figure:
    """Draws the series of one metric over all entries."""
    with mpl.rc_context(SETTINGS):  # type: ignore[arg-type]
        figure = Figure(figsize=(max(6.0, min(16.0, 1.5 + 0.35 * len(entries))), 3.6), layout="constrained")
        axes = figure.subplots()
        places = {entry.commit.hash: place for place, entry in enumerate(entries)}
        scale, unit = _unit(found)
        for number, one in enumerate(found):
            _line(axes, one, places, number, scale)
        _ticks(axes, entries)
        axes.set_title(found[0].metric, loc="left")
        axes.set_ylabel(unit)
        axes.margins(y=0.2)
        axes.ticklabel_format(axis="y", useOffset=False, style="plain")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def save(figure: Figure, path: Path) -> None:
    """Writes a figure in the format of the path's suffix; the same data give the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(SETTINGS):  # type: ignore[arg-type]
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None} if path.suffix == ".svg" else None)


def as_svg(figure: Figure) -> str:
    """Returns a figure as an element for a page of HTML."""
    text = io.StringIO()
    with mpl.rc_context(SETTINGS):  # type: ignore[arg-type]
        figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _unit(found: Sequence[Series]) -> tuple[float, str]:
    """Returns the unit of the axis: its size, and its name."""
    metric = found[0].metric
    if not metric.endswith("_bytes"):
        return 1, "ψ" if metric.endswith("_psi") else metric.rpartition("_")[2]
    largest = max((abs(point.value) for one in found for point in one.points if point.value is not None), default=0)
    units = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
    name, size = next(((name, size) for name, size in units if largest >= size), ("bytes", 1))
    return size, name


def _line(axes: Axes, one: Series, places: dict[str, int], number: int, scale: float) -> None:
    look, style = _look(one), LINES[number // 8 % len(LINES)]
    before: tuple[int, float] | None = None
    name: str | None = one.cell
    size: Callable[[float], str] = show_bytes if one.metric.endswith("_bytes") else show_value
    for point in one.points:
        place = places[point.entry.commit.hash]
        if point.value is None:
            _absent(axes, place, point.status, look.color)
            before = None
            continue
        value = float(point.value) / scale
        if before is not None:
            gap = bool(point.gap) or place - before[0] > 1
            axes.plot([before[0], place], [before[1], value], linestyle=":" if gap else style, color=look.color, lw=1.2)
        axes.plot([place], [value], marker=look.marker, color=look.color, ms=4, linestyle=style, label=name)
        if point.is_step:
            _mark(axes, place, value, point, look.color, size)
        before, name = (place, value), None


def _absent(axes: Axes, place: int, word: str, color: str) -> None:
    axes.annotate(
        f"× {word}", (place, 0), (0, 4), xycoords=axes.get_xaxis_transform(), textcoords="offset points", rotation=90,
        color=color, style="italic", fontsize=8,
    )  # fmt: skip


def _mark(axes: Axes, place: int, value: float, point: Point, color: str, size: Callable[[float], str]) -> None:
    by = point.difference or 0.0
    axes.plot([place], [value], marker="o", ms=10, fillstyle="none", color=color, linestyle="none")
    words = f"{'+' if by > 0 else '−'}{size(abs(by))}"
    axes.annotate(words, (place, value), (0, 9), textcoords="offset points", ha="center", fontsize=7, color=color)


def _look(one: Series) -> Look:
    strategy = one.cell.split()[0]
    row = find(strategy)
    return row.look if row is not None else spare_look(crc32(one.cell.encode()))


def _ticks(axes: Axes, entries: Sequence[Entry]) -> None:
    every = -(-len(entries) // MOST_TICKS)
    shown = range(0, len(entries), every)
    axes.set_xticks(list(shown), [entries[n].commit.short for n in shown], rotation=60, ha="right", fontsize=7)
    axes.set_xlim(-0.5, len(entries) - 0.5)
