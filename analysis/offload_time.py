"""Cost in time of having less of the model states on the device.

    python analysis/offload_time.py [RUNS ...] --out DIR

A point a cell: bytes a parameter that the device keeps, by the milliseconds of a step, with their 95 % interval. On a
machine without a GPU the host computes for both sides, so what an update gains by running beside a forward is not to be
seen there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.common import MOST_PANELS, comparisons, script, title
from analysis.offload import name_of, parts_of
from analysis.page import sheet
from analysis.style import BLUE
from zerobench.results.tables import Results

CAPTION = "Model states that the device keeps, and the time of a step."


def draw(results: Results, panels: int = MOST_PANELS) -> Figure:
    """One panel for each set of cells that train the same thing."""
    settings = comparisons(results)
    figure, places = sheet(settings, panels, (5.6, 3.6), CAPTION)
    for axes, cells in places:
        timed = cells[(cells["status"] == "ok") & cells["step_s"].notna()]
        drawn: list[float] = []
        for cell in timed.sort_values("step_s").itertuples():
            drawn.append(_draw_cell(axes, cell, results, drawn))
        failed = [f"× {cell.label}: {cell.status}" for cell in cells.itertuples() if cell.Index not in timed.index]
        axes.text(0.02, 0.03, "\n".join(failed), transform=axes.transAxes, style="italic", fontsize="small")
        axes.set(xlabel="bytes a parameter on the device", ylabel="ms a step")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.margins(x=0.25, y=0.2)
        axes.set_title(title(cells, settings))
    return figure


def _draw_cell(axes: Axes, cell: Any, results: Results, drawn: list[float]) -> float:
    """Where it is. Its name lies below it, or above where there is one below at that place already."""
    kept, ms = parts_of(results, cell)["device"], 1000 * cell.step_s
    if not pd.isna(cell.step_s_low):
        reach = [[ms - 1000 * cell.step_s_low], [1000 * cell.step_s_high - ms]]
        axes.errorbar([kept], [ms], reach, color=BLUE, capsize=3, lw=0.8)
    axes.plot([kept], [ms], "o", color=BLUE, ms=5.5)
    up = 6 if any(abs(kept - other) < 0.5 for other in drawn) else -12
    axes.annotate(name_of(cell.config), (kept, ms), (4, up), textcoords="offset points", fontsize="small")
    return kept


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 where there is nothing to draw."""
    return script("offload_time", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
