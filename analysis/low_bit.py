"""Losses with AdamW's states in bf16 and in 8 bits, minus those with fp32 states.

    python analysis/low_bit.py [RUNS ...] --out DIR

Thin: each step's loss, mean over the ranks, minus that of the first cell. Thick: the mean over the steps around it, as
in delayed.py. One panel, of the newest launches; a cell that failed is named.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.common import script
from analysis.delayed import WINDOW, draw_curve
from zerobench.plots.losses import losses
from zerobench.plots.page import Sheet
from zerobench.plots.panels import MOST_PANELS
from zerobench.plots.style import BLUE, GREEN, ORANGE, PURPLE, VERMILION
from zerobench.results.summary import summarize
from zerobench.results.tables import Results

COLORS = (BLUE, GREEN, VERMILION, ORANGE, PURPLE)
CAPTION = f"Loss with states of AdamW in fewer bits minus that with fp32 states; thick: means over {WINDOW} steps."


def draw(results: Results, panels: int = MOST_PANELS) -> Figure:
    """One panel, whatever `panels`."""
    cells = list(summarize(results.runs).itertuples())
    figure = Sheet(1, 2.4, CAPTION)
    axes = figure.subplots()
    curves = {name_of(cell): losses(results, cell).astype("float64") for cell in cells if cell.status == "ok"}
    first = next(iter(curves), "")
    for (words, curve), color in zip([*curves.items()][1:], COLORS * len(cells), strict=False):
        draw_curve(axes, curve - curves[first], words, color)
    axes.axhline(0, color="black", lw=0.8, label=first)
    axes.set(xlabel="step", ylabel=f"loss minus that of {first}\n(nats per token)")
    axes.set_title(f"{cells[0].model}, {cells[0].precision}, N = {cells[0].world_size}", loc="left")
    axes.legend(title="optimizer")
    failed = [f"× {cell.strategy}: {cell.status}" for cell in cells if cell.status != "ok"]
    axes.text(0.02, 0.03, "\n".join(failed), transform=axes.transAxes, style="italic", fontsize="small")
    return figure


def name_of(cell: Any) -> str:
    """Returns the strategy and the optimizer."""
    return f"{cell.strategy} {json.loads(cell.config)['optimizer']['name']}"


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 where there is nothing to draw."""
    return script("low_bit", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
