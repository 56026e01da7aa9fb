"""Marks of figures, in one style: readable in print, by the color-blind, and without color (hatches, markers).

A cell's *label* is its strategy followed by words: `key=value`, or a flag. A *row* is a key with its value for each
cell; keys with the same value in all cells are left out of the names below an axis.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import is_color_like
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ..host.files import read_text
from ..records.palette import Fills
from ..results.tables import Results, run_folders
from ..sizes import show_bytes
from ..strategies import Look, find, spare_look
from .page import NUMBER

_COLORS: dict[str, str] = {}
"""Strategy that only a user's script knows -> the color recorded with its runs."""


def learn_colors(results: Results, folders: Iterable[Path]) -> None:
    """Reads the colors of users' strategies from the provenance of their runs in `folders`."""
    strategies = dict(zip(results.runs["run_id"], results.runs["strategy"], strict=True))
    for run in (run for folder in folders for run in run_folders(folder)):
        strategy, file = strategies.get(run.name), run / "provenance.json"
        if strategy is None or find(strategy) is not None or not file.is_file():
            continue
        # a damaged file costs a color, not the figure
        with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            color = json.loads(read_text(file))["look"]["color"]
            if is_color_like(color):
                _COLORS[strategy] = color


def look(strategy: str) -> Look:
    """The look of a strategy from the table of strategies; otherwise derived from its name, in its recorded color."""
    row, spare = find(strategy), spare_look(crc32(strategy.encode()))
    return row.look if row is not None else spare._replace(color=_COLORS.get(strategy, spare.color))


def stack(axes: Axes, x: float, parts: Mapping[str, float], fills: Fills, width: float) -> float:
    """Draws the parts as one stacked bar; returns its height."""
    bottom = 0.0
    for name, height in parts.items():
        color, hatch = fills[name]
        axes.bar(x, height, width, bottom, color=color, hatch=hatch, edgecolor="white", lw=0.4, label=name)
        bottom += height
    return bottom


LEAST = 0.002
"""Fraction of an axis: a smaller bar is invisible, and a legend does not name it."""


def seen(figure: Figure, fills: Fills) -> Fills:
    """Returns the `fills` that are visible in a figure's bars (`stack`)."""
    visible: set[object] = set()
    for axes in figure.axes:
        least = LEAST * axes.get_ylim()[1]
        for bars in axes.containers:
            if isinstance(bars, BarContainer) and any(bar.get_height() > least for bar in bars):
                visible.add(bars.get_label())
    return {name: fill for name, fill in fills.items() if name in visible}


def patches(fills: Fills) -> list[Patch]:
    """Legend entries for parts of bars."""
    return [Patch(facecolor=c, hatch=h, edgecolor="white", label=name) for name, (c, h) in fills.items()]


def rule(label: str, line: str = "-", **more: object) -> Line2D:
    """A legend entry for a line that does not belong to a strategy."""
    return Line2D([], [], linestyle=line, label=label, **{"color": "black", **more})


def number(axes: Axes, x: float, height: float, text: str, gap: float = 3) -> None:
    """Writes the number of a bar, or of a point, `gap` points above it."""
    axes.annotate(
        text, (x, height), (0, gap), textcoords="offset points", ha="center", va="bottom", fontsize="small", gid=NUMBER
    )


def bars(axes: Axes, cells: pd.DataFrame, draw_cell: Callable[[Axes, int, Any], None]) -> None:
    """Draws each cell at its position on the x axis: with `draw_cell` if it is ok, else its status."""
    for x, cell in enumerate(cells.itertuples()):
        if cell.status == "ok":
            draw_cell(axes, x, cell)
        else:
            absent(axes, x, str(cell.status))
    _name_cells(axes, [str(label) for label in cells["label"]])
    axes.set_xlim(-0.5, len(cells) - 0.5)


def absent(axes: Axes, x: float, word: str, color: str = "black", number: int = 0) -> None:
    """Writes a word, vertically at the axis, in place of a missing value; `number` offsets several at one position."""
    axes.annotate(
        f"× {word}", (x, 0), (-4 + 9 * number, 4), xycoords=axes.get_xaxis_transform(), textcoords="offset points",
        rotation=90, color=color, style="italic", fontsize="small", annotation_clip=False,
    )  # fmt: skip


def size_unit(largest: Any) -> tuple[str, int]:
    """The unit that suits sizes up to `largest` bytes, and its number of bytes; `largest` may be missing."""
    if pd.isna(largest):
        largest = 0
    return ("GiB", 2**30) if largest >= 4 * 2**30 else ("MiB", 2**20) if largest >= 2**20 else ("KiB", 2**10)


def show(value: float) -> str:
    """Formats a bar's number: three digits, at most one of them after the decimal point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def split(whole: float, parts: Mapping[str, float]) -> dict[str, float]:
    """Splits a whole in the proportions of the parts: medians of parts do not add up to the median of the whole."""
    total = sum(parts.values())
    return {name: whole * part / total for name, part in parts.items()} if total else {}


def curves(axes: Axes, cells: pd.DataFrame, values: str, line: str = "-", unit: float = 1) -> Iterator[tuple[Any, Any]]:
    """Draws `values` against N, a line per label, with a gap and the status where a cell is not ok.

    Yields each label's cells and its look, for drawing more of it.
    """
    absences: Counter[int] = Counter()  # at each N
    for label, group in cells.groupby("label", sort=False):
        style = label_style(cells, str(label))
        y = group[values].astype("float64") / unit
        axes.plot(group["world_size"], y, linestyle=line, label=label, **style)
        for cell in group[group["status"] != "ok"].itertuples():
            absent(axes, cell.world_size, f"{label}: {cell.status}", style["color"], absences[cell.world_size])
            absences[cell.world_size] += 1
        yield group, style
    ticks = sorted({int(n) for n in cells["world_size"]})
    low, high = ticks[0], ticks[-1]
    if high > 8:
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
        axes.set_xlim(low / 1.3, high * 1.3)
    else:
        reach = 0.12 * (high - low) or 0.5
        axes.set_xlim(low - reach, high + reach)
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.set_xlabel("ranks N")


def label_style(cells: pd.DataFrame, label: str) -> dict[str, Any]:
    """Color and marker of the strategy; labels of one strategy differ in the marker's fill."""
    strategy = str(cells.loc[cells["label"] == label, "strategy"].iloc[0])
    siblings = list(dict.fromkeys(cells.loc[cells["strategy"] == strategy, "label"]))
    fill = ("full", "none", "left", "right")[siblings.index(label) % 4]
    return {"color": look(strategy).color, "marker": look(strategy).marker, "fillstyle": fill, "ms": 5.5}


def entries(panels: Iterable[pd.DataFrame], line: str = "-") -> list[Line2D]:
    """A legend entry for every label of the panels."""
    styles: dict[str, dict[str, Any]] = {}
    for cells in panels:
        styles |= {str(label): label_style(cells, str(label)) for label in cells["label"] if label not in styles}
    return [Line2D([], [], linestyle=line, label=label, **style) for label, style in styles.items()]


NONE = "–"


def _name_cells(axes: Axes, labels: Sequence[str]) -> None:
    """Names the positions 0, 1 ... of the x axis by the differences between labels, one per line, and below them their
    strategies; the axis names the lines. A flag is a key with the value "yes".
    """
    pairs = [[word.rstrip(",").partition("=") for word in label.split()[1:]] for label in labels]
    options = [{key: value or "yes" for key, _, value in of_label} for of_label in pairs]
    rows = {
        key: [own.get(key, NONE) for own in options] for key in dict.fromkeys(key for own in options for key in own)
    }
    for key in (key for key in rows if key.endswith("_bytes")):
        rows[key] = [show_bytes(int(value)) if value.isdecimal() else value for value in rows[key]]
    shown = {key: values for key, values in rows.items() if len(set(values)) > 1}
    strategies = [label.split()[0] for label in labels]
    axes.set_xticks(range(len(labels)), ["\n".join(lines) for lines in zip(*shown.values(), strategies, strict=True)])
    if shown:
        axes.set_xlabel(", ".join([*shown, "strategy"]))
