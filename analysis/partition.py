"""ZeRO's C1 to C5: activations in parts, on ranks that share a model.

    python analysis/partition.py [RUNS ...] --out DIR

First: the peak on the device of the fullest rank, and on top of it the peak in host memory. Then: the bytes that a rank
sends in a step, to ranks with other data and to those that share its model. A panel for each set of cells that train
the same thing; a cell that failed, or was not run, is named.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.activation import PEAKS, TIERS, policy_of
from analysis.bars import highest, stacked
from analysis.common import script
from zerobench.plots.marks import Rows, unit_of
from zerobench.plots.page import key, sheet
from zerobench.plots.panels import MOST_PANELS, comparisons, title
from zerobench.plots.style import BLUE, GREEN, ORANGE, Fills, patches, seen
from zerobench.results.tables import Results

AXES: Fills = {
    "to other data": (BLUE, ".."),
    "within a model, all-reduces": (GREEN, "//"),
    "within a model, gathers": (ORANGE, ""),
}
SENT = {
    "to other data": "wire_bytes",
    "within a model, all-reduces": "tensor_axis_all_reduce_bytes",
    "within a model, gathers": "tensor_axis_all_gather_bytes",
}

NAMES = {
    ("zero1", "checkpoint"): "C1", ("zero1", "partition"): "C2", ("zero2", "checkpoint"): "C3",
    ("zero2", "partition"): "C4", ("zero2", "partition_offload"): "C5",
}  # fmt: skip
"""Strategy and policy -> the configuration's name in table 3 of ZeRO."""

CAPTION = (
    "ZeRO's configurations C1 to C5. Peak memory of the fullest rank, by where it lies; and the bytes that a rank "
    "sends in a step, to ranks with other data and to those that share its model"
)


def draw(results: Results, panels: int = MOST_PANELS) -> Figure:
    """Two panels a setting: memory, traffic."""
    settings = comparisons(results)
    (held, unit), (sent, each) = (unit_of(highest(results.runs, columns)) for columns in (PEAKS, SENT))
    figure, places = sheet(settings, panels, (4.0, 1.5), f"{CAPTION}.", across=2)
    for (memory, traffic), cells in places:
        rows = table(cells)
        stacked(memory, cells, PEAKS, TIERS, unit, rows)
        stacked(traffic, cells, SENT, AXES, each, rows)
        memory.set_ylabel(f"peak ({held})")
        traffic.set_ylabel(f"sent ({sent})")
        memory.set_title(title(cells, settings), loc="left")
    key(figure, [*patches(seen(figure, TIERS)), *patches(seen(figure, AXES))])
    return figure


def table(cells: pd.DataFrame) -> Rows:
    """The table below the bars."""
    policies = [checkpoint_of(str(label)) for label in cells["label"]]
    names = [NAMES.get(pair, "–") for pair in zip(cells["strategy"], policies, strict=True)]
    return {"": names, "activations": policies}


def checkpoint_of(label: str) -> str:
    """The policy under a cell's label, by its name."""
    policy = policy_of(label)
    return "checkpoint" if policy == "recomputed" else policy


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 where there is nothing to draw."""
    return script("partition", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
