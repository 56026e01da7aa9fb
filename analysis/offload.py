"""Where model states are, in bytes per parameter: on the device, in host memory, in files.

    python analysis/offload.py [RUNS ...] --out DIR

A bar a cell, of the fullest rank in each tier. On the device what is in flight (buckets, units being sent) is told
apart from what is kept; the black mark is the paper's formula for what the device keeps, which at N = 1 gives the rows
of table 1 of ZeRO-Offload (arXiv 2101.06840): 16, 14, 4, 2. One panel for each set of cells that train the same thing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.common import script
from zerobench.plots.marks import Rows, absent, bars, rows_of_labels, words_of
from zerobench.plots.page import key, sheet
from zerobench.plots.panels import MOST_PANELS, comparisons, rows_of, title
from zerobench.plots.style import BLUE, GREEN, SKY, VERMILION, Fills, number, patches, rule, seen, stack
from zerobench.records import STATES
from zerobench.results.tables import Results

TIERS: Fills = {
    "device": (BLUE, ""),
    "device, in flight": (VERMILION, "xx"),
    "host memory": (SKY, "//"),
    "files": (GREEN, "\\\\"),
}
CAPTION = (
    "Model states at their maximum by tier, in bytes per parameter on the rank with the most. Numbers: on the device, "
    "of all. Buffers in flight are temporary; the formula is for the part that the device keeps."
)
OFFLOADED = {("true", "true"): "both", ("true", "false"): "optimizer", ("false", "true"): "gradients"}
"""Optimizer and gradients, as a label has them -> what leaves the device."""


def draw(results: Results, panels: int = MOST_PANELS) -> Figure:
    """One bar a cell."""
    settings = comparisons(results)
    figure, places = sheet(settings, panels, (4.0, 1.7), CAPTION)
    for axes, cells in places:
        bars(axes, cells, lambda axes, place, cell: _draw_cell(axes, place, cell, results), table(cells))
        axes.set_ylabel("bytes per parameter")
        axes.set_title(title(cells, settings))
    key(figure, [*patches(seen(figure, TIERS)), rule("the paper's formula for the device", lw=1.8)])
    return figure


def table(cells: pd.DataFrame) -> Rows:
    """The table below the bars: what leaves the device, and for where if not all of it for host memory."""
    labels = [str(label) for label in cells["label"]]
    others = {k: v for k, v in rows_of_labels(labels).items() if k not in ("optimizer", "gradients")}
    where = others.pop("offload", [])
    away = {"to": [{"cpu": "host", "nvme": "files"}.get(name, name) for name in where]} if "nvme" in where else {}
    return {"offloaded": [what_leaves(label) for label in labels], **away, **others}


def what_leaves(label: str) -> str:
    """Model states that leave the device under a cell's label."""
    words = words_of(label)
    if "offload" not in words:
        return "none"
    return OFFLOADED.get((words.get("optimizer", "true"), words.get("gradients", "true")), "parameters")


def parts_of(results: Results, cell: Any) -> dict[str, float]:
    """Bytes a parameter by tier; those on the device at the instant when its states are most."""
    memory = rows_of(results, "memory", cell)
    memory = memory[(memory["phase"] == "step") & (memory["tier"] == "device")]
    fullest = memory[memory["category"] == "states"].sort_values("max_bytes").iloc[-1]
    mine = memory[(memory["run_id"] == fullest["run_id"]) & (memory["rank"] == fullest["rank"])]
    sizes = mine.set_index("category")["at_states_peak_bytes"]
    kept = sum(int(sizes[name]) for name in STATES if name != "communication")
    parts = (kept, int(sizes["communication"]), cell.host_states_bytes, cell.nvme_bytes)
    return {name: 0.0 if pd.isna(size) else size / cell.psi for name, size in zip(TIERS, parts, strict=True)}


def name_of(config: str) -> str:
    """Name of a run by where its states are, from its config, JSON: "offload=cpu fraction=0.5"."""
    section = json.loads(config).get("offload", {"name": "none"})
    parts = [f"offload={section['name']}"]
    parts += [f"fraction={section['fraction']:g}"] if section.get("fraction", 1) < 1 else []
    return " ".join(parts + ["delayed"] * bool(section.get("delayed")))


def _draw_cell(axes: Axes, place: int, cell: Any, results: Results) -> None:
    if rows_of(results, "memory", cell).empty:
        absent(axes, place, "no memory table")
        return
    parts = parts_of(results, cell)
    height = stack(axes, place, parts, TIERS, 0.6)
    on_device = parts["device"] + parts["device, in flight"]
    words = f"{on_device:.1f}\nof {height:.1f}" if height > on_device else f"{height:.1f}"
    number(axes, place, height, words)
    axes.hlines(cell.floor_states_bytes / cell.psi, place - 0.38, place + 0.38, color="black", lw=1.8)


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 if there is nothing to draw."""
    return script("offload", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
