"""Marks of figures: bars with a name for each cell, curves against N, and words for what is not there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from .names import Rows, name_cells, rows_of_labels
from .style import look


def bars(
    axes: Axes, cells: pd.DataFrame, draw_cell: Callable[[Axes, int, Any], None], rows: Rows | None = None
) -> None:
    """A place on the x axis for each cell: what `draw_cell` draws, or the word for why there is nothing.

    `rows`: in what cells of a strategy differ, by what it is called; without them what their labels say.
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
    """The word in the place of what is not there, upright at the axis; `number` sets several at one place apart."""
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


def unit_of(largest: float) -> tuple[str, int]:
    """The unit in which sizes up to `largest` bytes read well, and its bytes."""
    return ("GiB", 2**30) if largest >= 4 * 2**30 else ("MiB", 2**20) if largest >= 2**20 else ("KiB", 2**10)


def show(value: float) -> str:
    """A bar's number: three digits, no more than one of them behind the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def split(whole: float, parts: Mapping[str, float]) -> dict[str, float]:
    """Splits a whole in the proportions of the parts: medians of parts do not add up to the median of the whole."""
    total = sum(parts.values())
    return {name: whole * part / total for name, part in parts.items()} if total else {}


def curves(axes: Axes, cells: pd.DataFrame, values: str, line: str = "-", unit: float = 1) -> Iterator[tuple[Any, Any]]:
    """Draws `values` against N, a line a label with a gap where a cell is not ok, and its status there.

    Yields each label's cells and its look, for whatever else there is to draw of it.
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
    """Color and marker of the strategy; labels of one strategy differ in how the marker is filled."""
    strategy = str(cells.loc[cells["label"] == label, "strategy"].iloc[0])
    siblings = list(dict.fromkeys(cells.loc[cells["strategy"] == strategy, "label"]))
    fill = ("full", "none", "left", "right")[siblings.index(label) % 4]
    return {"color": look(strategy).color, "marker": look(strategy).marker, "fillstyle": fill, "ms": 5.5}


def entries(panels: Iterable[pd.DataFrame], line: str = "-") -> list[Line2D]:
    """A legend's entry for every label of the panels."""
    found: dict[str, dict[str, Any]] = {}
    for cells in panels:
        found |= {str(label): style_of(cells, str(label)) for label in cells["label"] if label not in found}
    return [Line2D([], [], linestyle=line, label=label, **how) for label, how in found.items()]
