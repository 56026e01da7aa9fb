"""Cells of one side of a comparison, each with its launches, and the pairs that cells of two sides make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from ...config.cell import CellConfig
from ...config.flat import base_name, name_cells
from ...config.identity import work_id
from ...results.selection import latest
from ...results.summary import summarize
from ..budget.line_table import Lines, LinesOfRuns

Row = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """A cell of one side: its launches, and their summary row."""

    name: str
    config: CellConfig
    row: Row
    launches: list[Row]
    lines: Lines = field(default_factory=dict)


def measured(runs: pd.DataFrame, lines: pd.DataFrame | None) -> list[Measured]:
    """Returns the cells of these runs, each of its newest launches; `lines`: the table of lines of the runs."""
    known = None if lines is None else LinesOfRuns(lines)
    launches: dict[str, list[Row]] = {}
    for row in _records(latest(runs)):
        launches.setdefault(row["cell_id"], []).append(row)
    rows = _records(summarize(runs))
    configs = [CellConfig.from_json(row["config"]) for row in rows]
    return [
        Measured(
            name,
            config,
            row,
            mine := launches[row["cell_id"]],
            known.of(row["run_id"] for row in mine) if known else {},
        )
        for name, config, row in zip(name_cells(configs), configs, rows, strict=True)
    ]


def _records(frame: pd.DataFrame) -> list[Row]:
    """Converts rows to plain dicts, None for missing values."""
    return [
        {str(key): None if pd.isna(value) else value for key, value in row.items()} for row in frame.to_dict("records")
    ]


def match(a: list[Measured], b: list[Measured]) -> list[tuple[Measured, Measured]]:
    """Pairs equal cells first, then equal work, then equal names, where they are unique on their side.

    A single cell on each side is a pair, however they differ, because both were named explicitly.
    """
    if len(a) == len(b) == 1:
        return [(a[0], b[0])]
    keys: list[Callable[[Measured], str]] = [
        lambda cell: cell.row["cell_id"],
        lambda cell: work_id(cell.config),
        lambda cell: base_name(cell.config),
    ]
    found: dict[int, tuple[Measured, Measured]] = {}
    left_a, left_b = list(a), list(b)
    for key in keys:
        ours, theirs = _unique(left_a, key), _unique(left_b, key)
        for value in ours.keys() & theirs.keys():
            one, other = ours[value], theirs[value]
            found[id(one)] = one, other
            left_a = [cell for cell in left_a if cell is not one]
            left_b = [cell for cell in left_b if cell is not other]
    return [found[id(cell)] for cell in a if id(cell) in found]


def _unique(cells: list[Measured], key: Callable[[Measured], str]) -> dict[str, Measured]:
    groups: dict[str, list[Measured]] = {}
    for cell in cells:
        groups.setdefault(key(cell), []).append(cell)
    return {value: mine[0] for value, mine in groups.items() if len(mine) == 1}
