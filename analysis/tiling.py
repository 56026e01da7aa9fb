"""Memory-centric tiling: what is whole at once under zero3 as the matrices of the MLP are cut.

    python analysis/tiling.py [RUNS ...] --out DIR

Left: parameters at their own maximum on the fullest rank, shards and what is gathered. Right: the model states with
what is on its way, and the mark of the prediction. A panel for each set of cells that train the same thing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.bars import highest, stacked
from analysis.common import MOST_PANELS, comparisons, script, title
from analysis.marks import unit_of
from analysis.page import key, sheet
from analysis.style import BLUE, GRAY, Fills, patches, rule, seen
from zerobench.results.tables import Results

FILLS: Fills = {"parameters": (BLUE, ""), "states": (GRAY, "//")}
COLUMNS = {"parameters": "max_parameters_bytes", "states": "states_bytes"}

CAPTION = "Left: parameters at their maximum. Right: states at theirs."


def draw(results: Results, panels: int = MOST_PANELS) -> Figure:
    """Two panels a setting: parameters, states."""
    settings = comparisons(results)
    name, unit = unit_of(highest(results.runs, COLUMNS))
    widest = max(len(cells) for cells in settings)
    figure, places = sheet(settings, panels, (1.4 + 0.75 * widest, 3.4), CAPTION, across=2)
    for both, cells in places:
        for axes, (part, column) in zip(both, COLUMNS.items(), strict=True):
            stacked(axes, cells, {part: column}, FILLS, unit)
            axes.set_ylabel(f"{part} ({name})")
        predicted = cells["predicted_states_bytes"].astype("float64") / unit
        reach = [(place - 0.4, place + 0.4) for place in range(len(cells))]
        both[1].hlines(predicted, *zip(*reach, strict=True), color="black", lw=1.8)
        both[0].set_title(title(cells, settings), loc="left")
    key(figure, [*patches(seen(figure, FILLS)), rule("predicted", lw=1.8)])
    return figure


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 where there is nothing to draw."""
    return script("tiling", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
