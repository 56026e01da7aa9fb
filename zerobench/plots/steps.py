"""Figures of steps: losses over all steps, and live bytes within one."""

from __future__ import annotations

from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from ..records.palette import CATEGORIES
from ..results.tables import Results
from ..strategies import reference
from .marks import LEAST, absent, look, patches, show, size_unit
from .page import Sheet, key, sheet
from .panels import MOST_PANELS, cell_rows, comparisons, title

Curves = dict[str, pd.Series]
"""A cell's label -> its losses by step."""


def losses(results: Results, panels: int = MOST_PANELS) -> Sheet:
    """Loss curves of the strategies, and their differences from DDP.

    Left: the loss of every step of the timed pass, warm-up included, as the mean over the ranks. Curves that are
    equal to the bit are one line, whose label names them all. Right: the curves minus DDP's (or the first one, if DDP
    did not run); omitted if no setting has differences. A loss that is not finite is a gap, with a cross at the axis;
    a cell that failed, or was not run, is named.
    """
    timed = set(results.steps.loc[results.steps["mode"] == "timed", "run_id"])
    settings = [
        cells.assign(
            status=cells["status"]
            .mask((cells["status"] == "ok") & ~cells["run_id"].isin(timed), "no losses")
            .mask(cells["backend"] == "simulated", "simulated, no losses")
        )
        for cells in comparisons(results)
    ]
    curves = []
    for cells in settings:
        own: Curves = {
            str(cell.label): mean_losses(results, cell) for cell in cells.itertuples() if cell.status == "ok"
        }
        curves.append(dict(sorted(own.items(), key=lambda item: item[0].split()[0] != reference().name)))
    has_differences = any(len(_distinct(own)) > 1 for own in curves[:panels])
    caption = "All strategies on the same batches. Curves that are equal to the bit are one line."
    figure, grid = sheet(settings, panels, (3.2, 2.2), caption, across=1 + has_differences)
    for (axes, cells), own in zip(grid, curves, strict=False):
        left = axes[0] if has_differences else axes
        _draw_losses(left, cells, own)
        if has_differences:
            _draw_differences(axes[1], own)
        left.set_title(title(cells, settings), loc="left")
    return figure


def _distinct(curves: Curves) -> Curves:
    """Merges curves that are equal to the bit into one, under all their labels."""
    groups: dict[str, list[str]] = {}
    for label, curve in curves.items():
        same = next((first for first in groups if curves[first].equals(curve)), label)
        groups.setdefault(same, []).append(label)
    return {
        fill(" = ".join(labels) + (", to the bit" if len(labels) > 1 else ""), 45): curves[first]
        for first, labels in groups.items()
    }


def _draw_losses(axes: Axes, cells: pd.DataFrame, curves: Curves) -> None:
    distinct = _distinct(curves)
    for number, (label, curve) in enumerate(distinct.items()):
        _curve(axes, label, curve, number, len(distinct))
    _scale_steps(axes)
    axes.set_ylabel("loss, mean over ranks (nats per token)")
    if curves:
        axes.legend()
    failed = [f"× {cell.label}: {cell.status}" for cell in cells.itertuples() if cell.status != "ok"]
    axes.text(0.02, 0.13, "\n".join(failed), transform=axes.transAxes, style="italic", fontsize="small")


def _draw_differences(axes: Axes, curves: Curves) -> None:
    """Draws the differences, with zero in the middle; a message instead of axes if all are zero."""
    distinct = _distinct(curves)
    if len(distinct) <= 1:
        axes.set_axis_off()
        message = "no other losses"
        if len(curves) > 1:
            message = f"all equal to the bit at each of {len(next(iter(curves.values())))} steps"
        axes.text(0.5, 0.5, message, transform=axes.transAxes, ha="center", va="center")
        return
    first = next(iter(curves))
    for number, (label, curve) in enumerate(distinct.items()):
        _curve(axes, label, curve - curves[first], number, len(distinct))
    lines = [line for line in axes.lines if line.get_linestyle() == "-"]
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in lines])
    largest = float(np.nanmax(np.abs(values), initial=0.0))
    _scale_steps(axes)
    if largest:  # else they differ in values that are not finite
        axes.set_ylim(-1.3 * largest, 1.3 * largest)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    axes.set_ylabel(fill(f"loss − loss of {first} (nats per token)", 45))
    axes.set_title(f"largest difference: {largest:.2g}", loc="left")


def mean_losses(results: Results, cell: Any, mode: str = "timed") -> pd.Series:
    """Mean over the ranks by step, in one pass of the newest launch; NaN if a rank's loss is not finite."""
    steps = cell_rows(results, "steps", cell)
    steps = steps[(steps["run_id"] == cell.run_id) & (steps["mode"] == mode)]
    return steps.pivot(index="step", columns="rank", values="loss").mean(axis=1, skipna=False)


def _curve(axes: Axes, label: str, curve: pd.Series, number: int, count: int) -> None:
    color = look(label.split()[0]).color
    width = 1 + 4 * (count - 1 - number) / max(1, count - 1)
    curve = curve.astype("float64").replace([np.inf, -np.inf], np.nan)
    axes.plot(curve.index.astype(int), curve, color=color, lw=width, label=label, solid_capstyle="round")
    gaps = curve.index[curve.isna()].astype(int)
    if len(gaps):
        axes.plot(gaps, np.zeros(len(gaps)), "x", color=color, transform=axes.get_xaxis_transform(), clip_on=False)


def _scale_steps(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.margins(x=0.02)
    axes.xaxis.get_major_locator().set_params(integer=True)


WHOLE = 100
"""Length of the axis, in percent."""

LITTLE, NONE = 0.15, 0.05
"""Fractions of the step: a phase shorter than these has its name rotated, or outside of it."""


def timeline(results: Results, panels: int = MOST_PANELS) -> Sheet:
    """Memory against time within one step, stacked by category, with the phases of the step marked.

    Shows the last measured step of the accounted pass, on the rank that needs the most. That pass carries the
    instrument and is slower than the timed one, so the axis is in percent of the step, not in milliseconds. One panel
    per cell, on one scale for cells that train the same thing; a cell that failed, or was not run, is an empty panel
    that says so.
    """
    settings = comparisons(results)
    singles = [cells.iloc[[index]] for cells in settings for index in range(len(cells))]
    scales = [cells["peak_bytes"].max() for cells in settings for _ in range(len(cells))]
    caption = "Live memory during one step, on the rank with the largest sum."
    caption += f" All: {title(settings[0], settings)}." if len(settings) == 1 else ""
    figure, grid = sheet(singles, panels, (3.2, 1.9), caption)
    drawn: set[str] = set()
    for (axes, cells), most in zip(grid, scales, strict=False):
        name, unit = size_unit(most)
        cell: Any = next(cells.itertuples())
        axes.set_title(cell.label if len(settings) == 1 else f"{cell.label}: {title(cells, settings)}", loc="left")
        axes.set_ylabel(f"live bytes, largest rank ({name})")
        axes.set_xlabel("time (% of the step)")
        axes.set_ylim(0, 1.3 * (1 if pd.isna(most) else most / unit))
        rows = cell_rows(results, "timeline", cell)
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

    # A line at the beginning of each phase, with its name at the top: rotated if there is little room, and left of the
    # line if there is none. Time between two phases counts as data, and is mostly too short for a name.
    phases = rows["phase"]
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
    return drawn
