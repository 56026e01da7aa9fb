"""Figures of experiments' runs: files as the model grows, buffers, ZeRO++."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from zerobench.plots.marks import (
    Fills,
    bars,
    number,
    patches,
    rule,
    seen,
    stack,
    unit_of,
)
from zerobench.plots.page import Sheet, key, sheet
from zerobench.plots.panels import MOST_PANELS, comparisons, rows_of, title
from zerobench.plots.steps import losses_of
from zerobench.records.palette import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION
from zerobench.results.selection import latest
from zerobench.results.summary import summarize
from zerobench.results.tables import Results

MIB = 2**20


def in_short(labels: Sequence[str]) -> list[str]:
    """Less the words that all of them have in common, the first of each apart."""
    shared = set.intersection(*(set(label.split()[1:]) for label in labels))
    return [" ".join(word for word in label.split() if word not in shared) for label in labels]


def name_failed(axes: Axes, cells: Iterable[Any], name: Callable[[Any], str], at_top: bool = False) -> None:
    """Writes the cells that failed, with their status, into a corner of the axes."""
    failed = "\n".join(f"× {name(cell)}: {cell.status}" for cell in cells if cell.status != "ok")
    height, alignment = (0.98, "top") if at_top else (0.03, "baseline")
    axes.text(0.02, height, failed, transform=axes.transAxes, va=alignment, style="italic", fontsize="small")


# -- files, as the model grows ---------------------------------------------------------------------

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
    caption = "States by tier as the model grows: files take the growth, host memory stays near the pool."
    figure = Sheet(1, 2.6, f"{caption} Logarithmic axes.")
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
    world = "a simulated world" if run["backend"] == "simulated" else run["device"]
    setting = f"{run['strategy']} {run['systems']}, {run['precision']}, N = {run['world_size']} ({world})"
    axes.set_title(setting, loc="left")
    name_failed(axes, summarize(newest).itertuples(), lambda cell: f"{cell.model} {cell.shape}")
    lines = [rule(name, color=color, marker=marker) for name, color, marker in LINES.values()]
    key(figure, [*lines, rule("predicted", "", marker="_", ms=14), rule("the pool", "--", lw=1.2)])
    return figure


# -- constant-size buffers -------------------------------------------------------------------------

BUFFER_PARTS = {"communication": ("max_communication_bytes", "-", "on its way"),
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
    columns = [column for column, *_ in BUFFER_PARTS.values()]
    name, unit = unit_of(results.runs[columns].astype("float64").max().max())
    caption = (
        "Gradients and communication buffers as the model grows, each at its own maximum on the rank with the most. "
        "Fused: one buffer as large as the model; else buckets of a constant size."
    )
    figure, grid = sheet(settings, panels, (3.2, 2.2), caption)
    variants: dict[str, Line2D] = {}
    for axes, setting in grid:
        _draw_buffers(axes, setting, unit, variants)
        axes.set(ylabel=name, xlabel="parameters ψ (million)")
        first = setting.iloc[0]
        world = "simulated" if first["backend"] == "simulated" else first["device"]
        axes.set_title(f"{first.model}, N = {first.world_size}, batch {first.batch} × {first.sequence}, {world}")
    marks = [rule(words, line) for _, line, words in BUFFER_PARTS.values()]
    key(figure, [*variants.values(), *marks, rule("4ψ bytes", "--", lw=1)])
    return figure


def _draw_buffers(axes: Axes, cells: pd.DataFrame, unit: int, variants: dict[str, Line2D]) -> None:
    """Draws the lines of each variant; adds what stands for it in the legend to `variants`."""
    ok = cells[(cells["status"] == "ok") & cells["psi"].notna()]
    names = dict(zip(cells["label"], in_short(list(cells["label"])), strict=True))
    for (label, variant), (color, marker) in zip(ok.groupby("label", sort=False), MARKS * len(ok), strict=False):
        variant = variant.sort_values("psi")
        psi = variant["psi"].astype("float64") / 1e6
        for column, line, _ in BUFFER_PARTS.values():
            axes.plot(psi, variant[column].astype("float64") / unit, color=color, marker=marker, ls=line, ms=4, lw=1.3)
        name = names[label].replace("buffers=fused", "fused")
        name = name if "fused" in name else f"{name} constant"
        variants[name] = Line2D([], [], color=color, marker=marker, ms=4, label=name)
    sizes = sorted(ok["psi"].astype("float64").unique())
    if sizes:
        axes.plot([psi / 1e6 for psi in sizes], [4 * psi / unit for psi in sizes], color="black", ls="--", lw=1)
        axes.set_xscale("log")
        axes.set_xticks([psi / 1e6 for psi in sizes], [f"{psi / 1e6:.3g}" for psi in sizes])
        axes.minorticks_off()
    axes.set_ylim(bottom=0)
    name_failed(axes, cells.itertuples(), lambda cell: cell.label, at_top=True)


# -- ZeRO++ between nodes --------------------------------------------------------------------------

LINK_PARTS: Fills = {
    "gathers, forward": (GREEN, "\\\\"),
    "gathers, backward": (SKY, ".."),
    "reductions": (ORANGE, "//"),
    "other": (BLUE, ""),
}
CURVES = ((BLUE, "-"), (ORANGE, "-"), (VERMILION, "--"), (GREEN, ":"))
RUNNING, ROOM = 10, 0.55
"""Steps of the running mean; height that the legend takes, of the curves' height."""


def zeropp(results: Results, panels: int = MOST_PANELS) -> Figure:
    """ZeRO++ beside plain zero3: what a node sends to others in a step, and what of the loss it costs.

    Left: bytes per parameter that a node sends to other nodes, by what they are for, of the accounted pass; the black
    mark is the formula's. Right: each cell's loss minus that of the first, by step, as a mean over the ranks and a
    running mean over 10 steps; what differs at no step is named, not drawn. A cell that failed, or was not run, is
    drawn as such.
    """
    settings = comparisons(results)
    caption = "Left: bytes between nodes under ZeRO++. Right: its effect on the loss (means over 10 steps)."
    figure, grid = sheet(settings, panels, (3.2, 2.1), caption, across=2)
    for (left, right), whole in grid:
        cells = whole.assign(label=in_short(list(whole["label"])))
        bars(left, cells, partial(_draw_links, results))
        left.set_ylabel("sent by a node to others in a step\n(bytes per parameter)")
        left.set_ylim(0, max(1.0, left.get_ylim()[1]) * 1.08)
        left.set_title(title(cells, settings), loc="left")
        _draw_gaps(right, results, cells)
    key(figure, [*patches(seen(figure, LINK_PARTS)), rule("predicted", lw=1.8)])
    return figure


def _draw_links(results: Results, axes: Axes, x: int, cell: Any) -> None:
    """Draws the bytes that a node sends to others in a step, by what they are for."""
    traffic = rows_of(results, "traffic", cell)
    traffic = traffic[~traffic["control"].astype(bool)]
    each = (json.loads(cell.config).get("node_size") or cell.world_size) / cell.psi
    parts: dict[str, float] = {}
    if not traffic.empty:
        gathers, in_backward = traffic["kind"] == "all_gather", traffic["phase"] == "backward"
        purposes = gathers & ~in_backward, gathers & in_backward, traffic["kind"] == "reduce_scatter"
        steps = traffic["run_id"].nunique() * traffic["rank"].nunique() * traffic["step"].nunique()
        sizes = [traffic[which]["between_bytes"].sum() / steps for which in purposes]
        sizes.append(traffic["between_bytes"].sum() / steps - sum(sizes))
        parts = {name: each * size for name, size in zip(LINK_PARTS, sizes, strict=True)}
    height = stack(axes, x, parts, LINK_PARTS, 0.6)
    number(axes, x, height, f"{height:.2f}")
    if not pd.isna(cell.predicted_between_nodes_bytes):
        axes.hlines(each * cell.predicted_between_nodes_bytes, x - 0.38, x + 0.38, color="black", lw=1.8)


def _draw_gaps(axes: Axes, results: Results, cells: pd.DataFrame) -> None:
    curves = {
        cell.label: losses_of(results, cell, "accounted").astype("float64")
        for cell in cells.itertuples()
        if cell.status == "ok"
    }
    first = next(iter(curves), None)
    if first is None:
        axes.set_axis_off()
        return
    gaps = {label: curve - curves[first] for label, curve in curves.items() if label != first}
    equal = [label for label, curve in gaps.items() if (curve == 0).all()]
    for n, label in enumerate(label for label in gaps if label not in equal):
        curve = gaps[label].rolling(RUNNING, min_periods=1).mean()
        color, line = CURVES[n % len(CURVES)]
        axes.plot(curve.index.astype(int), curve, color=color, ls=line, lw=1.2, label=label)
    axes.axhline(0, color="black", lw=0.8, label=" = ".join([first, *equal]) + ", to the bit" * bool(equal))
    axes.margins(y=0.05)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + ROOM * (high - low))
    axes.set(xlabel="step", ylabel=f"loss minus that of {first}\n(nats per token)")
    axes.legend(loc="upper left")
