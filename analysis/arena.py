"""Savings and cost of an arena: with and without, beside segments that grow.

    python analysis/arena.py [RUNS ...] --out DIR

Left: how often a step asks for memory that outlives the phase it was made in, by category: what comes and goes later
comes to lie around it. Then everything at the peak on the fullest rank, slots included. Where runs were on CUDA also
what torch's allocator makes of it: fragmentation (reserved less allocated), the largest free block, and how often it
gave segments back to find room. Runs under another PYTORCH_ALLOC_CONF, from a folder of their own, stand beside these.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.bars import highest, stacked
from analysis.common import script
from zerobench.plots.marks import unit_of
from zerobench.plots.page import key, sheet
from zerobench.plots.panels import MOST_PANELS, comparisons, rows_of, title
from zerobench.plots.style import CATEGORIES, GRAY, Fills, patches, seen
from zerobench.results.tables import Results

LASTING = {name: f"lasting_{name}" for name in CATEGORIES}
PEAK = {name: f"peak_{name}_bytes" for name in CATEGORIES}
RETRIES = {"retries": "alloc_retries"}
ON_CUDA = {"fragmentation": "fragmentation_bytes", "largest free block": "largest_free_block_bytes"}
FILLS: Fills = {**CATEGORIES, **dict.fromkeys((*ON_CUDA, *RETRIES), (GRAY, ""))}

CAPTION = (
    "Left: allocations that outlive the phase they were made in. Right: everything at the peak, slots included. "
    "Less fragmentation is the purpose, and is not measured here: a CPU's allocator has no segments."
)


def counted(results: Results, cell: Any) -> dict[str, dict[str, float]]:
    """Returns a cell's "allocations" and "lasting", each by category, the most of any rank in a step; empty if not
    counted.
    """
    memory = rows_of(results, "memory", cell)
    mine = memory[(memory["phase"] == "step") & (memory["tier"] == "device")].dropna(subset=["lasting"])
    most = mine.groupby("category")[["allocations", "lasting"]].max()
    return {str(column): {str(k): float(v) for k, v in most[column].items()} for column in most if len(most)}


def draw(results: Results, panels: int = MOST_PANELS) -> Figure:
    """A row of axes a setting: counts, the peak, and on CUDA the allocator's three."""
    told = results.runs["alloc_conf"].fillna("").astype(str)
    results = replace(results, runs=results.runs.assign(cell_id=results.runs["cell_id"] + told))
    settings = [_with_counts(results, cells) for cells in comparisons(results)]
    columns = {"peak": PEAK, **{name: {name: column} for name, column in ON_CUDA.items()}}
    if results.runs["fragmentation_bytes"].isna().all():
        columns = {"peak": PEAK}
    name, unit = unit_of(highest(results.runs, {"peak": "peak_bytes"}))
    more = len(columns) > 1
    size = (2.2 if more else 3.2, 2.2)
    figure, places = sheet(settings, panels, size, CAPTION, across=1 + len(columns) + more)
    for row, cells in places:
        _counts(row[0], cells, LASTING)
        row[0].set_ylabel("allocations in a step\nthat outlive their phase")
        for axes, (part, of) in zip(row[1:], columns.items(), strict=False):
            stacked(axes, cells, of, FILLS, unit)
            axes.set_ylabel(f"{part} ({name})")
        if more:
            _counts(row[-1], cells, RETRIES)
            row[-1].set_ylabel("retries of the allocator")
        row[0].set_title(title(cells, settings), loc="left")
    key(figure, patches(seen(figure, CATEGORIES)))
    return figure


def _counts(axes: Axes, cells: pd.DataFrame, columns: Mapping[str, str]) -> None:
    stacked(axes, cells, columns, FILLS, 1, words="{:.0f}".format)
    axes.yaxis.get_major_locator().set_params(integer=True)


def _with_counts(results: Results, cells: pd.DataFrame) -> pd.DataFrame:
    """With a column a category of LASTING, and labels that tell how the allocator was told to work."""
    found = [counted(results, cell).get("lasting", {}) for cell in cells.itertuples()]
    counts = {column: [one.get(name, float("nan")) for one in found] for name, column in LASTING.items()}
    words = cells["label"] + cells["alloc_conf"].map(lambda conf: "" if pd.isna(conf) else f" {conf}").astype(str)
    return cells.assign(label=words, **counts)


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 if there is nothing to draw."""
    return script("arena", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
