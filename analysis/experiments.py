"""Figures of experiments' runs: tiers, activations, buffers, ZeRO++, the delayed update; and what they share."""

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
    PHASES,
    Fills,
    Rows,
    absent,
    bars,
    number,
    patches,
    rows_of_labels,
    rule,
    seen,
    show,
    split,
    stack,
    unit_of,
    words_of,
)
from zerobench.plots.page import Sheet, key, sheet
from zerobench.plots.panels import MOST_PANELS, comparisons, on_cores, rows_of, title, with_times
from zerobench.plots.steps import losses_of
from zerobench.records import STATES
from zerobench.records.palette import BLUE, GRAY, GREEN, ORANGE, PURPLE, SKY, VERMILION
from zerobench.results.selection import latest
from zerobench.results.summary import summarize
from zerobench.results.tables import Results

MIB = 2**20
MS = 1000


def in_short(labels: Sequence[str]) -> list[str]:
    """Less the words that all of them have in common, the first of each apart."""
    shared = set.intersection(*(set(label.split()[1:]) for label in labels))
    return [" ".join(word for word in label.split() if word not in shared) for label in labels]


def mark(axes: Axes, x: int, height: float) -> None:
    """Draws the black mark of a prediction or a formula across a bar; none if there is no value."""
    if not pd.isna(height):
        axes.hlines(height, x - 0.38, x + 0.38, color="black", lw=1.8)


def name_failed(axes: Axes, cells: Iterable[Any], name: Callable[[Any], str], at_top: bool = False) -> None:
    """Writes the cells that failed, with their status, into a corner of the axes."""
    failed = "\n".join(f"× {name(cell)}: {cell.status}" for cell in cells if cell.status != "ok")
    height, alignment = (0.98, "top") if at_top else (0.03, "baseline")
    axes.text(0.02, height, failed, transform=axes.transAxes, va=alignment, style="italic", fontsize="small")


# -- tiers -----------------------------------------------------------------------------------------

TIERS: Fills = {
    "device": (BLUE, ""),
    "device, in flight": (VERMILION, "xx"),
    "host memory": (SKY, "//"),
    "files": (GREEN, "\\\\"),
}
OFFLOADED = {("true", "true"): "both", ("true", "false"): "optimizer", ("false", "true"): "gradients"}
"""Optimizer and gradients, as a label has them -> what leaves the device."""


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

    def draw(axes: Axes, x: int, cell: Any) -> None:
        if rows_of(results, "memory", cell).empty:
            absent(axes, x, "no memory table")
            return
        parts = parts_of(results, cell)
        height = stack(axes, x, parts, TIERS, 0.6)
        on_device = parts["device"] + parts["device, in flight"]
        number(axes, x, height, f"{on_device:.1f}\nof {height:.1f}" if height > on_device else f"{height:.1f}")
        mark(axes, x, cell.floor_states_bytes / cell.psi)

    figure, grid = sheet(settings, panels, (4.0, 1.7), caption)
    for axes, cells in grid:
        labels = [str(label) for label in cells["label"]]
        others = {k: v for k, v in rows_of_labels(labels).items() if k not in ("optimizer", "gradients")}
        tier = others.pop("offload", [])
        away = {"to": [{"cpu": "host", "nvme": "files"}.get(name, name) for name in tier]} if "nvme" in tier else {}
        bars(axes, cells, draw, {"offloaded": [_offloaded(words_of(label)) for label in labels], **away, **others})
        axes.set_ylabel("bytes per parameter")
        axes.set_title(title(cells, settings))
    key(figure, [*patches(seen(figure, TIERS)), rule("the paper's formula for the device", lw=1.8)])
    return figure


def _offloaded(words: dict[str, str]) -> str:
    """Model states that leave the device under a cell's label."""
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


# -- ZeRO-R: policies for activations, constant-size buffers ---------------------------------------

PEAK_TIERS: Fills = {"device": (PURPLE, ".."), "host memory": (GRAY, "//")}
PEAK_COLUMNS = {"device": "peak_bytes", "host memory": "host_peak_bytes"}
BOTH = ("checkpoint_offload", "both")
"""The policy with the longest name, and its word in the figure."""


def activation(results: Results, panels: int = MOST_PANELS) -> Figure:
    """Activation policies: what each leaves on the device, what it puts into host memory, and what it takes of a step.

    First: the peak on the device of the fullest rank, and on top of it the peak in host memory. Then: the median time
    of a step, split in the proportions of its phases' medians, with its 95 % interval. A panel for each set of cells
    that train the same thing; a cell that failed, or was not run, is named.
    """
    settings = with_times(comparisons(results))
    name, unit = _unit(results, PEAK_COLUMNS.values())
    caption = (
        "Policies for activations (both: checkpoint_offload). Peak memory by tier, on the rank with the most; and the "
        "median time of a step, split in the proportions of its phases' medians, with its 95 % interval"
    )

    def draw_peaks(axes: Axes, x: int, cell: Any) -> None:
        sizes = {tier: getattr(cell, column) for tier, column in PEAK_COLUMNS.items()}
        if parts := {tier: float(size) / unit for tier, size in sizes.items() if not pd.isna(size)}:
            height = stack(axes, x, parts, PEAK_TIERS, 0.6)
            number(axes, x, height, show(height))
        else:
            absent(axes, x, "not measured")

    def draw_step(axes: Axes, x: int, cell: Any) -> None:
        seconds = {phase: getattr(cell, f"{phase}_s") for phase in PHASES}
        parts = {phase: MS * float(value) for phase, value in seconds.items() if not pd.isna(value)}
        if not parts:
            absent(axes, x, "not measured")
            return
        low, top, high = (MS * float(value) for value in (cell.step_s_low, cell.step_s, cell.step_s_high))
        stack(axes, x, split(top, parts), PHASES, 0.6)
        if not pd.isna(low):
            axes.errorbar([x], [top], [[top - low], [high - top]], color="black", capsize=3, lw=1)
        number(axes, x, top if pd.isna(low) else high, show(top))

    figure, grid = sheet(settings, panels, (4.0, 1.5), f"{caption}{on_cores(settings)}.", across=2)
    for (memory, time), cells in grid:
        labels = [str(label) for label in cells["label"]]
        others = {k: v for k, v in rows_of_labels(labels).items() if k not in ("activation", "recomputed")}
        rows: Rows = {"activation": [_policy(words_of(label)) for label in labels], **others}
        bars(memory, cells.assign(status=cells["status"].replace("no times", "ok")), draw_peaks, rows)
        bars(time, cells, draw_step, rows)
        memory.set_ylabel(f"peak ({name})")
        time.set_ylabel("time of a step (ms)")
        memory.set_title(title(cells, settings), loc="left")
    step = rule("95 % interval of the step", lw=1)
    key(figure, [*patches(seen(figure, PEAK_TIERS)), *patches(seen(figure, PHASES)), step])
    return figure


def _unit(results: Results, columns: Iterable[str]) -> tuple[str, int]:
    return unit_of(results.runs[list(columns)].astype("float64").max().max())


def _policy(words: dict[str, str]) -> str:
    """The policy for activations under a cell's label, as the figure names it."""
    return words.get("activation", "checkpoint" if "recomputed" in words else "none").replace(*BOTH)


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
    name, unit = _unit(results, [column for column, *_ in BUFFER_PARTS.values()])
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
    mark(axes, x, each * cell.predicted_between_nodes_bytes)


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


# -- the delayed update ----------------------------------------------------------------------------

WINDOW = 21
"""Steps of the thick curves' means."""

LOOKS = {False: ("not delayed", BLUE), True: ("delayed", VERMILION)}
"""Whether a cell's update is delayed -> name and color."""


def delayed(results: Results, panels: int = MOST_PANELS) -> Figure:
    """Loss curves with the delayed parameter update, beside those without: what staleness costs in convergence.

    Thin: each step's loss, mean over the ranks. Thick: the mean over the WINDOW steps around it. The line marks the
    first step whose parameters are one update late. One panel, of the newest launches. Raises ValueError if no run has
    its states in host memory.
    """
    offloads = [(json.loads(cell.config).get("offload", {}), cell) for cell in summarize(results.runs).itertuples()]
    offloads = [(offload, cell) for offload, cell in offloads if "delayed" in offload]
    ok = {bool(offload["delayed"]): (offload, cell) for offload, cell in offloads if cell.status == "ok"}
    if not ok:
        raise ValueError("no finished run with offload=cpu; offload.delayed=false,true makes two")
    figure = Sheet(1, 2.4, "Loss with and without the delayed parameter update; thick: means over 21 steps.")
    axes = figure.subplots()
    for is_delayed, (offload, cell) in sorted(ok.items()):
        name, color = LOOKS[is_delayed]
        curve = losses_of(results, cell).astype("float64")
        steps, mean = curve.index.astype(int), curve.rolling(WINDOW, center=True, min_periods=1).mean()
        axes.plot(steps, curve, color=color, lw=0.5, alpha=0.5)
        axes.plot(steps, mean, color=color, lw=2, label=name)
        if is_delayed:
            axes.axvline(offload["delayed_after"], color="black", ls=":", lw=1.2, label="delayed from here on")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.set_title(f"{cell.model}, {cell.strategy} {cell.systems}, {cell.precision}, N = {cell.world_size}", loc="left")
    axes.legend(title="parameter update")
    is_delayed_of = lambda cell: bool(json.loads(cell.config)["offload"]["delayed"])  # noqa: E731
    name_failed(axes, [cell for _, cell in offloads], lambda cell: LOOKS[is_delayed_of(cell)][0])
    return figure
