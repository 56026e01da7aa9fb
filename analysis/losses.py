"""Loss curves of the strategies on top of one another, and their differences from DDP.

    python analysis/losses.py [RUNS ...] --out DIR

Left: the loss of every step of the timed pass, warm-up included, as the mean over the ranks; the first curve is the
widest and each that follows lies on top of it, so that equal curves show as one band of several colors. Right: the
curves less DDP's (or the first one's, where DDP did not run): equal to the bit is 0. A loss that is not finite is a
gap, with a cross at the axis; a cell that failed, or was not run, is named.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.common import MOST_PANELS, comparisons, rows_of, script, title
from analysis.page import sheet
from analysis.style import look
from zerobench.results.tables import Results
from zerobench.strategies import reference

CAPTION = "All strategies on the same batches. Equal curves lie on top of one another, the later ones narrower."


def draw(results: Results, panels: int = MOST_PANELS) -> Figure:
    """Two panels a setting: losses, differences."""
    settings = [
        cells.assign(status=cells["status"].mask(cells["backend"] == "simulated", "simulated, no losses"))
        for cells in comparisons(results)
    ]
    figure, places = sheet(settings, panels, (4.6, 3.2), CAPTION, across=2)
    for (left, right), cells in places:
        found = {cell.label: losses(results, cell) for cell in cells.itertuples() if cell.status == "ok"}
        first = next((label for label in found if label.split()[0] == reference().name), next(iter(found), None))
        for number, (label, curve) in enumerate(found.items()):
            _curve(left, label, curve, number, len(found))
            _curve(right, label, curve - found[first], number, len(found))
        for axes in (left, right):
            axes.set_xlabel("step")
            axes.margins(x=0.02)
            axes.xaxis.get_major_locator().set_params(integer=True)
        left.set_title(title(cells, settings), loc="left")
        left.set_ylabel("loss, mean over ranks (nats a token)")
        if found:
            left.legend()
            _scale_differences(right, str(first))
        failed = [f"× {cell.label}: {cell.status}" for cell in cells.itertuples() if cell.status != "ok"]
        left.text(0.02, 0.03, "\n".join(failed), transform=left.transAxes, style="italic", fontsize="small")
    return figure


def losses(results: Results, cell: Any) -> pd.Series:
    """Mean over the ranks by step, of the timed pass of the newest launch; NaN where a rank's is not finite."""
    steps = rows_of(results, "steps", cell)
    steps = steps[(steps["run_id"] == cell.run_id) & (steps["mode"] == "timed")]
    return steps.pivot(index="step", columns="rank", values="loss").mean(axis=1, skipna=False)


def _curve(axes: Axes, label: str, curve: pd.Series, number: int, count: int) -> None:
    color = look(label.split()[0]).color
    width = 1 + 6 * (count - 1 - number) / max(1, count - 1)
    curve = curve.astype("float64").replace([np.inf, -np.inf], np.nan)
    axes.plot(curve.index.astype(int), curve, color=color, lw=width, label=label, solid_capstyle="round")
    gaps = curve.index[curve.isna()].astype(int)
    if len(gaps):
        axes.plot(gaps, np.zeros(len(gaps)), "x", color=color, transform=axes.get_xaxis_transform(), clip_on=False)


def _scale_differences(axes: Axes, first: str) -> None:
    """Zero in the middle; where all is zero, a scale on which the smallest difference of losses would be seen."""
    curves = [line for line in axes.lines if line.get_linestyle() == "-"]
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in curves])
    largest = float(np.nanmax(np.abs(values), initial=0.0))
    reach = 1.3 * largest or 1e-7
    axes.set_ylim(-reach, reach)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    axes.set_ylabel(f"loss less that of {first} (nats a token)")
    axes.set_title(f"largest difference: {largest:.2g}" if largest else "all differences are 0", loc="left")


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 where there is nothing to draw."""
    return script("losses", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
