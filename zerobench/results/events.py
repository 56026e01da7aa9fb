"""Reads the table `events` of one run and rank: ordered streams, live bytes after each event, collectives.

stream       the events of a rank, in order
change       a row's contribution to the sum of a tier and category; a label moves a storage's size between categories
collective   from its first launch until its wait returns, if a wait was recorded
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ..records import CATEGORIES, TIERS

SIGNS = {"live": 1, "birth": 1, "free": -1, "label": 1}
"""Kind of an event -> sign of its bytes in the sum of its own category."""


def live_bytes(events: pd.DataFrame) -> pd.DataFrame:
    """Returns the sums after each event of one run and rank: index as `events`, columns (tier, category), int64, bytes.

    A tier without live bytes has columns of zeros.
    """
    signs = events["kind"].astype("object").map(SIGNS).fillna(0).astype("int64")
    changes = events["bytes"].astype("int64") * signs
    relabeled = events["bytes"].where(events["kind"] == "label", 0).astype("int64")
    sums = {
        (tier, category): (
            changes.where((events["tier"] == tier) & (events["category"] == category), 0)
            - relabeled.where((events["tier"] == tier) & (events["previous"] == category), 0)
        ).cumsum()
        for tier in TIERS
        for category in CATEGORIES
    }
    return pd.DataFrame(sums, index=events.index).astype("int64")


@dataclass(frozen=True)
class RecordedCollective:
    """One collective. `begin`, `end`: indices of its first launch and of its wait, or -1; `launches`: its rows."""

    begin: int
    end: int
    launches: list[Any]

    @property
    def name(self) -> str:
        """Name of the operation, and of its unit."""
        first = self.launches[0]
        return f"{first.collective} {first.unit}".strip()

    def total(self, column: str) -> Any:
        """Returns the sum of a column over the launches."""
        return sum(getattr(row, column) for row in self.launches)


def collectives_of(rows: Sequence[Any]) -> list[RecordedCollective]:
    """Returns the collectives of a stream's rows, in the order of their first launches."""
    waits: dict[Any, int] = {}
    launches: dict[int, list[tuple[int, Any]]] = {}
    for index, row in enumerate(rows):
        if row.kind == "wait":
            waits.setdefault(row.operation, index)
        elif row.kind == "launch":
            launches.setdefault(int(row.operation), []).append((index, row))
    return [
        RecordedCollective(rows_of[0][0], waits.get(operation, -1), [row for _, row in rows_of])
        for operation, rows_of in launches.items()
    ]


def streams_of(events: pd.DataFrame) -> dict[int, pd.DataFrame]:
    """Returns rank -> its stream, from the events of one run."""
    return {
        int(str(rank)): stream.sort_values("index", ignore_index=True)
        for rank, stream in events.groupby("rank", sort=True)
    }
