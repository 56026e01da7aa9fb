"""Settings: cells that train the same thing, with the label that tells each from the others, in a fixed order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from ...config.names import name_strategies
from ...judging.comparison import Measured, measured
from ...results.summary import SETTING
from ...strategies import find

Row = dict[str, Any]

ORDER = ("model", "world_size", "batch", "sequence", "precision", "strategy")
"""Columns that cells are sorted by."""


@dataclass(frozen=True)
class Setting:
    """`cells` and their `labels`; `reference`: the place of the cell that costs are told beside, None without one."""

    title: str
    cells: list[Measured]
    labels: list[str]
    reference: int | None

    @property
    def ok(self) -> list[int]:
        """Places of the cells that have figures."""
        return [place for place, cell in enumerate(self.cells) if cell.row["status"] == "ok"]


def settings_of(runs: pd.DataFrame) -> list[Setting]:
    """Groups the cells of these runs, their newest launches, by setting."""
    cells = sorted(measured(runs, None), key=_order)
    groups: dict[tuple[Any, ...], list[Measured]] = {}
    for cell in cells:
        groups.setdefault(tuple(cell.row[key] for key in SETTING), []).append(cell)
    titles = _titles([mine[0] for mine in groups.values()])
    return [
        Setting(title, mine, name_strategies([cell.config for cell in mine]), _reference(mine))
        for title, mine in zip(titles, groups.values(), strict=True)
    ]


def _order(cell: Measured) -> tuple[Any, ...]:
    return tuple((cell.row[key] is None, cell.row[key] or 0) for key in ORDER)


def _reference(cells: list[Measured]) -> int | None:
    """Returns the place of the strategy that training is held against, else of the first cell that is ok."""
    ok = [place for place, cell in enumerate(cells) if cell.row["status"] == "ok"]
    named = [place for place in ok if (spec := find(cells[place].row["strategy"])) and spec.reference is not None]
    return next(iter([*named, *ok]), None)


def _titles(firsts: list[Measured]) -> list[str]:
    """Returns a title per setting: what always tells, and the other keys in which settings differ."""
    rows = [cell.row for cell in firsts]
    more = [key for key in ("precision", "optimizer", "data", "seed", "device", "shape")
            if len({str(row[key]) for row in rows}) > 1]  # fmt: skip
    named = [_title(row) + "".join(f", {_told(key, row[key])}" for key in more if key != "shape") for row in rows]
    shapes = [row["shape"].split() for row in rows]
    own = [[word for word in mine if not all(word in other for other in shapes)] for mine in shapes]
    return [
        title + ("".join(f", {word}" for word in words) if named.count(title) > 1 else "")
        for title, words in zip(named, own, strict=True)
    ]


def _told(key: str, value: object) -> str:
    return f"{key} {value}" if key == "seed" else str(value)


def _title(row: Row) -> str:
    return f"{row['model']}, N = {row['world_size']}, batch {row['batch']} × {row['sequence']}"
