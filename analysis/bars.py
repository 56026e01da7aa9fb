"""Bars of columns, marks and notes: what figures of several modules have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from zerobench.plots.marks import PHASES, Fills, Rows, absent, bars, number, show, split, stack

MS = 1000


def in_short(labels: Sequence[str]) -> list[str]:
    """Less the words that all of them have in common, the first of each apart."""
    shared = set.intersection(*(set(label.split()[1:]) for label in labels))
    return [" ".join(word for word in label.split() if word not in shared) for label in labels]


def stacked(
    axes: Axes, cells: pd.DataFrame, columns: Mapping[str, str], fills: Fills, unit: float,
    rows: Rows | None = None, words: Callable[[float], str] = show,
) -> None:  # fmt: skip
    """A bar a cell: its columns, by what they are called, one on the other, with their sum in numbers.

    `rows`: of the table below the bars. `words`: how a sum is written.
    """

    def draw(axes: Axes, place: int, cell: Any) -> None:
        known = _known(axes, place, cell, columns, unit)
        if known:
            height = stack(axes, place, known, fills, 0.6)
            number(axes, place, height, words(height))

    bars(axes, cells, draw, rows)


def phases(axes: Axes, cells: pd.DataFrame, rows: Rows | None = None) -> None:
    """A bar a cell, as high as the median of a step, split in the proportions of its phases' medians, with the interval
    of the step.
    """

    def draw(axes: Axes, place: int, cell: Any) -> None:
        known = _known(axes, place, cell, {phase: f"{phase}_s" for phase in PHASES}, 1 / MS)
        if known:
            stack(axes, place, split(MS * cell.step_s, known), PHASES, 0.6)
            number(axes, place, step_interval(axes, place, cell), show(MS * cell.step_s))

    bars(axes, cells, draw, rows)


def _known(axes: Axes, place: int, cell: Any, columns: Mapping[str, str], unit: float) -> dict[str, float]:
    """The columns that have a value, in `unit`; where none has one the axes say so."""
    values = {name: getattr(cell, column) for name, column in columns.items()}
    known = {name: float(value) / unit for name, value in values.items() if not pd.isna(value)}
    if not known:
        absent(axes, place, "not measured")
    return known


def step_interval(axes: Axes, place: int, cell: Any) -> float:
    """Draws the 95 % interval of a cell's step, if it has one. Returns the top, in ms."""
    step = MS * float(cell.step_s)
    if pd.isna(cell.step_s_low):
        return step
    low, high = MS * float(cell.step_s_low), MS * float(cell.step_s_high)
    axes.errorbar([place], [step], [[step - low], [high - step]], color="black", capsize=3, lw=1)
    return high


def mark(axes: Axes, place: int, height: float) -> None:
    """Draws the black mark of a prediction or a formula across a bar; none if there is no value."""
    if not pd.isna(height):
        axes.hlines(height, place - 0.38, place + 0.38, color="black", lw=1.8)


def name_failed(axes: Axes, cells: Iterable[Any], name: Callable[[Any], str], at_top: bool = False) -> None:
    """Writes the cells that failed, with their status, into a corner of the axes."""
    failed = "\n".join(f"× {name(cell)}: {cell.status}" for cell in cells if cell.status != "ok")
    height, alignment = (0.98, "top") if at_top else (0.03, "baseline")
    axes.text(0.02, height, failed, transform=axes.transAxes, va=alignment, style="italic", fontsize="small")


def highest(runs: pd.DataFrame, columns: Mapping[str, str]) -> float:
    """The largest value of any of the columns; 0 if there is none."""
    most = runs[list(columns.values())].astype("float64").max().max()
    return 0.0 if pd.isna(most) else float(most)
