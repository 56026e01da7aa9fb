"""Shard groups: states and traffic against the number of ranks that share a shard.

    python analysis/shard_group.py [RUNS ...] --out DIR

Left: most bytes of the model states on a rank; the black mark is the prediction. Right: volume of a step in ψ by
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

from analysis.common import MOST_PANELS, comparisons, script, title
from analysis.marks import bars, show, unit_of
from analysis.page import key, sheet
from analysis.style import COLLECTIVES, in_short, look, number, patches, rule, stack
from zerobench.results.tables import Results

CAPTION = "Memory and traffic of a rank, by the ranks that share a shard."


def draw(results: Results, panels: int = MOST_PANELS) -> Figure:
    """Two panels a setting: memory, volume."""
    settings = comparisons(results)
    widest = max(len(cells) for cells in settings)
    figure, places = sheet(settings, panels, (max(4.2, 0.7 * widest), 3.4), CAPTION, across=2)
    for (left, right), whole in places:
        cells = whole.assign(label=in_short(list(whole["label"])))
        word, unit = unit_of(float(cells["states_bytes"].astype("float64").max()))
        bars(left, cells, partial(_draw_states, unit))
        left.set_ylabel(f"model states on a rank ({word})")
        left.set_title(title(cells, settings), loc="left")
        bars(right, cells, _draw_volume)
        right.set_ylabel("volume of a step (ψ)")
        for axes in (left, right):
            axes.set_ylim(0, axes.get_ylim()[1] * 1.06)
    key(figure, [*patches(COLLECTIVES), rule("predicted", lw=1.8)])
    return figure


def _draw_states(unit: int, axes: Axes, place: int, cell: Any) -> None:
    axes.bar(place, cell.states_bytes / unit, 0.6, color=look(cell.strategy).color)
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
    """Draws the figure. Exit code 2 where there is nothing to draw."""
    return script("shard_group", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
