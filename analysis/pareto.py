"""All runs as memory against throughput, with the Pareto front.

    python analysis/pareto.py [RUNS ...] --out DIR

Up and to the left is better. Filled points are on the front: no other cell needs less memory without being slower. The
staircase is the most tokens/s that any cell reaches within a peak. One panel for each model, sequence and machine;
whiskers are 95 % intervals, where there are any. Labels: N ranks, b sequences a step, and in what else cells differ.
Cells that failed, or that have no run where another strategy has, have no place in the plane: they stand below it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import wrap
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import Affine2D, Bbox

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.common import MOST_PANELS, completed, families, script, title, with_times
from analysis.marks import unit_of
from analysis.page import key, sheet
from analysis.style import look, rule
from zerobench.results.tables import Results

VARIANT = ["world_size", "micro_batch", "accumulation", "checkpointing"]
CAPTION = "Memory against throughput: up and to the left is better. Filled points are on the front."
MOST_LABELS = 24
PAPER = {"facecolor": "white", "alpha": 0.8, "pad": 0.3, "linewidth": 0}
SIDES = [(right, up) for up in (0, 1, -1, 2, -2, 3, -3) for right in (1, -1, 0) if (right, up) != (0, 0)]
"""Where a label may stand: beside its point or in line with it, and so many lines up."""


def draw(results: Results, panels: int = MOST_PANELS) -> Figure:
    """One panel a family of cells."""
    settings = [_named(completed(cells, ["strategy"], VARIANT)) for cells in with_times(families(results))]
    figure, places = sheet(settings, panels, (7, 4.8), CAPTION)
    for axes, cells in places:
        ok = cells[cells["status"] == "ok"]
        unit = _points(axes, ok)
        axes.set_ylabel("tokens/s, all ranks together")
        more = [f"({len(ok)} cells: only those on the front are labeled)"] * (len(ok) > MOST_LABELS)
        axes.set_xlabel("\n".join([f"peak on the fullest rank ({unit})", *more, *_without_a_place(cells)]))
        axes.set_title(title(cells, settings, []))
        axes.grid(axis="both", alpha=0.3)
    strategies = dict.fromkeys(name for cells in settings for name in cells["strategy"])
    handles = [Line2D([], [], ls="", color=look(s).color, marker=look(s).marker, label=s) for s in strategies]
    key(figure, [*handles, rule("Pareto front", lw=1)])
    figure.draw_without_rendering()  # the layout decides where points are, and so where there is room for labels
    for axes, cells in places:
        _label(axes, cells[cells["status"] == "ok"])
    return figure


def front(cells: pd.DataFrame) -> pd.Series:
    """True where no other cell is at least as good in both memory and throughput and better in one."""
    peak, rate = cells["peak_bytes"].astype("float64"), cells["tokens_per_s"]

    def dominated(place: Any) -> bool:
        p, r = peak[place], rate[place]
        return bool(((peak <= p) & (rate >= r) & ((peak < p) | (rate > r))).any())

    return pd.Series([not dominated(place) for place in cells.index], index=cells.index, dtype=bool)


def _named(cells: pd.DataFrame) -> pd.DataFrame:
    """`name`: what tells a cell from others of its strategy."""
    shown = [key for key in ("world_size", "batch") if cells[key].dropna().nunique() > 1]
    batch = cells["world_size"] * cells["micro_batch"] * cells["accumulation"]
    cells = cells.assign(batch=cells["batch"].fillna(batch))
    names = []
    for cell in cells.itertuples():
        parts = [f"{'N' if key == 'world_size' else 'b'}={getattr(cell, key)}" for key in shown]
        known = cell.label if isinstance(cell.label, str) else "missing" + " recomputed" * (cell.checkpointing is True)
        names.append(" ".join([*parts, *known.split()[1:]]))
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
    axes.margins(0.12)
    axes.autoscale_view()
    axes.set_autoscale_on(False)
    return name


def _label(axes: Axes, cells: pd.DataFrame) -> None:
    """Names beside the points, each in the first place that is free, in points of the page; of many, the front's."""
    points = {line.get_gid(): line.get_xydata()[0] for line in axes.lines if line.get_gid() is not None}
    to_page = axes.transData + Affine2D().scale(72 / axes.figure.dpi)
    marks = {run_id: to_page.transform(point) for run_id, point in points.items()}
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in marks.values()]
    inside = axes.bbox.transformed(Affine2D().scale(72 / axes.figure.dpi))
    shown = cells if len(cells) <= MOST_LABELS else cells[front(cells)]
    for cell in shown.sort_values("tokens_per_s", ascending=False).itertuples():
        x, y = marks[cell.run_id]
        wide, high = 4.2 * len(cell.name), 8
        offsets = [(right * (wide / 2 + 6), up * 10) for right, up in SIDES]
        boxes = [Bbox.from_bounds(x + right - wide / 2, y + up - high / 2, wide, high) for right, up in offsets]
        free = [n for n, box in enumerate(boxes) if not box.count_overlaps(taken) and _within(box, inside)]
        place = free[0] if free else 0
        taken.append(boxes[place])
        axes.annotate(cell.name, points[cell.run_id], offsets[place], textcoords="offset points", ha="center",
                      va="center", fontsize="small", zorder=1.5, bbox=PAPER)  # fmt: skip


def _within(box: Bbox, other: Bbox) -> bool:
    return bool(other.x0 <= box.x0 and box.x1 <= other.x1 and other.y0 <= box.y0 and box.y1 <= other.y1)


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 where there is nothing to draw."""
    return script("pareto", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
