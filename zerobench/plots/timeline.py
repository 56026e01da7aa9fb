"""Memory against time within one step, stacked by category, with the phases of the step marked.

Shows the last measured step of the accounted pass, on the rank that needs the most. That pass carries the instrument
and is slower than the timed one, so the axis is in percent of the step, not in milliseconds. One panel per cell, on one
scale for cells that train the same thing; a cell that failed, or was not run, is an empty panel that says so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..results.tables import Results
from .marks import absent, show, unit_of
from .page import key, sheet
from .panels import MOST_PANELS, comparisons, rows_of, title
from .style import CATEGORIES, LEAST, patches

CAPTION = "Live memory during one step, on the rank with the largest sum."

WHOLE = 100
"""Length of the axis, in percent."""

LITTLE, NONE = 0.15, 0.05
"""Fractions of the step: a phase shorter than these has its name rotated, or outside of it."""


def draw(results: Results, panels: int = MOST_PANELS) -> Figure:
    """Draws one panel per cell."""
    settings = comparisons(results)
    singles = [cells.iloc[[index]] for cells in settings for index in range(len(cells))]
    scales = [cells["peak_bytes"].max() for cells in settings for _ in range(len(cells))]
    caption = f"{CAPTION} All: {title(settings[0], settings)}." if len(settings) == 1 else CAPTION
    figure, grid = sheet(singles, panels, (3.2, 1.9), caption)
    drawn: set[str] = set()
    for (axes, cells), most in zip(grid, scales, strict=False):
        name, unit = unit_of(most)
        cell: Any = next(cells.itertuples())
        axes.set_title(cell.label if len(settings) == 1 else f"{cell.label}: {title(cells, settings)}", loc="left")
        axes.set_ylabel(f"live bytes, largest rank ({name})")
        axes.set_xlabel("time (% of the step)")
        axes.set_ylim(0, 1.3 * (1 if pd.isna(most) else most / unit))
        rows = rows_of(results, "timeline", cell)
        if cell.status != "ok" or rows.empty:
            absent(axes, 0.5, str(cell.status) if cell.status != "ok" else "no timeline")
            axes.set_xticks([])
        else:
            most = rows.loc[rows[[f"{name}_bytes" for name in CATEGORIES]].sum(axis=1).idxmax()]
            rows = rows[(rows["run_id"] == most["run_id"]) & (rows["rank"] == most["rank"])].sort_values("instant")
            drawn |= _stack(axes, rows, unit)
            axes.axhline(cell.peak_bytes / unit, color="black", lw=0.8, ls=":")  # its instant may be too short to see
            axes.annotate(f"peak {show(cell.peak_bytes / unit)}", (0.01, cell.peak_bytes / unit), (0, 1),
                          xycoords=axes.get_yaxis_transform(), textcoords="offset points",
                          fontsize="small")  # fmt: skip
    key(figure, patches({name: fill for name, fill in CATEGORIES.items() if name in drawn}))
    return figure


def _stack(axes: Axes, rows: pd.DataFrame, unit: int) -> set[str]:
    """Draws a step function: live bytes stay constant until the next instant. Returns the visible categories."""
    seconds = rows["seconds"].to_numpy(dtype="float64")
    percent = np.asarray(WHOLE * seconds / (seconds[-1] or 1))
    low, drawn = 0 * percent, set()
    for name, (color, hatch) in CATEGORIES.items():
        high = low + rows[f"{name}_bytes"].to_numpy(dtype="float64") / unit
        axes.fill_between(
            percent, low, high, step="post", facecolor=color, hatch=hatch, edgecolor="white", lw=0, label=name
        )
        drawn |= {name} if (high - low).max() > LEAST * axes.get_ylim()[1] else set()
        low = high
    axes.set_xlim(0, WHOLE)
    _mark_phases(axes, rows["phase"], percent)
    return drawn


def _mark_phases(axes: Axes, phases: pd.Series, percent: np.ndarray[Any, np.dtype[np.float64]]) -> None:
    """Draws a line at the beginning of each phase, with its name at the top: rotated if there is little room, and left
    of the line if there is none. Time between two phases counts as data, and is mostly too short for a name.
    """
    is_first = (phases != phases.shift()).to_numpy()
    starts = list(percent[is_first])
    free = 0.0
    for phase, start, stop in zip(phases[is_first], starts, [*starts[1:], WHOLE], strict=True):
        axes.axvline(start, color="black", lw=0.8, ls="--")
        room = stop - start
        if (phase == "data" and room < LITTLE * WHOLE) or (room < NONE * WHOLE and start - free < NONE * WHOLE):
            continue
        x, side = ((start + stop) / 2, "center") if room >= LITTLE * WHOLE else (start, "left")
        if room < NONE * WHOLE:
            side = "right"
        free = start if side == "right" else start + NONE * WHOLE
        axes.annotate(
            phase, (x, 1), ({"center": 0, "left": 2, "right": -2}[side], -2), textcoords="offset points",
            xycoords=axes.get_xaxis_transform(), ha=side, va="top", fontsize="small",
            rotation=0 if side == "center" else 90, annotation_clip=False,
        )  # fmt: skip
