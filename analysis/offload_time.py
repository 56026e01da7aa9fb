"""Cost in time of having less of the model states on the device.

    python analysis/offload_time.py [RUNS ...] --out DIR

A bar a cell: the median time of a step with its 95 % interval, and below it what the device keeps, in bytes per
parameter. On a machine without a GPU the host computes for both sides, so what an update gains by running beside a
forward is not to be seen there. A cell that failed, or was not run, is drawn as such.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.common import script
from analysis.offload import parts_of
from zerobench.plots.marks import NONE, Rows, bars, rows_of_labels, show
from zerobench.plots.page import sheet
from zerobench.plots.panels import MOST_PANELS, comparisons, on_cores, rows_of, title, with_times
from zerobench.plots.style import BLUE, number
from zerobench.results.tables import Results

CAPTION = "Time of a step by where the optimizer's states are: medians with their 95 % intervals"
TIERS = {NONE: "device", "cpu": "host", "nvme": "files"}
MS = 1000


def draw(results: Results, panels: int = MOST_PANELS) -> Figure:
    """One panel for each set of cells that train the same thing."""
    settings = with_times(comparisons(results))
    figure, places = sheet(settings, panels, (4.0, 2.0), f"{CAPTION}{on_cores(settings)}.")
    for axes, cells in places:
        bars(axes, cells, _draw_cell, table(results, cells))
        axes.set_ylabel("time of a step (ms)")
        axes.set_title(title(cells, settings))
    return figure


def table(results: Results, cells: pd.DataFrame) -> Rows:
    """The rows below the bars."""
    found = dict(rows_of_labels([str(label) for label in cells["label"]]))
    where = found.pop("offload", [NONE] * len(cells))
    found = {name: values for name, values in found.items() if name != "delayed_after"}
    found["delayed"] = [{"true": "yes"}.get(value, NONE) for value in found.pop("delayed", [NONE] * len(cells))]
    kept = [_kept(results, cell) for cell in cells.itertuples()]
    return {"optimizer in": [TIERS.get(name, name) for name in where], **found, "device keeps (bytes/ψ)": kept}


def _kept(results: Results, cell: Any) -> str:
    if cell.status not in ("ok", "no times") or rows_of(results, "memory", cell).empty:
        return NONE
    return f"{parts_of(results, cell)['device']:.1f}"


def _draw_cell(axes: Axes, place: int, cell: Any) -> None:
    ms = MS * cell.step_s
    axes.bar(place, ms, 0.6, color=BLUE)
    top = ms
    if not pd.isna(cell.step_s_low):
        reach, top = [[ms - MS * cell.step_s_low], [MS * cell.step_s_high - ms]], MS * cell.step_s_high
        axes.errorbar([place], [ms], reach, color="black", capsize=3, lw=1)
    number(axes, place, top, show(ms), 4)


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 if there is nothing to draw."""
    return script("offload_time", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
