"""Communication volume of a step per strategy, in ψ (elements moved over parameters), stacked by collective.

    python analysis/volume.py [RUNS ...] --out DIR

By the paper's convention: an all-reduce of ψ elements counts 2, a reduce-scatter or an all-gather 1. The black mark is
the prediction. One panel for each set of cells that train the same thing; a cell that failed, or was not run, is
drawn as such.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.common import MOST_PANELS, comparisons, script, title
from analysis.marks import bars
from analysis.page import key, sheet
from analysis.style import COLLECTIVES, number, patches, rule, seen, stack
from zerobench.results.tables import Results

CAPTION = "What a rank communicates in one step, by collective."


def draw(results: Results, panels: int = MOST_PANELS) -> Figure:
    """One bar a cell."""
    settings = comparisons(results)
    figure, places = sheet(settings, panels, (3.2, 2.2), CAPTION)
    for axes, cells in places:
        bars(axes, cells, _draw_cell)
        axes.set_ylabel("volume of a step (ψ)")
        axes.set_ylim(0, max(1.0, axes.get_ylim()[1]) * 1.08)
        axes.set_title(title(cells, settings), loc="left")
    handles = [*patches(seen(figure, COLLECTIVES)), rule("predicted", lw=1.8)]
    key(figure, handles)
    return figure


def _draw_cell(axes: Axes, place: int, cell: Any) -> None:
    parts = {name: getattr(cell, f"volume_{name}_psi") for name in COLLECTIVES}
    height = stack(axes, place, parts, COLLECTIVES, 0.6)
    number(axes, place, height, f"{height:.3f}")
    axes.hlines(cell.predicted_volume_psi, place - 0.38, place + 0.38, color="black", lw=1.8)


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 where there is nothing to draw."""
    return script("volume", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
