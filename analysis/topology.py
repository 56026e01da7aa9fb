"""Groups of ranks: exchanges in two hops, ranks that share a shard, and ZeRO++ between nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.bars import in_short, mark
from zerobench.plots.marks import Rows, absent, bars, rows_of_labels, show, unit_of, words_of
from zerobench.plots.page import key, sheet
from zerobench.plots.panels import MOST_PANELS, comparisons, rows_of, title
from zerobench.plots.style import COLLECTIVES, Fills, number, patches, rule, seen, stack
from zerobench.records.palette import BLUE, GRAY, GREEN, ORANGE, SKY, VERMILION
from zerobench.results.tables import Results

# -- two hops ------------------------------------------------------------------------------------------------

LINKS: Fills = {"to other nodes": (ORANGE, "//"), "within the node": (SKY, "")}


def nodes(results: Results, panels: int = MOST_PANELS) -> Figure:
    """Exchanges in two hops beside flat ones: what stays within a node, and what crosses between nodes.

    A bar a cell: bytes per parameter that a rank sends in a step, in the mean over the ranks; the black mark is the
    formula for what goes to other nodes. A run that was told of no nodes (`node_size` is not set) has what it sent
    counted as a whole: a flat exchange sends each slice to every other rank, of which N - L of N - 1 are in other nodes
    of L ranks, and that part of the measured bytes is drawn as crossing. A cell that failed, or was not run, is drawn
    as such.
    """
    settings = comparisons(results)
    caption = (
        "Bytes that a rank sends in a step, within its node and to other nodes: by flat exchanges, and in two hops, "
        "within a node and then between nodes. Numbers: to other nodes, of all bytes."
    )
    figure, places = sheet(settings, panels, (3.2, 2.0), caption)
    for axes, cells in places:
        told = (words_of(str(label)).get("node_size") for label in cells["label"])
        size = next((int(size) for size in told if size is not None), None)  # None: no cell was told of nodes
        bars(axes, cells, partial(_draw_links, size), _nodes_rows(cells))
        axes.set_ylabel("sent by a rank in a step\n(bytes per parameter)")
        axes.set_title(title(cells, settings))
    key(figure, [*patches(seen(figure, LINKS)), rule("to other nodes, predicted", lw=1.8)])
    return figure


def crossing_bytes(cell: Any, hops: bool, size: int) -> float:
    """Bytes that a rank sends to other nodes in a step, in the mean over the ranks. `size`: ranks of a node."""
    if hops:
        return float(cell.between_nodes_bytes)
    return float((cell.world_size - size) / max(1, cell.world_size - 1) * cell.wire_bytes)


def _nodes_rows(cells: pd.DataFrame) -> Rows:
    """The rows below the bars."""
    labels = [str(label) for label in cells["label"]]
    rows: Mapping[str, Any] = rows_of_labels(labels)
    hops = ["two hops" if "node_size" in words_of(label) else "flat" for label in labels]
    return {"exchange": hops, **{name: values for name, values in rows.items() if name != "node_size"}}


def _draw_links(size: int | None, axes: Axes, place: int, cell: Any) -> None:
    if pd.isna(cell.wire_bytes):
        absent(axes, place, "not measured")
        return
    hops = "node_size" in words_of(cell.label)
    crossing = crossing_bytes(cell, hops, size) if size is not None else 0.0
    parts = {"to other nodes": crossing / cell.psi, "within the node": (cell.wire_bytes - crossing) / cell.psi}
    height = stack(axes, place, parts, LINKS, 0.6)
    number(axes, place, height, f"{parts['to other nodes']:.2f}\nof {height:.2f}")
    if hops:
        mark(axes, place, cell.predicted_between_nodes_bytes / cell.psi)


# -- shard groups --------------------------------------------------------------------------------------------


def shard_group(results: Results, panels: int = MOST_PANELS) -> Figure:
    """Shard groups: states and traffic against the number of ranks that share a shard.

    First: most bytes of the model states on a rank; the black mark is the prediction. Then: volume of a step in ψ by
    collective: reduce-scatters and all-gathers go within a group, all-reduces between the replicas. A cell that failed,
    or was not run, is drawn as such.
    """
    settings = comparisons(results)
    caption = (
        "Memory and traffic of a rank, by the ranks that share a shard. Fewer ranks to a shard: more memory, and "
        "gradients are reduced between the replicas as well."
    )
    figure, places = sheet(settings, panels, (4.0, 1.5), caption, across=2)
    for (states, volume), cells in places:
        word, unit = unit_of(float(cells["states_bytes"].astype("float64").max()))
        rows = rows_of_labels([str(label) for label in cells["label"]])
        rows = {"ranks per shard" if name == "shard_group" else name: values for name, values in rows.items()}
        bars(states, cells, partial(_draw_states, unit), rows)
        states.set_ylabel(f"states of a rank ({word})")
        states.set_title(title(cells, settings), loc="left")
        bars(volume, cells, _draw_volume, rows)
        volume.set_ylabel("volume of a step (ψ)")
    key(figure, [*patches(seen(figure, COLLECTIVES)), rule("predicted", lw=1.8)])
    return figure


def _draw_states(unit: int, axes: Axes, place: int, cell: Any) -> None:
    axes.bar(place, cell.states_bytes / unit, 0.6, color=GRAY)
    number(axes, place, cell.states_bytes / unit, show(cell.states_bytes / unit))
    mark(axes, place, cell.predicted_states_bytes / unit)


def _draw_volume(axes: Axes, place: int, cell: Any) -> None:
    parts = {name: getattr(cell, f"volume_{name}_psi") for name in COLLECTIVES}
    height = stack(axes, place, parts, COLLECTIVES, 0.6)
    number(axes, place, height, f"{height:.2f}")
    mark(axes, place, cell.predicted_volume_psi)


# -- ZeRO++ --------------------------------------------------------------------------------------------------

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
    curves = {cell.label: losses_of(results, cell) for cell in cells.itertuples() if cell.status == "ok"}
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


def losses_of(results: Results, cell: Any) -> pd.Series:
    """Mean over the ranks by step, of one pass of the newest launch."""
    steps = rows_of(results, "steps", cell)
    steps = steps[(steps["run_id"] == cell.run_id) & (steps["mode"] == "accounted")]
    return steps.pivot(index="step", columns="rank", values="loss").mean(axis=1, skipna=False).astype("float64")
