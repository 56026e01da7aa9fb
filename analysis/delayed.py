"""Loss curves with the delayed parameter update, beside those without: what staleness costs in convergence.

    python analysis/delayed.py [RUNS ...] --out DIR

Thin: each step's loss, mean over the ranks. Thick: the mean over the WINDOW steps around it. The line marks the first
step whose parameters are one update late. One panel, of the newest launches.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.common import script
from zerobench.plots.losses import losses
from zerobench.plots.page import Sheet
from zerobench.plots.panels import MOST_PANELS
from zerobench.plots.style import BLUE, VERMILION
from zerobench.results.summary import summarize
from zerobench.results.tables import Results

WINDOW = 21
CAPTION = "Loss with and without the delayed parameter update; thick: means over 21 steps."
LOOKS = {0: ("not delayed", BLUE), 1: ("delayed", VERMILION)}
"""Kind of a cell (`kind_of`) -> name and color."""


def draw(results: Results, panels: int = MOST_PANELS) -> Figure:
    """One panel, whatever `panels`. Raises ValueError if no run has its states in host memory."""
    every = [cell for cell in summarize(results.runs).itertuples() if kind_of(cell) is not None]
    cells = {kind_of(cell): cell for cell in every if cell.status == "ok"}
    if not cells:
        raise ValueError("no finished run with offload=cpu; offload.delayed=false,true makes two")
    figure = Sheet(1, 2.4, CAPTION)
    axes = figure.subplots()
    for kind, cell in sorted(cells.items()):
        draw_curve(axes, losses(results, cell).astype("float64"), name_of(cell), LOOKS[kind][1])
    if late := [cell for kind, cell in cells.items() if kind]:
        axes.axvline(offload_of(late[0])["delayed_after"], color="black", ls=":", lw=1.2, label="delayed from here on")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.set_title(f"{cell.model}, {cell.strategy} {cell.systems}, {cell.precision}, N = {cell.world_size}", loc="left")
    axes.legend(title="parameter update")
    failed = [f"× {name_of(cell)}: {cell.status}" for cell in every if cell.status != "ok"]
    axes.text(0.02, 0.03, "\n".join(failed), transform=axes.transAxes, style="italic", fontsize="small")
    return figure


def draw_curve(axes: Axes, curve: pd.Series, words: str, color: str) -> None:
    """Draws losses by step, thin, and their mean over WINDOW steps."""
    mean = curve.rolling(WINDOW, center=True, min_periods=1).mean()
    axes.plot(curve.index.astype(int), curve, color=color, lw=0.5, alpha=0.5)
    axes.plot(curve.index.astype(int), mean, color=color, lw=2, label=words)


def offload_of(cell: Any) -> dict[str, Any]:
    """A cell's section of the config; empty if nothing leaves the device."""
    section: dict[str, Any] = json.loads(cell.config).get("offload", {})
    return section


def kind_of(cell: Any) -> int | None:
    """0: not delayed, 1: delayed. None if there is no such choice."""
    section = offload_of(cell)
    return int(section["delayed"]) if "delayed" in section else None


def name_of(cell: Any) -> str:
    """Returns the cell's name in the legend."""
    return LOOKS[kind_of(cell) or 0][0]


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 if there is nothing to draw."""
    return script("delayed", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
