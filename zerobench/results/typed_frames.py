"""Frames with types that a reader of tables relies on.

category   strategy, category, phase and tier are ordered: a sort, a groupby and a legend follow the order of the
           stages, of the ledger and of a step. A frame has the values that it holds and no others
unit       `frame.attrs["units"]` is column -> unit, for every number that has one (`zerobench columns`)
bytes      are integers, but for means over a group of ranks (`wire_bytes` of traffic)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pandas as pd

from ..records import ALLOCATOR, CATEGORIES, PHASES, TIERS
from ..records.describe import columns_of
from ..strategies import built_in

ORDERS: dict[str, Callable[[], Sequence[str]]] = {
    "strategy": lambda: list(built_in()),
    "category": lambda: (*CATEGORIES, "states", "total", *ALLOCATOR),
    "phase": lambda: PHASES,
    "tier": lambda: TIERS,
}
"""Column -> its values, in their order. Others, as a user's strategy, follow these by name."""


class Units(dict[str, str]):
    """Column -> unit. It is not changed, so that a copy is itself: pandas copies `attrs` with each operation."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Units:
        return self


@cache
def units_of(table: str) -> Units:
    """Units of the table's columns that have one."""
    return Units({column.name: column.unit for column in columns_of(table) if column.unit})


def typed(table: str, frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the frame with ordered categories and units; it shares the other columns with `frame`."""
    ordered = {name: _ordered(frame[name], ORDERS[name]()) for name in ORDERS if name in frame}
    made = frame.assign(**ordered)
    made.attrs = {**frame.attrs, "units": units_of(table)}
    return made


def untyped(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the frame with text in place of categories and without units, as files have it."""
    made = frame.astype({name: "object" for name in ORDERS if name in frame})
    made.attrs = {}
    return made


def _ordered(column: pd.Series, order: Sequence[str]) -> pd.Series:
    found = set(column.cat.categories if isinstance(column.dtype, pd.CategoricalDtype) else column.dropna().unique())
    if isinstance(column.dtype, pd.CategoricalDtype):
        found &= set(column.dropna().unique())
    values = [*(one for one in order if one in found), *sorted(found.difference(order))]
    return column.astype("object").astype(pd.CategoricalDtype(values, ordered=True))
