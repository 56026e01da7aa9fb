"""Exchanges in two hops beside flat ones: what stays within a node, and what crosses between nodes.

    python analysis/nodes.py [RUNS ...] --out DIR

A bar a cell: bytes per parameter that a rank sends in a step, in the mean over the ranks; the black mark is the formula
for what goes to other nodes. A run that was told of no nodes (`node_size` is not set) has what it sent counted as a
whole: a flat exchange sends each slice to every other rank, of which N - L of N - 1 are in other nodes of L ranks, and
that part of the measured bytes is drawn as crossing. A cell that failed, or was not run, is drawn as such.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.common import script
from zerobench.plots.marks import Rows, absent, bars, rows_of_labels, words_of
from zerobench.plots.page import key, sheet
from zerobench.plots.panels import MOST_PANELS, comparisons, title
from zerobench.plots.style import ORANGE, SKY, Fills, number, patches, rule, seen, stack
from zerobench.results.tables import Results

PARTS: Fills = {"to other nodes": (ORANGE, "//"), "within the node": (SKY, "")}
CAPTION = (
    "Bytes that a rank sends in a step, within its node and to other nodes: by flat exchanges, and in two hops, within "
    "a node and then between nodes. Numbers: to other nodes, of all bytes."
)


def draw(results: Results, panels: int = MOST_PANELS) -> Figure:
    """One panel a setting."""
    settings = comparisons(results)
    figure, places = sheet(settings, panels, (3.2, 2.0), CAPTION)
    for axes, cells in places:
        bars(axes, cells, partial(_draw_cell, size_of_nodes(cells)), table(cells))
        axes.set_ylabel("sent by a rank in a step\n(bytes per parameter)")
        axes.set_title(title(cells, settings))
    key(figure, [*patches(seen(figure, PARTS)), rule("to other nodes, predicted", lw=1.8)])
    return figure


def crossing_bytes(cell: Any, hops: bool, size: int) -> float:
    """Bytes that a rank sends to other nodes in a step, in the mean over the ranks. `size`: ranks of a node."""
    if hops:
        return float(cell.between_nodes_bytes)
    return float((cell.world_size - size) / max(1, cell.world_size - 1) * cell.wire_bytes)


def size_of_nodes(cells: pd.DataFrame) -> int | None:
    """Ranks of a node, by the cells that were told; None if none was."""
    told = [words_of(str(label)).get("node_size") for label in cells["label"]]
    return next((int(size) for size in told if size is not None), None)


def table(cells: pd.DataFrame) -> Rows:
    """The rows below the bars."""
    labels = [str(label) for label in cells["label"]]
    found: Mapping[str, Any] = rows_of_labels(labels)
    hops = ["two hops" if "node_size" in words_of(label) else "flat" for label in labels]
    return {"exchange": hops, **{name: values for name, values in found.items() if name != "node_size"}}


def _draw_cell(size: int | None, axes: Axes, place: int, cell: Any) -> None:
    if pd.isna(cell.wire_bytes):
        absent(axes, place, "not measured")
        return
    hops = "node_size" in words_of(cell.label)
    crossing = crossing_bytes(cell, hops, size) if size is not None else 0.0
    parts = {"to other nodes": crossing / cell.psi, "within the node": (cell.wire_bytes - crossing) / cell.psi}
    height = stack(axes, place, parts, PARTS, 0.6)
    number(axes, place, height, f"{parts['to other nodes']:.2f}\nof {height:.2f}")
    if hops and pd.notna(cell.predicted_between_nodes_bytes):
        axes.hlines(cell.predicted_between_nodes_bytes / cell.psi, place - 0.38, place + 0.38, color="black", lw=1.8)


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 if there is nothing to draw."""
    return script("nodes", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
