"""Shard groups: states and traffic against the number of ranks that share a shard.

    python analysis/shard_group.py [RUNS ...] --out DIR

First: most bytes of the model states on a rank; the black mark is the prediction. Then: volume of a step in ψ by
collective: reduce-scatters and all-gathers go within a group, all-reduces between the replicas. A cell that failed, or
was not run, is drawn as such.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.common import script
from zerobench.plots.marks import Rows, bars, rows_of_labels, show, unit_of
from zerobench.plots.page import key, sheet
from zerobench.plots.panels import MOST_PANELS, comparisons, title
from zerobench.plots.style import COLLECTIVES, GRAY, number, patches, rule, seen, stack
from zerobench.results.tables import Results

CAPTION = (
    "Memory and traffic of a rank, by the ranks that share a shard. Fewer ranks to a shard: more memory, and gradients "
    "are reduced between the replicas as well."
)
SHARED = "ranks per shard"


def draw(results: Results, panels: int = MOST_PANELS) -> Figure:
    """Two panels a setting: memory, volume."""
    settings = comparisons(results)
    figure, places = sheet(settings, panels, (4.0, 1.5), CAPTION, across=2)
    for (states, volume), cells in places:
        word, unit = unit_of(float(cells["states_bytes"].astype("float64").max()))
        rows = table(cells)
        bars(states, cells, partial(_draw_states, unit), rows)
        states.set_ylabel(f"states of a rank ({word})")
        states.set_title(title(cells, settings), loc="left")
        bars(volume, cells, _draw_volume, rows)
        volume.set_ylabel("volume of a step (ψ)")
    key(figure, [*patches(seen(figure, COLLECTIVES)), rule("predicted", lw=1.8)])
    return figure


def table(cells: pd.DataFrame) -> Rows:
    """The table below the bars."""
    found = rows_of_labels([str(label) for label in cells["label"]])
    return {SHARED if name == "shard_group" else name: values for name, values in found.items()}


def _draw_states(unit: int, axes: Axes, place: int, cell: Any) -> None:
    axes.bar(place, cell.states_bytes / unit, 0.6, color=GRAY)
    number(axes, place, cell.states_bytes / unit, show(cell.states_bytes / unit))
    if pd.notna(cell.predicted_states_bytes):
        axes.hlines(cell.predicted_states_bytes / unit, place - 0.38, place + 0.38, color="black", lw=1.8)


def _draw_volume(axes: Axes, place: int, cell: Any) -> None:
    parts = {name: getattr(cell, f"volume_{name}_psi") for name in COLLECTIVES}
    height = stack(axes, place, parts, COLLECTIVES, 0.6)
    number(axes, place, height, f"{height:.2f}")
    if pd.notna(cell.predicted_volume_psi):
        axes.hlines(cell.predicted_volume_psi, place - 0.38, place + 0.38, color="black", lw=1.8)


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 if there is nothing to draw."""
    return script("shard_group", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
