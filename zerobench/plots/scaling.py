"""Figures against the number of ranks: memory, throughput and what of it is lost."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.patches import Patch

from ..records.palette import GRAY
from ..results.tables import Results
from ..sizes import counted
from ..strategies import reference
from .marks import curves, entries, rule, size_unit
from .page import Sheet, key, sheet
from .panels import MOST_PANELS, grids, on_cores, shared_cores, title, with_values


def scaling(results: Results, panels: int = MOST_PANELS) -> Sheet:
    """Model states and peak memory against the number of ranks, at a fixed micro-batch.

    Left: the states and buffers in flight, at their maximum. Markers are measured, dashed lines predicted, dotted
    lines the paper's formula alone. Right: everything at the peak, measured. Each is on the rank that needs the most.
    One row of panels for each model and micro-batch; a cell that failed, or that has no run although others have, is
    named at its N.
    """
    settings = with_values(grids(results), "peak_bytes", "no bytes")
    name, unit = size_unit(results.runs["peak_bytes"].max())
    caption = "Memory on the rank with the most, at a fixed micro-batch."
    figure, grid = sheet(settings, panels, (3.2, 2.1), caption, across=2)
    for (states, peak), cells in grid:
        for group, style in curves(states, cells, "states_bytes", "", unit):
            for column, line in (("predicted_states_bytes", "--"), ("floor_states_bytes", ":")):
                predicted = group[column].astype("float64") / unit
                states.plot(group["world_size"], predicted, color=style["color"], linestyle=line, lw=1.2,
                            marker="" if len(group) > 1 else "_", ms=14)  # fmt: skip
        for _ in curves(peak, cells, "peak_bytes", "-", unit):
            pass
        states.set_ylabel(f"states with buffers in flight ({name})")
        peak.set_ylabel(f"peak ({name})")
        for axes in (states, peak):
            axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
        states.set_title(title(cells, settings, ["micro_batch"]), loc="left")
    lines = [rule("predicted", "--", lw=1.2), rule("the paper's formula alone", ":", lw=1.2)]
    key(figure, [*entries(settings, ""), *lines])
    return figure


DDP, SHADE = reference().name, 0.15

REFERENCES = {DDP: "DDP at the same N", "linear": "N × its own N = 1"}


def throughput(results: Results, panels: int = MOST_PANELS, drop_from: str = DDP) -> Sheet:
    """Tokens/s against the number of ranks, its loss in percent, and the memory that it buys.

    Left: tokens/s of all ranks together, with their 95 % interval if there is one. Middle: the drop,
    100 · (1 - tokens/s ÷ reference), where the reference is
        ddp      DDP's tokens/s at the same N: the price of a stage (the default), or
        linear   N times the same strategy's tokens/s at N = 1: the price of scaling.
    If the reference was not measured there is no drop, and the panel says so. Right: peak memory on the largest rank.
    If ranks are processes on one CPU, the caption gives their number of cores, and the shaded area marks more ranks
    than cores. A cell that failed, or that has no run although others have, is named at its N.
    """
    if drop_from not in REFERENCES:
        raise ValueError(f"drop_from={drop_from!r}: is none of {', '.join(REFERENCES)}")
    settings = with_values(grids(results), "step_s", "no times")
    name, unit = size_unit(results.runs["peak_bytes"].max())
    caption = f"Left: throughput at a fixed micro-batch{on_cores(settings)}, with 95 % intervals. "
    caption += f"Middle: its loss against {REFERENCES[drop_from]}. Right: the memory that this buys."
    figure, grid = sheet(settings, panels, (2.2, 1.9), caption, across=3)
    for (rate, lost, peak), cells in grid:
        cells = cells.assign(drop=drop(cells, drop_from))
        for group, style in curves(rate, cells, "tokens_per_s"):
            group = group.dropna(subset=["tokens_per_s_low"])
            middle = group["tokens_per_s"]
            reach = [middle - group["tokens_per_s_low"], group["tokens_per_s_high"] - middle]
            rate.errorbar(group["world_size"].astype(int), middle, reach, color=style["color"], ls="", capsize=3, lw=1)
        for _ in curves(lost, cells, "drop"):
            pass
        lacking = cells[(cells["status"] == "ok") & cells["drop"].isna()]
        missing = "\n".join(f"{cell.label}: no reference at N = {cell.world_size}" for cell in lacking.itertuples())
        lost.text(0.02, 0.98, missing, transform=lost.transAxes, va="top", fontsize="small", style="italic")
        for _ in curves(peak, with_values([cells], "peak_bytes", "no bytes")[0], "peak_bytes", "-", unit):
            pass
        lost.axhline(0, color="black", lw=0.8)
        cores = shared_cores(cells)
        for axes in (rate, lost) if _most_ranks(cells) > cores else ():
            high = axes.get_xlim()[1]
            axes.axvspan(cores + 0.5, high, color=GRAY, alpha=SHADE, lw=0, zorder=0)
            axes.set_xlim(right=high)
        noun = counted(cells["sequence"])
        rate.set_ylabel(f"{noun}/s, all ranks together")
        lost.set_ylabel(f"loss of {noun}/s (%)")
        peak.set_ylabel(f"peak, largest rank ({name})")
        for axes in (rate, peak):
            axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
        rate.set_title(title(cells, settings, ["micro_batch"]), loc="left")
    handles: list[Any] = entries(settings)
    if any(_most_ranks(cells) > shared_cores(cells) for cells in settings):
        handles.append(Patch(color=GRAY, alpha=SHADE, lw=0, label="more ranks than cores"))
    key(figure, handles)
    return figure


def _most_ranks(cells: pd.DataFrame) -> int:
    ran = cells.loc[cells["status"] == "ok", "world_size"]
    return int(ran.max()) if len(ran) else 0


def drop(cells: pd.DataFrame, drop_from: str) -> pd.Series:
    """A cell's shortfall from the reference, in percent; NaN without a reference or a cell."""
    if drop_from == DDP:
        ok = cells[(cells["strategy"] == DDP) & (cells["status"] == "ok")]
        most = cells["world_size"].map(ok.groupby("world_size")["tokens_per_s"].max())
    else:
        single = cells[(cells["world_size"] == 1) & (cells["status"] == "ok")]
        most = cells["label"].map(single.groupby("label")["tokens_per_s"].max()) * cells["world_size"]
    return 100 * (1 - cells["tokens_per_s"] / most.astype("float64"))
