"""Model states in three tiers, the device, host memory and files, in bytes."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.bars import mark, name_failed
from zerobench.plots.marks import (
    BLUE,
    GREEN,
    SKY,
    VERMILION,
    Fills,
    Rows,
    absent,
    bars,
    number,
    patches,
    rows_of_labels,
    rule,
    seen,
    stack,
    words_of,
)
from zerobench.plots.page import Sheet, key, sheet
from zerobench.plots.panels import MOST_PANELS, comparisons, rows_of, title
from zerobench.records import STATES
from zerobench.results.selection import latest
from zerobench.results.summary import summarize
from zerobench.results.tables import Results

MIB = 2**20

TIERS: Fills = {
    "device": (BLUE, ""),
    "device, in flight": (VERMILION, "xx"),
    "host memory": (SKY, "//"),
    "files": (GREEN, "\\\\"),
}
OFFLOADED = {("true", "true"): "both", ("true", "false"): "optimizer", ("false", "true"): "gradients"}
"""Optimizer and gradients, as a label has them -> what leaves the device."""


# -- bytes ---------------------------------------------------------------------------------------------------


def offload(results: Results, panels: int = MOST_PANELS) -> Figure:
    """Where model states are, in bytes per parameter: on the device, in host memory, in files.

    A bar a cell, of the fullest rank in each tier. On the device what is in flight (buckets, units being sent) is told
    apart from what is kept; the black mark is the paper's formula for what the device keeps, which at N = 1 gives the
    rows of table 1 of ZeRO-Offload (arXiv 2101.06840): 16, 14, 4, 2. One panel for each set of cells that train the
    same thing.
    """
    settings = comparisons(results)
    caption = (
        "Model states at their maximum by tier, in bytes per parameter on the rank with the most. Numbers: on the "
        "device, of all. Buffers in flight are temporary; the formula is for the part that the device keeps."
    )
    figure, places = sheet(settings, panels, (4.0, 1.7), caption)
    for axes, cells in places:
        bars(axes, cells, lambda axes, place, cell: _draw_bytes(axes, place, cell, results), _offload_rows(cells))
        axes.set_ylabel("bytes per parameter")
        axes.set_title(title(cells, settings))
    key(figure, [*patches(seen(figure, TIERS)), rule("the paper's formula for the device", lw=1.8)])
    return figure


def _offload_rows(cells: pd.DataFrame) -> Rows:
    """The table below the bars: what leaves the device, and for where if not all of it for host memory."""
    labels = [str(label) for label in cells["label"]]
    others = {k: v for k, v in rows_of_labels(labels).items() if k not in ("optimizer", "gradients")}
    where = others.pop("offload", [])
    away = {"to": [{"cpu": "host", "nvme": "files"}.get(name, name) for name in where]} if "nvme" in where else {}
    return {"offloaded": [_what_leaves(label) for label in labels], **away, **others}


def _what_leaves(label: str) -> str:
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
    of_rank = memory[(memory["run_id"] == fullest["run_id"]) & (memory["rank"] == fullest["rank"])]
    sizes = of_rank.set_index("category")["at_states_peak_bytes"]
    kept = sum(int(sizes[name]) for name in STATES if name != "communication")
    parts = (kept, int(sizes["communication"]), cell.host_states_bytes, cell.nvme_bytes)
    return {name: 0.0 if pd.isna(size) else size / cell.psi for name, size in zip(TIERS, parts, strict=True)}


def _draw_bytes(axes: Axes, place: int, cell: Any, results: Results) -> None:
    if rows_of(results, "memory", cell).empty:
        absent(axes, place, "no memory table")
        return
    parts = parts_of(results, cell)
    height = stack(axes, place, parts, TIERS, 0.6)
    on_device = parts["device"] + parts["device, in flight"]
    words = f"{on_device:.1f}\nof {height:.1f}" if height > on_device else f"{height:.1f}"
    number(axes, place, height, words)
    mark(axes, place, cell.floor_states_bytes / cell.psi)


# -- files, as the model grows -------------------------------------------------------------------------------

LINES = {
    "nvme_bytes": ("in files", GREEN, "D"),
    "host_peak_bytes": ("host memory, peak", SKY, "s"),
    "states_bytes": ("states on the device", BLUE, "o"),
}
"""Column -> what it is called, its color and marker."""


def infinity(results: Results, panels: int = MOST_PANELS) -> Figure:
    """Files take what grows: host memory at its peak, states on the device and in files, against the model's size.

    Of the fullest rank, one panel. Dashed: the pool through which files are read and written; host memory is to stay
    near it. The marks on the line of the files are the prediction. Raises ValueError if no run has anything in files.
    """
    newest = latest(results.runs)
    runs = newest[(newest["status"] == "ok") & (newest["nvme_bytes"] > 0)].sort_values("psi")
    if runs.empty:
        raise ValueError("no finished run with states in files; offload=nvme makes some")
    words = "States by tier as the model grows: files take the growth, host memory stays near the pool."
    figure = Sheet(1, 2.6, f"{words} Logarithmic axes.")
    axes = figure.subplots()
    psi = runs["psi"].astype("float64") / 1e6
    for column, (_, color, marker) in LINES.items():
        sizes = runs[column].astype("float64") / MIB
        axes.plot(psi, sizes, color=color, marker=marker, ms=5.5)
        for x, y in zip(psi, sizes, strict=True):
            axes.annotate(f"{y:.0f}", (x, y), (-9, 4), textcoords="offset points", ha="right", fontsize="small")
    axes.plot(psi, runs["predicted_nvme_bytes"].astype("float64") / MIB, "k_", ms=14)
    pools = [json.loads(config)["offload"] for config in runs["config"]]
    for size in sorted({int(pool["block_bytes"] * pool["buffers"]) for pool in pools}):
        axes.axhline(size / MIB, color="black", ls="--", lw=1.2)
    axes.set(xscale="log", yscale="log", xlabel="ψ, million parameters (log)", ylabel="MiB, largest rank (log)")
    axes.set_xticks(list(psi), [f"{x:.3g}" for x in psi])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.margins(x=0.1, y=0.15)
    run = runs.iloc[0]
    where = "a simulated world" if run["backend"] == "simulated" else run["device"]
    words = f"{run['strategy']} {run['systems']}, {run['precision']}, N = {run['world_size']} ({where})"
    axes.set_title(words, loc="left")
    name_failed(axes, summarize(newest).itertuples(), lambda cell: f"{cell.model} {cell.shape}")
    lines = [rule(name, color=color, marker=marker) for name, color, marker in LINES.values()]
    key(figure, [*lines, rule("predicted", "", marker="_", ms=14), rule("the pool", "--", lw=1.2)])
    return figure
