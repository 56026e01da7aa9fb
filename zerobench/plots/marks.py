"""Marks of figures: bars with a name for each cell, curves against N, and notes on missing data.

Names of cells below an axis are a small table of their differences or, if there is no room, vertical text. A cell's
*label* is its strategy followed by words: `key=value`, or a flag. A *row* of the table is a key with its value for each
cell; keys with the same value in all cells are left out. The last row has the strategies, once per group of neighbors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.textpath import text_to_path
from matplotlib.transforms import offset_copy

from ..sizes import show_bytes
from .style import look


def bars(
    axes: Axes, cells: pd.DataFrame, draw_cell: Callable[[Axes, int, Any], None], rows: Rows | None = None
) -> None:
    """Draws a place on the x axis for each cell: with `draw_cell` if it is ok, else its status.

    `rows`: the differences between cells of a strategy, by their name; by default those in their labels.
    """
    for place, cell in enumerate(cells.itertuples()):
        if cell.status == "ok":
            draw_cell(axes, place, cell)
        else:
            absent(axes, place, str(cell.status))
    labels = [str(label) for label in cells["label"]]
    name_cells(axes, [label.split()[0] for label in labels], rows_of_labels(labels) if rows is None else rows)
    axes.set_xlim(-0.5, len(cells) - 0.5)


def absent(axes: Axes, place: float, word: str, color: str = "black", number: int = 0) -> None:
    """Writes a word, vertically at the axis, in place of a missing value; `number` offsets several at one place."""
    axes.annotate(
        f"× {word}",
        (place, 0),
        (-4 + 9 * number, 4),
        xycoords=axes.get_xaxis_transform(),
        textcoords="offset points",
        rotation=90,
        color=color,
        style="italic",
        fontsize="small",
        annotation_clip=False,
    )


def unit_of(largest: Any) -> tuple[str, int]:
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
    there: Counter[int] = Counter()
    for label, mine in cells.groupby("label", sort=False):
        how = style_of(cells, str(label))
        y = mine[values].astype("float64") / unit
        axes.plot(mine["world_size"], y, linestyle=line, label=label, **how)
        for cell in mine[mine["status"] != "ok"].itertuples():
            absent(axes, cell.world_size, f"{label}: {cell.status}", how["color"], there[cell.world_size])
            there[cell.world_size] += 1
        yield mine, how
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


def style_of(cells: pd.DataFrame, label: str) -> dict[str, Any]:
    """Color and marker of the strategy; labels of one strategy differ in the marker's fill."""
    strategy = str(cells.loc[cells["label"] == label, "strategy"].iloc[0])
    siblings = list(dict.fromkeys(cells.loc[cells["strategy"] == strategy, "label"]))
    fill = ("full", "none", "left", "right")[siblings.index(label) % 4]
    return {"color": look(strategy).color, "marker": look(strategy).marker, "fillstyle": fill, "ms": 5.5}


def entries(panels: Iterable[pd.DataFrame], line: str = "-") -> list[Line2D]:
    """A legend entry for every label of the panels."""
    found: dict[str, dict[str, Any]] = {}
    for cells in panels:
        found |= {str(label): style_of(cells, str(label)) for label in cells["label"] if label not in found}
    return [Line2D([], [], linestyle=line, label=label, **how) for label, how in found.items()]


Rows = Mapping[str, Sequence[str]]
"""Key -> its value for each cell."""

NONE = "–"
LINE = 1.25
"""Height of a row, in multiples of its text's height."""

BESIDE, MARGIN = 36, 8
"""Width in points of an axis and its label to the left of the axes, and of the margin between panels."""


def name_cells(axes: Axes, strategies: Sequence[str], rows: Rows) -> None:
    """Names the places 0, 1 ... of the x axis by their strategies and their other differences."""
    places, shown = range(len(strategies)), {key: values for key, values in rows.items() if len(set(values)) > 1}
    values = ["\n".join(parts) for parts in zip(*shown.values(), strict=True)] if shown else list(strategies)
    beside = max([BESIDE, *(width_of(key) + MARGIN for key in shown)])
    slot = (_points_wide(axes) - beside - MARGIN) / len(strategies)
    if any(width_of(line) > slot - 2 for value in values for line in value.split("\n")):
        words = [" ".join([one, *(f"{k}={v[i]}" for k, v in shown.items())]) for i, one in enumerate(strategies)]
        axes.set_xticks(places, words if shown else values, rotation=90)
        return
    axes.set_xticks(places, values, linespacing=LINE)
    if shown:
        _head_and_group(axes, list(shown), strategies)


def rows_of_labels(labels: Sequence[str]) -> Rows:
    """Rows of the differences between labels; a flag is a key with the value "yes"."""
    words = [words_of(label) for label in labels]
    keys = dict.fromkeys(key for mine in words for key in mine)
    return {key: [_show(key, mine.get(key)) for mine in words] for key in keys}


def words_of(label: str) -> dict[str, str]:
    """Words of a label after the strategy: key -> value; for a flag "yes"."""
    pairs = (word.rstrip(",").partition("=") for word in label.split()[1:])
    return {key: value or "yes" for key, _, value in pairs}


def width_of(text: str) -> float:
    """Returns the width of one line of small text, in points."""
    prop = FontProperties(size=mpl.rcParams["xtick.labelsize"])
    return float(text_to_path.get_text_width_height_descent(text, prop, False)[0])


def _show(key: str, value: str | None) -> str:
    if value is None:
        return NONE
    return show_bytes(int(value)) if key.endswith("_bytes") and value.isdecimal() else value


def _points_wide(axes: Axes) -> float:
    spec = axes.get_subplotspec()
    abreast = spec.get_gridspec().ncols if spec is not None else 1
    return float(72 * axes.get_figure(root=True).get_figwidth() / abreast)


def _head_and_group(axes: Axes, keys: Sequence[str], strategies: Sequence[str]) -> None:
    """Writes the keys to the left of their values, and below a line under them each strategy once."""
    size = FontProperties(size=mpl.rcParams["xtick.labelsize"]).get_size_in_points()
    gap = mpl.rcParams["xtick.major.size"] + mpl.rcParams["xtick.major.pad"]
    how = {"textcoords": "offset points", "va": "top", "fontsize": "small", "annotation_clip": False}
    axes.annotate("\n".join(keys), (0, 0), (-4, -gap), xycoords="axes fraction", ha="right", style="italic",
                  linespacing=LINE, **how)  # fmt: skip
    below, first = -gap - len(keys) * LINE * size * 1.05 - 2, 0
    across = axes.get_xaxis_transform()
    for strategy, mine in groupby(strategies):
        last = first + len(list(mine)) - 1
        shift = offset_copy(across, axes.get_figure(root=True), y=below, units="points")
        axes.add_artist(
            Line2D([first - 0.35, last + 0.35], [0, 0], transform=shift, color="black", lw=0.7, clip_on=False)
        )
        axes.annotate(strategy, ((first + last) / 2, 0), (0, below - 2), xycoords=across, ha="center", **how)
        first = last + 1
