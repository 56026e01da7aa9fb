"""Bars of columns: what the figures of ZeRO-R have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from analysis.marks import absent, bars, show
from analysis.style import Fills, number, stack


def stacked(
    axes: Axes, cells: pd.DataFrame, columns: Mapping[str, str], fills: Fills, unit: float, whole: str | None = None,
    words: Callable[[float], str] = show,
) -> None:  # fmt: skip
    """A bar a cell: its columns, by what they are called, one on the other, with their sum in numbers. With a column
    `whole` the bar is as high as that, split in the proportions of the others. `words`: how a sum is written.
    """

    def draw(axes: Axes, place: int, cell: Any) -> None:
        values = {name: getattr(cell, column) for name, column in columns.items()}
        known = {name: float(value) / unit for name, value in values.items() if not pd.isna(value)}
        if not known:
            absent(axes, place, "not measured")
            return
        if whole is not None:
            known = split(float(getattr(cell, whole)) / unit, known)
        height = stack(axes, place, known, fills, 0.6)
        number(axes, place, height, words(height))

    bars(axes, cells, draw)


def split(whole: float, parts: Mapping[str, float]) -> dict[str, float]:
    """Splits a whole in the proportions of the parts: medians of parts do not add up to the median of the whole."""
    total = sum(parts.values())
    return {name: whole * part / total for name, part in parts.items()} if total else {}


def highest(results_runs: pd.DataFrame, columns: Mapping[str, str]) -> float:
    """The largest value of any of the columns; 0 where there is none."""
    most = results_runs[list(columns.values())].astype("float64").max().max()
    return 0.0 if pd.isna(most) else float(most)
