"""Curves of losses with the delayed parameter update."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.bars import name_failed
from zerobench.plots.marks import BLUE, VERMILION
from zerobench.plots.page import Sheet
from zerobench.plots.panels import MOST_PANELS
from zerobench.plots.steps import losses_of
from zerobench.results.summary import summarize
from zerobench.results.tables import Results

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
    every = [cell for cell in summarize(results.runs).itertuples() if "delayed" in _offload_of(cell)]
    cells = {bool(_offload_of(cell)["delayed"]): cell for cell in every if cell.status == "ok"}
    if not cells:
        raise ValueError("no finished run with offload=cpu; offload.delayed=false,true makes two")
    figure = Sheet(1, 2.4, "Loss with and without the delayed parameter update; thick: means over 21 steps.")
    axes = figure.subplots()
    for is_delayed, cell in sorted(cells.items()):
        _draw_curve(axes, losses_of(results, cell).astype("float64"), *LOOKS[is_delayed])
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


def _draw_curve(axes: Axes, curve: pd.Series, words: str, color: str) -> None:
    """Draws losses by step, thin, and their mean over WINDOW steps."""
    mean = curve.rolling(WINDOW, center=True, min_periods=1).mean()
    axes.plot(curve.index.astype(int), curve, color=color, lw=0.5, alpha=0.5)
    axes.plot(curve.index.astype(int), mean, color=color, lw=2, label=words)
