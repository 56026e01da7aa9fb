"""Communication volume of a step per strategy, in ψ (elements moved over parameters), stacked by collective.

By the paper's convention, an all-reduce of ψ elements counts 2ψ, a reduce-scatter or an all-gather ψ. The black mark is
the prediction. One panel for each set of cells that train the same thing; a cell that failed, or was not run, is drawn
as such.
"""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..results.tables import Results
from .marks import bars
from .page import key, sheet
from .panels import MOST_PANELS, comparisons, title
from .style import COLLECTIVES, number, patches, rule, seen, stack

CAPTION = "What a rank communicates in one step, by collective."


def draw(results: Results, panels: int = MOST_PANELS) -> Figure:
    """Draws one bar per cell."""
    settings = comparisons(results)
    figure, grid = sheet(settings, panels, (3.2, 2.2), CAPTION)
    for axes, cells in grid:
        bars(axes, cells, _draw_cell)
        axes.set_ylabel("volume of a step (ψ)")
        axes.set_ylim(0, max(1.0, axes.get_ylim()[1]) * 1.08)
        axes.set_title(title(cells, settings), loc="left")
    key(figure, [*patches(seen(figure, COLLECTIVES)), rule("predicted", lw=1.8)])
    return figure


def _draw_cell(axes: Axes, x: int, cell: Any) -> None:
    parts = {name: getattr(cell, f"volume_{name}_psi") for name in COLLECTIVES}
    height = stack(axes, x, parts, COLLECTIVES, 0.6)
    number(axes, x, height, f"{height:.3f}")
    axes.hlines(cell.predicted_volume_psi, x - 0.38, x + 0.38, color="black", lw=1.8)
