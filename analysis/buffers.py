"""Constant-size buffers beside fused ones, over models of several sizes.

    python analysis/buffers.py [RUNS ...] --out DIR

A line for what is on its way and one for gradients, each at its own maximum on the fullest rank, against ψ. Fused
buffers grow with the model, constant ones do not, and the shard's gradients grow with both. The dashed line is 4 bytes
per parameter, what the paper says of a fused fp32 buffer (ZeRO, arXiv 1910.02054, section 6.2). One panel for each
setting, whatever the model's size; a cell that failed, or was not run, is named.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.bars import highest, in_short
from analysis.common import script
from zerobench.plots.marks import unit_of
from zerobench.plots.page import key, sheet
from zerobench.plots.panels import MOST_PANELS, comparisons
from zerobench.plots.style import BLUE, GREEN, ORANGE, PURPLE, SKY, rule
from zerobench.results.tables import Results

PARTS = {"communication": ("max_communication_bytes", "-", "on its way"),
         "gradients": ("max_gradients_bytes", ":", "gradients")}  # fmt: skip
"""Category -> its column, the line that it is drawn with, and what it is called."""

MARKS = ((BLUE, "o"), (ORANGE, "s"), (GREEN, "D"), (PURPLE, "v"), (SKY, "^"))
ALIKE = ["model", "world_size", "batch", "sequence", "device", "backend"]

CAPTION = (
    "Gradients and communication buffers as the model grows, each at its own maximum on the rank with the most. "
    "Fused: one buffer as large as the model; else buckets of a constant size."
)


def draw(results: Results, panels: int = MOST_PANELS) -> Figure:
    """One panel a setting, lines over the sizes of its model."""
    cells = pd.concat(comparisons(results))
    settings = [mine for _, mine in cells.groupby(ALIKE, sort=False, dropna=False)]
    columns = {part: column for part, (column, *_) in PARTS.items()}
    name, unit = unit_of(highest(results.runs, columns))
    figure, places = sheet(settings, panels, (3.2, 2.2), CAPTION)
    found: dict[str, Line2D] = {}
    for axes, mine in places:
        found |= {str(line.get_label()): line for line in _lines(axes, mine, unit)}
        axes.set(ylabel=name, xlabel="parameters ψ (million)")
        first = mine.iloc[0]
        where = "simulated" if first["backend"] == "simulated" else first["device"]
        axes.set_title(f"{first.model}, N = {first.world_size}, batch {first.batch} × {first.sequence}, {where}")
    marks = [rule(words, line) for _, line, words in PARTS.values()]
    key(figure, [*found.values(), *marks, rule("4ψ bytes", "--", lw=1)])
    return figure


def _lines(axes: Axes, cells: pd.DataFrame, unit: int) -> Iterator[Line2D]:
    """Draws the lines of each variant; yields what stands for it in the legend."""
    known = cells[(cells["status"] == "ok") & cells["psi"].notna()]
    names = dict(zip(cells["label"], in_short(list(cells["label"])), strict=True))
    for (label, mine), (color, marker) in zip(known.groupby("label", sort=False), MARKS * len(known), strict=False):
        mine = mine.sort_values("psi")
        psi = mine["psi"].astype("float64") / 1e6
        for column, line, _ in PARTS.values():
            axes.plot(psi, mine[column].astype("float64") / unit, color=color, marker=marker, ls=line, ms=4, lw=1.3)
        name = names[label].replace("buffers=fused", "fused")
        yield Line2D([], [], color=color, marker=marker, ms=4, label=name if "fused" in name else f"{name} constant")
    sizes = sorted(known["psi"].astype("float64").unique())
    if sizes:
        axes.plot([psi / 1e6 for psi in sizes], [4 * psi / unit for psi in sizes], color="black", ls="--", lw=1)
        axes.set_xscale("log")
        axes.set_xticks([psi / 1e6 for psi in sizes], [f"{psi / 1e6:.3g}" for psi in sizes])
        axes.minorticks_off()
    axes.set_ylim(bottom=0)
    failed = [f"× {cell.label}: {cell.status}" for cell in cells.itertuples() if cell.status != "ok"]
    axes.text(0.02, 0.98, "\n".join(failed), transform=axes.transAxes, va="top", style="italic", fontsize="small")


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 if there is nothing to draw."""
    return script("buffers", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
