"""All runs as memory against throughput, with the Pareto front.

Up and to the left is better. Filled points are on the front: no other cell needs less memory without being slower. The
staircase is the most tokens/s that any cell reaches within a peak. One panel, with a front of its own, for each set of
cells that train the same thing on as many ranks; whiskers are 95 % intervals, where there are any. Labels: in what
cells of one strategy differ. Cells that failed, or that have no run where another strategy has, have no place in the
plane: they stand below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from textwrap import wrap
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..results.tables import Results
from .marks import unit_of
from .page import key, sheet
from .panels import MOST_PANELS, completed, families, on_cores, title, with_times
from .places import name_points
from .style import look, rule

VARIANT = ["world_size", "micro_batch", "accumulation", "checkpointing"]

CAPTION = (
    "Memory against throughput{}: up and to the left is better. Filled points are on the front."
    " Whiskers: 95 % intervals."
)

MOST_LABELS = 24


def draw(results: Results, panels: int = MOST_PANELS) -> Figure:
    """One panel a setting: cells of as many ranks and sequences."""
    settings = list(_settings(results))
    figure, places = sheet(settings, panels, (3.2, 2.6), CAPTION.format(on_cores(settings)))
    for axes, cells in places:
        ok = cells[cells["status"] == "ok"]
        unit = _points(axes, ok)
        axes.set_ylabel("tokens/s, all ranks together")
        more = [f"({len(ok)} cells: only those on the front are labeled)"] * (len(ok) > MOST_LABELS)
        axes.set_xlabel("\n".join([f"peak on the fullest rank ({unit})", *more, *_without_a_place(cells)]))
        axes.set_title(title(cells, settings), loc="left")
        axes.grid(axis="both", alpha=0.3)
    strategies = dict.fromkeys(name for cells in settings for name in cells["strategy"])
    handles = [Line2D([], [], ls="", color=look(s).color, marker=look(s).marker, label=s) for s in strategies]
    key(figure, [*handles, rule("Pareto front", lw=1)])
    for axes, cells in places:
        figure.once_settled(partial(_label, axes, cells[cells["status"] == "ok"]))
    return figure


def _settings(results: Results) -> Iterator[pd.DataFrame]:
    for family in with_times(families(results)):
        cells = completed(family, ["strategy"], VARIANT)
        cells["batch"] = cells["batch"].fillna(cells["world_size"] * cells["micro_batch"] * cells["accumulation"])
        for _, mine in cells.groupby(["world_size", "batch"]):
            yield _named(mine)


def front(cells: pd.DataFrame) -> pd.Series:
    """True where no other cell is at least as good in both memory and throughput and better in one."""
    peak, rate = cells["peak_bytes"].astype("float64"), cells["tokens_per_s"]

    def dominated(place: Any) -> bool:
        p, r = peak[place], rate[place]
        return bool(((peak <= p) & (rate >= r) & ((peak < p) | (rate > r))).any())

    return pd.Series([not dominated(place) for place in cells.index], index=cells.index, dtype=bool)


def _named(cells: pd.DataFrame) -> pd.DataFrame:
    """`name`: what tells a cell from others of its strategy; empty where nothing does."""
    shown = [key for key in ("micro_batch", "accumulation") if cells[key].nunique() > 1]
    names = []
    for cell in cells.itertuples():
        parts = [f"{key[0]}={getattr(cell, key)}" for key in shown]
        known = cell.label if isinstance(cell.label, str) else "missing" + " recomputed" * (cell.checkpointing is True)
        names.append(" ".join(dict.fromkeys([*parts, *known.split()[1:]])))
    return cells.assign(name=names)


def _without_a_place(cells: pd.DataFrame) -> list[str]:
    failed = cells[cells["status"] != "ok"].itertuples()
    words = [f"× {' '.join([cell.strategy, cell.name]).strip()}: {cell.status}" for cell in failed]
    return wrap("; ".join(words), 90)


def _points(axes: Axes, cells: pd.DataFrame) -> str:
    """Draws the cells and their front; the unit of the x axis."""
    name, unit = unit_of(0 if cells.empty else cells["peak_bytes"].max())
    cells = cells.assign(x=cells["peak_bytes"].astype("float64") / unit, front=front(cells))
    for cell in cells.itertuples():
        how = look(cell.strategy)
        low, high = cell.tokens_per_s - cell.tokens_per_s_low, cell.tokens_per_s_high - cell.tokens_per_s
        if not pd.isna(low):
            axes.errorbar([cell.x], [cell.tokens_per_s], [[low], [high]], color=how.color, capsize=2, lw=0.6)
        axes.plot(cell.x, cell.tokens_per_s, color=how.color, marker=how.marker, ms=7,
                  fillstyle="full" if cell.front else "none", gid=cell.run_id)  # fmt: skip
    best = cells[cells["front"]].sort_values("x")
    if len(best):
        right = cells["x"].max() * 1.05
        axes.step([*best["x"], right], [*best["tokens_per_s"], best["tokens_per_s"].max()], color="black", lw=1,
                  where="post", zorder=0.5, label="front")  # fmt: skip
    axes.margins(0.2, 0.12)
    axes.autoscale_view()
    low, high = axes.get_xlim()
    axes.set_xlim(low - 0.15 * (high - low), high)  # room for names at the left, where cells that need little are close
    axes.set_autoscale_on(False)
    return name


def _label(axes: Axes, cells: pd.DataFrame) -> None:
    """Names beside the points; of many, those of the front."""
    points = {line.get_gid(): line.get_xydata()[0] for line in axes.lines if line.get_gid() is not None}
    shown = cells if len(cells) <= MOST_LABELS else cells[front(cells)]
    shown = shown[shown["name"] != ""].sort_values("tokens_per_s", ascending=False)
    named = [(cell.name, *points.pop(cell.run_id)) for cell in shown.itertuples()]
    name_points(axes, named, [tuple(point) for point in points.values()])
