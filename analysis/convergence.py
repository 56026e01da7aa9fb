"""Curves of losses: with the delayed parameter update, and with AdamW's states in fewer bits."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.bars import name_failed
from zerobench.plots.losses import losses
from zerobench.plots.page import Sheet
from zerobench.plots.panels import MOST_PANELS
from zerobench.plots.style import BLUE, GREEN, ORANGE, PURPLE, VERMILION
from zerobench.results.summary import summarize
from zerobench.results.tables import Results

WINDOW = 21
"""Steps of the thick curves' means."""

LOOKS = {False: ("not delayed", BLUE), True: ("delayed", VERMILION)}
"""Whether a cell's update is delayed -> name and color."""

COLORS = (BLUE, GREEN, VERMILION, ORANGE, PURPLE)


def delayed(results: Results, panels: int = MOST_PANELS) -> Figure:
    """Loss curves with the delayed parameter update, beside those without: what staleness costs in convergence.

    Thin: each step's loss, mean over the ranks. Thick: the mean over the WINDOW steps around it. The line marks the
    first step whose parameters are one update late. One panel, of the newest launches. Raises ValueError if no run has
    its states in host memory.
    """
    every = [cell for cell in summarize(results.runs).itertuples() if "delayed" in _offload_of(cell)]
    cells = {bool(_offload_of(cell)["delayed"]): cell for cell in every if cell.status == "ok"}
    if not cells:
        raise ValueError("no finished run with offload=cpu; offload.delayed=false,true makes two")
    figure = Sheet(1, 2.4, "Loss with and without the delayed parameter update; thick: means over 21 steps.")
    axes = figure.subplots()
    for is_delayed, cell in sorted(cells.items()):
        _draw_curve(axes, losses(results, cell).astype("float64"), *LOOKS[is_delayed])
    if late := cells.get(True):
        axes.axvline(_offload_of(late)["delayed_after"], color="black", ls=":", lw=1.2, label="delayed from here on")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.set_title(f"{cell.model}, {cell.strategy} {cell.systems}, {cell.precision}, N = {cell.world_size}", loc="left")
    axes.legend(title="parameter update")
    name_failed(axes, every, lambda cell: LOOKS[bool(_offload_of(cell)["delayed"])][0])
    return figure


def _offload_of(cell: Any) -> dict[str, Any]:
    """A cell's section of the config; empty if nothing leaves the device."""
    section: dict[str, Any] = json.loads(cell.config).get("offload", {})
    return section


def low_bit(results: Results, panels: int = MOST_PANELS) -> Figure:
    """Losses with AdamW's states in bf16 and in 8 bits, minus those with fp32 states.

    Thin: each step's loss, mean over the ranks, minus that of the first cell. Thick: the mean over the steps around it.
    One panel, of the newest launches; a cell that failed is named.
    """
    cells = list(summarize(results.runs).itertuples())
    words = f"Loss with states of AdamW in fewer bits minus that with fp32 states; thick: means over {WINDOW} steps."
    figure = Sheet(1, 2.4, words)
    axes = figure.subplots()
    curves = {
        f"{cell.strategy} {json.loads(cell.config)['optimizer']['name']}": losses(results, cell).astype("float64")
        for cell in cells if cell.status == "ok"
    }  # fmt: skip
    first = next(iter(curves), "")
    for (words, curve), color in zip([*curves.items()][1:], COLORS * len(cells), strict=False):
        _draw_curve(axes, curve - curves[first], words, color)
    axes.axhline(0, color="black", lw=0.8, label=first)
    axes.set(xlabel="step", ylabel=f"loss minus that of {first}\n(nats per token)")
    axes.set_title(f"{cells[0].model}, {cells[0].precision}, N = {cells[0].world_size}", loc="left")
    axes.legend(title="optimizer")
    name_failed(axes, cells, lambda cell: cell.strategy)
    return figure


def _draw_curve(axes: Axes, curve: pd.Series, words: str, color: str) -> None:
    """Draws losses by step, thin, and their mean over WINDOW steps."""
    mean = curve.rolling(WINDOW, center=True, min_periods=1).mean()
    axes.plot(curve.index.astype(int), curve, color=color, lw=0.5, alpha=0.5)
    axes.plot(curve.index.astype(int), mean, color=color, lw=2, label=words)
