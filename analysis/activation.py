"""Activation policies: what each leaves on the device, what it puts into host memory, and what it takes of a step.

    python analysis/activation.py [RUNS ...] --out DIR

First: the peak on the device of the fullest rank, and on top of it the peak in host memory. Then: the median time of a
step, split in the proportions of its phases' medians, with its 95 % interval. A panel for each set of cells that train
the same thing; a cell that failed, or was not run, is named.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.bars import highest, phases, stacked
from analysis.common import script
from zerobench.plots.marks import Rows, rows_of_labels, unit_of, words_of
from zerobench.plots.page import key, sheet
from zerobench.plots.panels import MOST_PANELS, comparisons, on_cores, title, with_times
from zerobench.plots.style import GRAY, PHASES, PURPLE, Fills, patches, rule, seen
from zerobench.results.tables import Results

TIERS: Fills = {"device": (PURPLE, ".."), "host memory": (GRAY, "//")}
PEAKS = {"device": "peak_bytes", "host memory": "host_peak_bytes"}
BOTH = ("checkpoint_offload", "both")
"""The policy with the longest name, and its word in the figure."""

CAPTION = (
    "Policies for activations (both: checkpoint_offload). Peak memory by tier, on the rank with the most; and the "
    "median time of a step, split in the proportions of its phases' medians, with its 95 % interval"
)


def draw(results: Results, panels: int = MOST_PANELS) -> Figure:
    """Two panels a setting: memory, time."""
    settings = with_times(comparisons(results))
    name, unit = unit_of(highest(results.runs, PEAKS))
    figure, places = sheet(settings, panels, (4.0, 1.5), f"{CAPTION}{on_cores(settings)}.", across=2)
    for (memory, time), cells in places:
        rows = table(cells)
        peaks = cells.assign(status=cells["status"].replace("no times", "ok"))
        stacked(memory, peaks, PEAKS, TIERS, unit, rows)
        phases(time, cells, rows)
        memory.set_ylabel(f"peak ({name})")
        time.set_ylabel("time of a step (ms)")
        memory.set_title(title(cells, settings), loc="left")
    step = rule("95 % interval of the step", lw=1)
    key(figure, [*patches(seen(figure, TIERS)), *patches(seen(figure, PHASES)), step])
    return figure


def table(cells: pd.DataFrame) -> Rows:
    """The table below the bars."""
    labels = [str(label) for label in cells["label"]]
    others = {k: v for k, v in rows_of_labels(labels).items() if k not in ("activation", "recomputed")}
    return {"activation": [policy_of(label).replace(*BOTH) for label in labels], **others}


def policy_of(label: str) -> str:
    """The policy for activations under a cell's label, a value of the key `activation`."""
    words = words_of(label)
    return words.get("activation", "checkpoint" if "recomputed" in words else "none")


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 if there is nothing to draw."""
    return script("activation", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
