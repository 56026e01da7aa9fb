"""All runs as memory against throughput, with the Pareto front.

Up and to the left is better. Filled points are on the front: no other cell needs less memory without being slower. The
staircase is the most tokens/s that any cell reaches within a given peak. One panel, with its own front, for each set of
cells that train the same thing on the same number of ranks; without a front if one of them ran on a busy machine, where
no table marks a time as the best. Whiskers are 95 % intervals, if available. Labels: the differences between cells of
one strategy. Cells that failed, or that have no run although another strategy has, have no place in the plane: they are
listed below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from ..results.summary import busy_words
from ..results.tables import Results
from ..sizes import counted
from .marks import look, rule, size_unit
from .page import Sheet, key, sheet
from .panels import MOST_PANELS, completed, families, on_cores, title, with_values

VARIANT = ["world_size", "micro_batch", "accumulation", "checkpointing"]

CAPTION = (
    "Memory against throughput{}: up and to the left is better. Filled points are on the front."
    " Whiskers: 95 % intervals."
)

MOST_LABELS, FRONT = 24, "front"


def pareto(results: Results, panels: int = MOST_PANELS) -> Sheet:
    """One panel per setting: cells with the same number of ranks and sequences."""
    settings = list(_settings(results))
    figure, grid = sheet(settings, panels, (3.2, 2.6), CAPTION.format(on_cores(settings)))
    room = int(13 * figure.get_figwidth() / grid[0][0].get_gridspec().ncols)  # letters below a panel
    for axes, cells in grid:
        ok = cells[cells["status"] == "ok"]
        unit, busy = _points(axes, ok), busy_words(ok.to_dict("records"))
        _label(axes, ok)
        axes.set_ylabel(f"{counted(cells['sequence'])}/s, all ranks together")
        lines = [f"peak, largest rank ({unit})"]
        if busy:
            lines += wrap(f"no front: {busy}", room)
        elif len(ok) > MOST_LABELS:
            lines.append(f"({len(ok)} cells: only those on the front are labeled)")
        failed = cells[cells["status"] != "ok"].itertuples()
        statuses = [f"× {' '.join([cell.strategy, cell.name]).strip()}: {cell.status}" for cell in failed]
        axes.set_xlabel("\n".join([*lines, *wrap("; ".join(statuses), room)]))
        axes.set_title(title(cells, settings), loc="left")
        axes.grid(axis="both", alpha=0.3)
    strategies = dict.fromkeys(name for cells in settings for name in cells["strategy"])
    handles = [Line2D([], [], ls="", color=look(s).color, marker=look(s).marker, label=s) for s in strategies]
    if any(line.get_label() == FRONT for axes, _ in grid for line in axes.lines):
        handles.append(rule("Pareto front", lw=1))
    key(figure, handles)
    return figure


def _settings(results: Results) -> Iterator[pd.DataFrame]:
    """Yields the cells of each panel. `name`: the difference of a cell from others of its strategy."""
    for family in with_values(with_values(families(results), "step_s", "no times"), "peak_bytes", "no bytes"):
        cells = completed(family, ["strategy"], VARIANT)
        cells["batch"] = cells["batch"].fillna(cells["world_size"] * cells["micro_batch"] * cells["accumulation"])
        for _, setting in cells.groupby(["world_size", "batch"]):
            shown = [key for key in ("micro_batch", "accumulation") if setting[key].nunique() > 1]
            names = []
            for cell in setting.itertuples():
                options = ["recomputed"] if cell.checkpointing is True else []  # of a missing cell
                if isinstance(cell.label, str):
                    options = cell.label.split()[1:]
                parts = [f"{key[0]}={getattr(cell, key)}" for key in shown]
                names.append(" ".join(dict.fromkeys([*parts, *options])))
            yield setting.assign(name=names)


def front(cells: pd.DataFrame) -> pd.Series:
    """True if no other cell is at least as good in both memory and throughput and better in one; of cells that ran on a
    busy machine, none.
    """
    if busy_words(cells.to_dict("records")):
        return pd.Series(False, index=cells.index)
    peak, rate = cells["peak_bytes"].astype("float64"), cells["tokens_per_s"]

    def is_dominated(index: Any) -> bool:
        p, r = peak[index], rate[index]
        return bool(((peak <= p) & (rate >= r) & ((peak < p) | (rate > r))).any())

    return pd.Series([not is_dominated(index) for index in cells.index], index=cells.index, dtype=bool)


def _points(axes: Axes, cells: pd.DataFrame) -> str:
    """Draws the cells and their front; returns the unit of the x axis."""
    name, unit = size_unit(cells["peak_bytes"].max())
    cells = cells.assign(x=cells["peak_bytes"].astype("float64") / unit, front=front(cells))
    for cell in cells.itertuples():
        style = look(cell.strategy)
        low, high = cell.tokens_per_s - cell.tokens_per_s_low, cell.tokens_per_s_high - cell.tokens_per_s
        if not pd.isna(low):
            axes.errorbar([cell.x], [cell.tokens_per_s], [[low], [high]], color=style.color, capsize=2, lw=0.6)
        axes.plot(cell.x, cell.tokens_per_s, color=style.color, marker=style.marker, ms=7,
                  fillstyle="full" if cell.front else "none", gid=cell.run_id)  # fmt: skip
    best = cells[cells["front"]].sort_values("x")
    if len(best):
        right = cells["x"].max() * 1.05
        axes.step([*best["x"], right], [*best["tokens_per_s"], best["tokens_per_s"].max()], color="black", lw=1,
                  where="post", zorder=0.5, label=FRONT)  # fmt: skip
    axes.margins(0.2, 0.12)
    axes.autoscale_view()
    low, high = axes.get_xlim()
    axes.set_xlim(low - 0.15 * (high - low), high)  # room for names at the left, where cells that need little are close
    axes.set_autoscale_on(False)
    return name


def _label(axes: Axes, cells: pd.DataFrame) -> None:
    """Writes names left of the points, off the front's steps: above those on the front, below the others. If there are
    many, only those on the front have names.
    """
    cells = cells.assign(front=front(cells))
    shown = cells if len(cells) <= MOST_LABELS else cells[cells["front"]]
    unit = size_unit(cells["peak_bytes"].max())[1]
    for cell in shown[shown["name"] != ""].itertuples():
        axes.annotate(
            cell.name, (cell.peak_bytes / unit, cell.tokens_per_s), (-5, 0), textcoords="offset points", ha="right",
            va="bottom" if cell.front else "top", fontsize="small", zorder=2.5,
            bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.5},  # over whiskers of other cells
        )  # fmt: skip
