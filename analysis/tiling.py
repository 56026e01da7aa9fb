"""Memory-centric tiling: what is whole at once under zero3 as the matrices of the MLP are cut.

    python analysis/tiling.py [RUNS ...] --out DIR

Parameters at their own maximum on the fullest rank, shards and what is gathered; the model states with what is on its
way; and the volume of a step, which tiles leave as it is but for what padding takes. Marks are predictions. A panel for
each set of cells that train the same thing; a cell that failed, or was not run, is drawn as such.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.bars import highest
from analysis.common import script
from zerobench.plots.marks import Rows, absent, bars, rows_of_labels, show, unit_of
from zerobench.plots.page import key, sheet
from zerobench.plots.panels import MOST_PANELS, comparisons, title
from zerobench.plots.style import CATEGORIES, GRAY, number, rule
from zerobench.results.tables import Results

SIZES = {"parameters": "max_parameters_bytes", "states": "states_bytes"}
FILLS = {"parameters": CATEGORIES["parameters"], "states": (GRAY, "")}
PREDICTED = {"states": "predicted_states_bytes"}

CAPTION = (
    "Tiles of the MLP's matrices under ZeRO-3, which are gathered one by one: parameters and model states, each at its "
    "maximum on the rank with the most."
)


def draw(results: Results, panels: int = MOST_PANELS) -> Figure:
    """Two panels per setting: parameters, states. The caption has the volume, which tiles do not change."""
    settings = comparisons(results)
    name, unit = unit_of(highest(results.runs, SIZES))
    figure, places = sheet(settings, panels, (3.2, 1.8), f"{CAPTION}{_volume(results)}", across=2)
    for (parameters, states), cells in places:
        rows = table(cells)
        for axes, part in ((parameters, "parameters"), (states, "states")):
            bars(axes, cells, partial(_draw, part, SIZES[part], unit, show), rows)
            axes.set_ylabel(f"{part} ({name})")
        parameters.set_title(title(cells, settings), loc="left")
    key(figure, [rule("predicted", lw=1.8)])
    return figure


def _volume(results: Results) -> str:
    """A sentence on the volume of a step."""
    found = results.runs["volume_psi"].astype("float64").dropna().round(2)
    if found.empty:
        return ""
    low, high = found.min(), found.max()
    return f" A step sends {low:.2f} ψ" + (" with any number of tiles." if low == high else f" to {high:.2f} ψ.")


def table(cells: pd.DataFrame) -> Rows:
    """The table below the bars: an MLP that is not cut is one tile."""
    found = dict(rows_of_labels([str(label) for label in cells["label"]]))
    if "tiles" in found:
        found["tiles"] = [value if value.isdecimal() else "1" for value in found["tiles"]]
    return found


def _draw(
    part: str, column: str, unit: float, written: Callable[[float], str], axes: Axes, place: int, cell: Any
) -> None:
    size, predicted = getattr(cell, column), getattr(cell, PREDICTED.get(part, ""), None)
    if pd.isna(size):
        absent(axes, place, "not measured")
        return
    color, hatch = FILLS[part]
    axes.bar(place, size / unit, 0.6, color=color, hatch=hatch)
    number(axes, place, size / unit, written(size / unit))
    if not pd.isna(predicted):
        axes.hlines(predicted / unit, place - 0.38, place + 0.38, color="black", lw=1.8)


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 if there is nothing to draw."""
    return script("tiling", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
