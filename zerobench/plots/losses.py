"""Loss curves of the strategies, and their differences from DDP.

Left: the loss of every step of the timed pass, warm-up included, as the mean over the ranks. Curves that are equal to
the bit are one line, whose label names them all. Right: the curves minus DDP's (or the first one, if DDP did not run);
omitted if no setting has differences. A loss that is not finite is a gap, with a cross at the axis; a cell that failed,
or was not run, is named.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..results.tables import Results
from ..strategies import reference
from .page import sheet
from .panels import MOST_PANELS, comparisons, rows_of, title
from .style import look

CAPTION = "All strategies on the same batches. Curves that are equal to the bit are one line."

Curves = dict[str, pd.Series]
"""A cell's label -> its losses by step."""


def draw(results: Results, panels: int = MOST_PANELS) -> Figure:
    """Draws each setting's losses, and next to them the differences if any setting has some."""
    settings = [
        cells.assign(status=cells["status"].mask(cells["backend"] == "simulated", "simulated, no losses"))
        for cells in comparisons(results)
    ]
    curves = []
    for cells in settings:
        own: Curves = {str(cell.label): losses(results, cell) for cell in cells.itertuples() if cell.status == "ok"}
        curves.append(dict(sorted(own.items(), key=lambda item: item[0].split()[0] != reference().name)))
    has_differences = any(len(_distinct(own)) > 1 for own in curves[:panels])
    figure, grid = sheet(settings, panels, (3.2, 2.2), CAPTION, across=1 + has_differences)
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
        " = ".join(labels) + (", to the bit" if len(labels) > 1 else ""): curves[first]
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
    axes.set_ylabel(f"loss − loss of {first} (nats per token)")
    axes.set_title(f"largest difference: {largest:.2g}", loc="left")


def losses(results: Results, cell: Any) -> pd.Series:
    """Mean over the ranks by step, in the timed pass of the newest launch; NaN if a rank's loss is not finite."""
    steps = rows_of(results, "steps", cell)
    steps = steps[(steps["run_id"] == cell.run_id) & (steps["mode"] == "timed")]
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
