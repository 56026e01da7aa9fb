"""Activation policies: what each leaves on the device, what it puts into host memory, and what it takes of a step.

    python analysis/activation.py [RUNS ...] --out DIR

Left: the peak on the device of the fullest rank, and on top of it the peak in host memory. Right: a step's time by
phase, medians over the steps, and in numbers the median of the whole step. A panel for each set of cells that train the
same thing; a cell that failed, or was not run, is named.
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.bars import highest, stacked
from analysis.common import MOST_PANELS, comparisons, script, title, with_times
from analysis.marks import unit_of
from analysis.page import key, sheet
from analysis.style import BLUE, GRAY, PHASES, Fills, patches, seen
from zerobench.results.tables import Results

TIERS: Fills = {"device": (BLUE, ""), "host memory": (GRAY, "//")}
PEAKS = {"device": "peak_bytes", "host memory": "host_peak_bytes"}
TIMES = {phase: f"{phase}_s" for phase in PHASES}

CAPTION = (
    "Left: peak on the fullest rank, by where it lies. Right: a step's time by phase, and the whole step's median."
)


def draw(results: Results, panels: int = MOST_PANELS) -> Figure:
    """Two panels a setting: memory, time."""
    settings = with_times(comparisons(results))
    name, unit = unit_of(highest(results.runs, PEAKS))
    widest = max(len(cells) for cells in settings)
    figure, places = sheet(settings, panels, (1.2 + 0.98 * widest, 3.6), CAPTION, across=2)
    for (memory, time), cells in places:
        peaks = cells.assign(status=cells["status"].replace("no times", "ok"))
        stacked(memory, peaks, PEAKS, TIERS, unit)
        stacked(time, cells, TIMES, PHASES, 1e-3, "step_s")
        memory.set_ylabel(f"peak ({name})")
        time.set_ylabel("step (ms)")
        memory.set_title(title(cells, settings), loc="left")
    key(figure, [*patches(seen(figure, TIERS)), *patches(seen(figure, PHASES))])
    return figure


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 where there is nothing to draw."""
    return script("activation", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
