"""Figures of ZeRO-R: policies for activations, constant-size buffers, an arena, and matrices in tiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.bars import highest, in_short, mark, name_failed, phases, stacked
from zerobench.plots.marks import Rows, absent, bars, rows_of_labels, show, unit_of, words_of
from zerobench.plots.page import key, sheet
from zerobench.plots.panels import MOST_PANELS, comparisons, on_cores, rows_of, title, with_times
from zerobench.plots.style import CATEGORIES, PHASES, Fills, number, patches, rule, seen
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


def partition(results: Results, panels: int = MOST_PANELS) -> Figure:
    """ZeRO's C1 to C5: activations in parts, on ranks that share a model.

    First: the peak on the device of the fullest rank, and on top of it the peak in host memory. Then: the bytes that a
    rank sends in a step, to ranks with other data and to those that share its model. A panel for each set of cells that
    train the same thing; a cell that failed, or was not run, is named.
    """
    settings = comparisons(results)
    (held, unit), (sent, each) = (unit_of(highest(results.runs, columns)) for columns in (PEAKS, SENT))
    caption = (
        "ZeRO's configurations C1 to C5. Peak memory of the fullest rank, by where it lies; and the bytes that a rank "
        "sends in a step, to ranks with other data and to those that share its model."
    )
    figure, places = sheet(settings, panels, (4.0, 1.5), caption, across=2)
    for (memory, traffic), cells in places:
        policies = [_policy_of(str(label)) for label in cells["label"]]
        names = [NAMES.get(pair, "–") for pair in zip(cells["strategy"], policies, strict=True)]
        rows: Rows = {"": names, "activations": policies}
        stacked(memory, cells, PEAKS, TIERS, unit, rows)
        stacked(traffic, cells, SENT, AXES, each, rows)
        memory.set_ylabel(f"peak ({held})")
        traffic.set_ylabel(f"sent ({sent})")
        memory.set_title(title(cells, settings), loc="left")
    key(figure, [*patches(seen(figure, TIERS)), *patches(seen(figure, AXES))])
    return figure


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


# -- an arena ------------------------------------------------------------------------------------------------

LASTING = {name: f"lasting_{name}" for name in CATEGORIES}
PEAK = {name: f"peak_{name}_bytes" for name in CATEGORIES}
RETRIES = {"retries": "alloc_retries"}
ON_CUDA = {"fragmentation": "fragmentation_bytes", "largest free block": "largest_free_block_bytes"}
FILLS: Fills = {**CATEGORIES, **dict.fromkeys((*ON_CUDA, *RETRIES), (GRAY, ""))}


def arena(results: Results, panels: int = MOST_PANELS) -> Figure:
    """Savings and cost of an arena: with and without, beside segments that grow.

    Left: how often a step asks for memory that outlives the phase it was made in, by category: what comes and goes
    later comes to lie around it. Then everything at the peak on the fullest rank, slots included. Where runs were on
    CUDA also what torch's allocator makes of it: fragmentation (reserved less allocated), the largest free block, and
    how often it gave segments back to find room. Runs under another PYTORCH_ALLOC_CONF, from a folder of their own,
    stand beside these.
    """
    conf = results.runs["alloc_conf"].fillna("").astype(str)
    results = replace(results, runs=results.runs.assign(cell_id=results.runs["cell_id"] + conf))
    settings = [_with_counts(results, cells) for cells in comparisons(results)]
    columns = {"peak": PEAK, **{name: {name: column} for name, column in ON_CUDA.items()}}
    if results.runs["fragmentation_bytes"].isna().all():
        columns = {"peak": PEAK}
    name, unit = unit_of(highest(results.runs, {"peak": "peak_bytes"}))
    more = len(columns) > 1
    caption = (
        "Left: allocations that outlive the phase they were made in. Right: everything at the peak, slots included. "
        "Less fragmentation is the purpose, and is not measured here: a CPU's allocator has no segments."
    )
    figure, places = sheet(settings, panels, (2.2 if more else 3.2, 2.2), caption, across=1 + len(columns) + more)
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


def counted(results: Results, cell: Any) -> dict[str, dict[str, float]]:
    """Returns a cell's "allocations" and "lasting", each by category, the most of any rank in a step; empty if not
    counted.
    """
    memory = rows_of(results, "memory", cell)
    of_step = memory[(memory["phase"] == "step") & (memory["tier"] == "device")].dropna(subset=["lasting"])
    most = of_step.groupby("category")[["allocations", "lasting"]].max()
    return {str(column): {str(k): float(v) for k, v in most[column].items()} for column in most if len(most)}


def _counts(axes: Axes, cells: pd.DataFrame, columns: Mapping[str, str]) -> None:
    stacked(axes, cells, columns, FILLS, 1, words="{:.0f}".format)
    axes.yaxis.get_major_locator().set_params(integer=True)


def _with_counts(results: Results, cells: pd.DataFrame) -> pd.DataFrame:
    """With a column a category of LASTING, and labels that tell how the allocator was told to work."""
    lasting = [counted(results, cell).get("lasting", {}) for cell in cells.itertuples()]
    counts = {column: [of_cell.get(name, float("nan")) for of_cell in lasting] for name, column in LASTING.items()}
    words = cells["label"] + cells["alloc_conf"].map(lambda conf: "" if pd.isna(conf) else f" {conf}").astype(str)
    return cells.assign(label=words, **counts)


# -- tiles ---------------------------------------------------------------------------------------------------

SIZES = {"parameters": "max_parameters_bytes", "states": "states_bytes"}
LOOKS = {"parameters": CATEGORIES["parameters"], "states": (GRAY, "")}


def tiling(results: Results, panels: int = MOST_PANELS) -> Figure:
    """Memory-centric tiling: what is whole at once under zero3 as the matrices of the MLP are cut.

    Parameters at their own maximum on the fullest rank, shards and what is gathered; and the model states with what is
    on its way. The caption has the volume of a step, which tiles leave as it is but for what padding takes. Marks are
    predictions. A panel for each set of cells that train the same thing; a cell that failed, or was not run, is drawn
    as such.
    """
    settings = comparisons(results)
    name, unit = unit_of(highest(results.runs, SIZES))
    caption = (
        "Tiles of the MLP's matrices under ZeRO-3, which are gathered one by one: parameters and model states, each at "
        "its maximum on the rank with the most."
    )
    figure, places = sheet(settings, panels, (3.2, 1.8), f"{caption}{_volume(results)}", across=2)
    for row, cells in places:
        rows = dict(rows_of_labels([str(label) for label in cells["label"]]))
        if "tiles" in rows:  # an MLP that is not cut is one tile
            rows["tiles"] = [value if value.isdecimal() else "1" for value in rows["tiles"]]
        for axes, part in zip(row, SIZES, strict=True):
            bars(axes, cells, partial(_draw_size, part, unit), rows)
            axes.set_ylabel(f"{part} ({name})")
        row[0].set_title(title(cells, settings), loc="left")
    key(figure, [rule("predicted", lw=1.8)])
    return figure


def _volume(results: Results) -> str:
    """A sentence on the volume of a step."""
    volumes = results.runs["volume_psi"].astype("float64").dropna().round(2)
    if volumes.empty:
        return ""
    low, high = volumes.min(), volumes.max()
    return f" A step sends {low:.2f} ψ" + (" with any number of tiles." if low == high else f" to {high:.2f} ψ.")


def _draw_size(part: str, unit: float, axes: Axes, place: int, cell: Any) -> None:
    size = getattr(cell, SIZES[part])
    if pd.isna(size):
        absent(axes, place, "not measured")
        return
    color, hatch = LOOKS[part]
    axes.bar(place, size / unit, 0.6, color=color, hatch=hatch)
    number(axes, place, size / unit, show(size / unit))
    if part == "states":
        mark(axes, place, cell.predicted_states_bytes / unit)
