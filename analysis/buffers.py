"""Constant-size buffers beside fused ones, over models of several sizes.

    python analysis/buffers.py [RUNS ...] --out DIR

A bar a cell: gradients, and what is on its way, at their own maxima on the fullest rank; fused buffers grow with the
model, constant ones do not, and the shard's gradients grow with both. A panel a model, all with one scale. The line is
4 bytes a parameter, what the paper says of a fused fp32 buffer (ZeRO, arXiv 1910.02054, section 6.2).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.bars import highest, stacked
from analysis.common import MOST_PANELS, comparisons, script, title
from analysis.marks import unit_of
from analysis.page import key, sheet
from analysis.style import CATEGORIES, patches, rule
from zerobench.results.tables import Results

PARTS = {"gradients": "max_gradients_bytes", "communication": "max_communication_bytes"}
FILLS = {name: CATEGORIES[name] for name in PARTS}

CAPTION = "Gradients and what is on its way, each at its own maximum on the fullest rank."


def draw(results: Results, panels: int = MOST_PANELS) -> Figure:
    """A panel a model, in the order of their sizes."""
    settings = sorted(comparisons(results), key=lambda cells: (cells["psi"].max(), 0))
    name, unit = unit_of(highest(results.runs, PARTS))
    widest = max(len(cells) for cells in settings)
    figure, places = sheet(settings, panels, (2.4 + 0.9 * widest, 3.4), CAPTION)
    for axes, cells in places:
        stacked(axes, cells, PARTS, FILLS, unit)
        psi = cells["psi"].max()
        if not pd.isna(psi):
            axes.axhline(4 * psi / unit, color="black", ls="--", lw=1.2)
        axes.set_ylabel(name)
        axes.set_title(title(cells, settings))
    top = max(axes.get_ylim()[1] for axes, _ in places)
    for axes, _ in places:
        axes.set_ylim(0, top)
    key(figure, [*patches(FILLS), rule("4ψ", "--", lw=1.2)])
    return figure


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 where there is nothing to draw."""
    return script("buffers", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
