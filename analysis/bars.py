"""Bars of columns: what the figures of ZeRO-R have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from analysis.marks import absent, bars, show
from analysis.style import Fills, number, stack


def stacked(
    axes: Axes, cells: pd.DataFrame, columns: Mapping[str, str], fills: Fills, unit: float, whole: str | None = None
) -> None:
    """A bar a cell: its columns, by what they are called, one on the other, with their sum in numbers, or the column
    `whole`: medians of parts do not add up to the median of the whole.
    """

    def draw(axes: Axes, place: int, cell: Any) -> None:
        values = {name: getattr(cell, column) for name, column in columns.items()}
        known = {name: float(value) / unit for name, value in values.items() if not pd.isna(value)}
        if not known:
            absent(axes, place, "not measured")
            return
        height = stack(axes, place, known, fills, 0.6)
        number(axes, place, height, show(height if whole is None else float(getattr(cell, whole)) / unit))

    bars(axes, cells, draw)


def highest(results_runs: pd.DataFrame, columns: Mapping[str, str]) -> float:
    """The largest value of any of the columns; 0 where there is none."""
    most = results_runs[list(columns.values())].astype("float64").max().max()
    return 0.0 if pd.isna(most) else float(most)
