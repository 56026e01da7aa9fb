"""Figures of ZeRO-R: policies for activations, and constant-size buffers."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.bars import highest, in_short, name_failed, phases, stacked
from zerobench.plots.marks import PHASES, Fills, Rows, patches, rows_of_labels, rule, seen, unit_of, words_of
from zerobench.plots.page import key, sheet
from zerobench.plots.panels import MOST_PANELS, comparisons, on_cores, title, with_times
from zerobench.records.palette import BLUE, GRAY, GREEN, ORANGE, PURPLE, SKY
from zerobench.results.tables import Results

# -- activations ---------------------------------------------------------------------------------------------

TIERS: Fills = {"device": (PURPLE, ".."), "host memory": (GRAY, "//")}
PEAKS = {"device": "peak_bytes", "host memory": "host_peak_bytes"}
BOTH = ("checkpoint_offload", "both")
"""The policy with the longest name, and its word in the figure."""


def activation(results: Results, panels: int = MOST_PANELS) -> Figure:
    """Activation policies: what each leaves on the device, what it puts into host memory, and what it takes of a step.

    First: the peak on the device of the fullest rank, and on top of it the peak in host memory. Then: the median time
    of a step, split in the proportions of its phases' medians, with its 95 % interval. A panel for each set of cells
    that train the same thing; a cell that failed, or was not run, is named.
    """
    settings = with_times(comparisons(results))
    name, unit = unit_of(highest(results.runs, PEAKS))
    caption = (
        "Policies for activations (both: checkpoint_offload). Peak memory by tier, on the rank with the most; and the "
        "median time of a step, split in the proportions of its phases' medians, with its 95 % interval"
    )
    figure, places = sheet(settings, panels, (4.0, 1.5), f"{caption}{on_cores(settings)}.", across=2)
    for (memory, time), cells in places:
        labels = [str(label) for label in cells["label"]]
        others = {k: v for k, v in rows_of_labels(labels).items() if k not in ("activation", "recomputed")}
        rows: Rows = {"activation": [_policy_of(label).replace(*BOTH) for label in labels], **others}
        peaks = cells.assign(status=cells["status"].replace("no times", "ok"))
        stacked(memory, peaks, PEAKS, TIERS, unit, rows)
        phases(time, cells, rows)
        memory.set_ylabel(f"peak ({name})")
        time.set_ylabel("time of a step (ms)")
        memory.set_title(title(cells, settings), loc="left")
    step = rule("95 % interval of the step", lw=1)
    key(figure, [*patches(seen(figure, TIERS)), *patches(seen(figure, PHASES)), step])
    return figure


def _policy_of(label: str) -> str:
    """The policy for activations under a cell's label, a value of the key `activation`."""
    words = words_of(label)
    return words.get("activation", "checkpoint" if "recomputed" in words else "none")


# -- buffers -------------------------------------------------------------------------------------------------

PARTS = {"communication": ("max_communication_bytes", "-", "on its way"),
         "gradients": ("max_gradients_bytes", ":", "gradients")}  # fmt: skip
"""Category -> its column, the line that it is drawn with, and what it is called."""

MARKS = ((BLUE, "o"), (ORANGE, "s"), (GREEN, "D"), (PURPLE, "v"), (SKY, "^"))
ALIKE = ["model", "world_size", "batch", "sequence", "device", "backend"]


def buffers(results: Results, panels: int = MOST_PANELS) -> Figure:
    """Constant-size buffers beside fused ones, over models of several sizes.

    A line for what is on its way and one for gradients, each at its own maximum on the fullest rank, against ψ. Fused
    buffers grow with the model, constant ones do not, and the shard's gradients grow with both. The dashed line is 4
    bytes per parameter, what the paper says of a fused fp32 buffer (ZeRO, arXiv 1910.02054, section 6.2). One panel for
    each setting, whatever the model's size; a cell that failed, or was not run, is named.
    """
    cells = pd.concat(comparisons(results))
    settings = [setting for _, setting in cells.groupby(ALIKE, sort=False, dropna=False)]
    name, unit = unit_of(highest(results.runs, {part: column for part, (column, *_) in PARTS.items()}))
    caption = (
        "Gradients and communication buffers as the model grows, each at its own maximum on the rank with the most. "
        "Fused: one buffer as large as the model; else buckets of a constant size."
    )
    figure, places = sheet(settings, panels, (3.2, 2.2), caption)
    variants: dict[str, Line2D] = {}
    for axes, setting in places:
        variants |= {str(line.get_label()): line for line in _lines(axes, setting, unit)}
        axes.set(ylabel=name, xlabel="parameters ψ (million)")
        first = setting.iloc[0]
        where = "simulated" if first["backend"] == "simulated" else first["device"]
        axes.set_title(f"{first.model}, N = {first.world_size}, batch {first.batch} × {first.sequence}, {where}")
    marks = [rule(words, line) for _, line, words in PARTS.values()]
    key(figure, [*variants.values(), *marks, rule("4ψ bytes", "--", lw=1)])
    return figure


def _lines(axes: Axes, cells: pd.DataFrame, unit: int) -> Iterator[Line2D]:
    """Draws the lines of each variant; yields what stands for it in the legend."""
    known = cells[(cells["status"] == "ok") & cells["psi"].notna()]
    names = dict(zip(cells["label"], in_short(list(cells["label"])), strict=True))
    for (label, variant), (color, marker) in zip(known.groupby("label", sort=False), MARKS * len(known), strict=False):
        variant = variant.sort_values("psi")
        psi = variant["psi"].astype("float64") / 1e6
        for column, line, _ in PARTS.values():
            axes.plot(psi, variant[column].astype("float64") / unit, color=color, marker=marker, ls=line, ms=4, lw=1.3)
        name = names[label].replace("buffers=fused", "fused")
        yield Line2D([], [], color=color, marker=marker, ms=4, label=name if "fused" in name else f"{name} constant")
    sizes = sorted(known["psi"].astype("float64").unique())
    if sizes:
        axes.plot([psi / 1e6 for psi in sizes], [4 * psi / unit for psi in sizes], color="black", ls="--", lw=1)
        axes.set_xscale("log")
        axes.set_xticks([psi / 1e6 for psi in sizes], [f"{psi / 1e6:.3g}" for psi in sizes])
        axes.minorticks_off()
    axes.set_ylim(bottom=0)
    name_failed(axes, cells.itertuples(), lambda cell: cell.label, at_top=True)
