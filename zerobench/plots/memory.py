"""Memory per strategy, stacked by category, with the prediction marked.

Two bars per strategy: the model states (and buffers in flight) at their own maximum, to which formulas apply; and
everything at the instant of the overall peak, with the allocator's bytes beyond the ledger on top, hatched. A bar's
number is the ledger's, as in tables. Each is on the rank that needs the most, over the newest launches. One panel for
each set of cells that train the same thing; a cell that failed, or was not run, is drawn as such.
"""

from __future__ import annotations

import argparse
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..records import STATES
from ..results.tables import Results
from ..sizes import parse_memory, show_bytes
from .marks import absent, bars, show, unit_of
from .page import key, sheet
from .panels import MOST_PANELS, comparisons, rows_of, title
from .style import CATEGORIES, VERMILION, number, patches, rule, seen, stack

OUTSIDE: dict[str, Any] = {"fill": False, "hatch": "////", "linewidth": 0.8}
"""The part that is not a category of the ledger: the allocator's peak minus the ledger's."""

LEAST_OUTSIDE = 0.001
"""Fraction of the peak below which that part is not drawn."""

CAPTION = "Left bar: model states at their maximum. Right bar: everything at the peak."
CAPTION_OUTSIDE = (
    " Hatched, outside the ledger: memory that the allocator held at its peak and no tensor had, such as scratch of"
    " kernels; the numbers leave it out."
)


def add_capacity(parser: argparse.ArgumentParser) -> None:
    """Adds --capacity."""
    parser.add_argument("--capacity", type=_capacity, help="memory: bytes of a rank, as in 24GiB, drawn as a line")


def _capacity(text: str) -> int:
    try:
        return parse_memory(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def draw(results: Results, panels: int = MOST_PANELS, capacity: int | None = None) -> Figure:
    """Draws the figure. `capacity`: bytes of a rank, drawn as a line."""
    settings = comparisons(results)
    largest = max([results.runs["peak_bytes"].max(), capacity], key=lambda size: 0 if pd.isna(size) else size)
    name, unit = unit_of(largest)
    drawn = (cell for cells in settings[:panels] for cell in cells[cells["status"] == "ok"].itertuples())
    is_beyond = any(_outside(cell) for cell in drawn)
    figure, grid = sheet(settings, panels, (3.2, 2.5), CAPTION + (CAPTION_OUTSIDE if is_beyond else ""))
    for axes, cells in grid:
        bars(axes, cells, lambda axes, x, cell: _draw_cell(axes, x, cell, results, unit))
        axes.set_ylabel(f"{name}, largest rank")
        axes.set_title(title(cells, settings), loc="left")
        if capacity is not None:
            axes.axhline(capacity / unit, color=VERMILION, ls="--", lw=1.4)
    lines = [
        rule("states predicted, buffers in flight included", lw=1.8),
        rule("states by the paper's formula alone", ":", lw=1.4),
    ]
    if capacity is not None:
        lines.append(rule(f"capacity of a rank: {show_bytes(capacity)}", "--", lw=1.4, color=VERMILION))
    outside = [Patch(label="outside the ledger", **OUTSIDE)] if is_beyond else []
    key(figure, [*patches(seen(figure, CATEGORIES)), *outside, *lines])
    return figure


def _draw_cell(axes: Axes, x: int, cell: Any, results: Results, unit: int) -> None:
    memory = rows_of(results, "memory", cell)
    memory = memory[(memory["phase"] == "step") & (memory["tier"] == "device")]
    if memory.empty:
        absent(axes, x, "no memory table")
        return
    for shift, total, column in ((-0.2, "states", "at_states_peak_bytes"), (0.2, "total", "at_peak_bytes")):
        most = memory[memory["category"] == total].sort_values("max_bytes").iloc[-1]
        rank = memory[(memory["run_id"] == most["run_id"]) & (memory["rank"] == most["rank"])]
        sizes = rank.set_index("category")[column]
        parts = {name: int(sizes[name]) / unit for name in (STATES if total == "states" else CATEGORIES)}
        height, above = stack(axes, x + shift, parts, CATEGORIES, 0.36), 0.0
        if total == "total" and (outside := _outside(cell)):
            above = outside / unit
            axes.bar(x + shift, above, 0.36, bottom=height, **OUTSIDE)
        number(axes, x + shift, height + above, show(height))  # of the ledger, as in tables
    for states, line, width in ((cell.predicted_states_bytes, "-", 1.8), (cell.floor_states_bytes, ":", 1.4)):
        if not pd.isna(states):  # theory predicts no states of a peer
            axes.hlines(states / unit, x - 0.4, x, color="black", lw=width, linestyles=line)


def _outside(cell: Any) -> float:
    """Returns the bytes of a cell's allocator at its peak beyond the ledger's; 0 if they are too few to be drawn."""
    outside = cell.outside_ledger_bytes
    return 0.0 if pd.isna(outside) or outside < LEAST_OUTSIDE * cell.peak_bytes else float(outside)
