"""Loss curves of the strategies on top of one another, and their differences from DDP.

Left: the loss of every step of the timed pass, warm-up included, as the mean over the ranks; the first curve is the
widest and each that follows lies on top of it, so that equal curves show as one band of several colors. Right: the
curves less DDP's (or the first one's, where DDP did not run). Where all are equal to the bit a sentence says so, and
where they are in every setting there is no right panel. A loss that is not finite is a gap, with a cross at the axis;
a cell that failed, or was not run, is named.
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

CAPTION = "All strategies on the same batches. Equal curves lie on top of one another, the later ones narrower."

Curves = dict[str, pd.Series]
"""A cell's label -> its losses by step."""


def draw(results: Results, panels: int = MOST_PANELS) -> Figure:
    """A setting's losses, and beside them the differences where any setting has some."""
    settings = [
        cells.assign(status=cells["status"].mask(cells["backend"] == "simulated", "simulated, no losses"))
        for cells in comparisons(results)
    ]
    curves = [_curves(results, cells) for cells in settings]
    both = any(_differ(found) for found in curves[:panels])
    figure, places = sheet(settings, panels, (3.2, 2.2), CAPTION, across=1 + both)
    for (place, cells), found in zip(places, curves, strict=False):
        left = place[0] if both else place
        _draw_losses(left, cells, found)
        if both:
            _draw_differences(place[1], found)
        elif len(found) > 1:
            left.text(0.02, 0.03, _sentence(found), transform=left.transAxes, fontsize="small")
        left.set_title(title(cells, settings), loc="left")
    return figure


def _curves(results: Results, cells: pd.DataFrame) -> Curves:
    """Returns the losses of cells that are ok: the reference's first, else in their order."""
    found = {cell.label: losses(results, cell) for cell in cells.itertuples() if cell.status == "ok"}
    return dict(sorted(found.items(), key=lambda item: item[0].split()[0] != reference().name))


def _differ(found: Curves) -> bool:
    first, *others = found.values() or [pd.Series()]
    return any(not curve.equals(first) for curve in others)


def _draw_losses(axes: Axes, cells: pd.DataFrame, found: Curves) -> None:
    for number, (label, curve) in enumerate(found.items()):
        _curve(axes, label, curve, number, len(found))
    _scale_steps(axes)
    axes.set_ylabel("loss, mean over ranks (nats per token)")
    if found:
        axes.legend()
    failed = [f"× {cell.label}: {cell.status}" for cell in cells.itertuples() if cell.status != "ok"]
    axes.text(0.02, 0.13, "\n".join(failed), transform=axes.transAxes, style="italic", fontsize="small")


def _draw_differences(axes: Axes, found: Curves) -> None:
    """Zero in the middle; a sentence in place of axes on which there would be nothing but zero."""
    if not _differ(found):
        axes.set_axis_off()
        words = _sentence(found) if len(found) > 1 else "no other losses"
        axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center")
        return
    first = next(iter(found))
    for number, (label, curve) in enumerate(found.items()):
        _curve(axes, label, curve - found[first], number, len(found))
    curves = [line for line in axes.lines if line.get_linestyle() == "-"]
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in curves])
    largest = float(np.nanmax(np.abs(values), initial=0.0))
    _scale_steps(axes)
    if largest:  # else they differ in what is not finite
        axes.set_ylim(-1.3 * largest, 1.3 * largest)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    axes.set_ylabel(f"loss less that of {first} (nats per token)")
    axes.set_title(f"largest difference: {largest:.2g}", loc="left")


def _sentence(found: Curves) -> str:
    return f"all equal to the bit at each of {len(next(iter(found.values())))} steps"


def _scale_steps(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.margins(x=0.02)
    axes.xaxis.get_major_locator().set_params(integer=True)


def losses(results: Results, cell: Any) -> pd.Series:
    """Mean over the ranks by step, of the timed pass of the newest launch; NaN if a rank's is not finite."""
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
