"""ZeRO++ between nodes: its bytes, and its effect on the loss."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.bars import in_short, mark
from zerobench.plots.marks import Fills, bars, number, patches, rule, seen, stack
from zerobench.plots.page import key, sheet
from zerobench.plots.panels import MOST_PANELS, comparisons, rows_of, title
from zerobench.plots.steps import losses_of
from zerobench.records.palette import BLUE, GREEN, ORANGE, SKY, VERMILION
from zerobench.results.tables import Results

PARTS: Fills = {
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
    figure, places = sheet(settings, panels, (3.2, 2.1), caption, across=2)
    for (left, right), whole in places:
        cells = whole.assign(label=in_short(list(whole["label"])))
        bars(left, cells, partial(_draw_bytes, results))
        left.set_ylabel("sent by a node to others in a step\n(bytes per parameter)")
        left.set_ylim(0, max(1.0, left.get_ylim()[1]) * 1.08)
        left.set_title(title(cells, settings), loc="left")
        _draw_losses(right, results, cells)
    key(figure, [*patches(seen(figure, PARTS)), rule("predicted", lw=1.8)])
    return figure


def _draw_bytes(results: Results, axes: Axes, place: int, cell: Any) -> None:
    each = (json.loads(cell.config).get("node_size") or cell.world_size) / cell.psi
    height = stack(axes, place, {name: each * size for name, size in _parts(results, cell).items()}, PARTS, 0.6)
    number(axes, place, height, f"{height:.2f}")
    mark(axes, place, each * cell.predicted_between_nodes_bytes)


def _parts(results: Results, cell: Any) -> dict[str, float]:
    """Bytes that a rank sends to other nodes in a step, in the mean over the ranks, by what they are for."""
    traffic = rows_of(results, "traffic", cell)
    traffic = traffic[~traffic["control"].astype(bool)]
    if traffic.empty:
        return {}
    named = {
        "gathers, forward": (traffic["kind"] == "all_gather") & (traffic["phase"] != "backward"),
        "gathers, backward": (traffic["kind"] == "all_gather") & (traffic["phase"] == "backward"),
        "reductions": traffic["kind"] == "reduce_scatter",
    }
    steps = traffic["run_id"].nunique() * traffic["rank"].nunique() * traffic["step"].nunique()
    sizes = {name: traffic[which]["between_bytes"].sum() / steps for name, which in named.items()}
    return sizes | {"other": traffic["between_bytes"].sum() / steps - sum(sizes.values())}


def _draw_losses(axes: Axes, results: Results, cells: pd.DataFrame) -> None:
    curves = {
        cell.label: losses_of(results, cell, "accounted").astype("float64")
        for cell in cells.itertuples()
        if cell.status == "ok"
    }
    first = next(iter(curves), None)
    if first is None:
        axes.set_axis_off()
        return
    off = {label: curve - curves[first] for label, curve in curves.items() if label != first}
    equal = [label for label, curve in off.items() if (curve == 0).all()]
    for n, label in enumerate(label for label in off if label not in equal):
        curve = off[label].rolling(RUNNING, min_periods=1).mean()
        color, line = CURVES[n % len(CURVES)]
        axes.plot(curve.index.astype(int), curve, color=color, ls=line, lw=1.2, label=label)
    words = " = ".join([first, *equal]) + ", to the bit" * bool(equal)
    axes.axhline(0, color="black", lw=0.8, label=words)
    axes.margins(y=0.05)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + ROOM * (high - low))
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss minus that of {first}\n(nats per token)")
    axes.legend(loc="upper left")
