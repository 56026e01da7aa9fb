"""Cells that ran while other processes kept the machine busy: their times are shown, and none is called the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

SLACK = 0.5
"""Cores that a quiet machine's own services may take, and that readings may be off by."""


def is_busy(row: Mapping[str, Any]) -> bool:
    """Returns True if other processes took cores that the ranks would have used."""
    others = row.get("others_cores")
    if others is None or pd.isna(others):
        return False
    left = row["cores"] - row["world_size"] * row["threads"]
    return bool(others > max(0, left) + SLACK)


def busy_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a sentence on the cells that ran on a busy machine; empty if there are none."""
    busy = [row for row in rows if is_busy(row)]
    if not busy:
        return ""
    worst = max(busy, key=lambda row: row["others_cores"])
    took = f"other processes took up to {worst['others_cores']:.1f} of its {worst['cores']} cores"
    which = "all cells ran" if len(busy) == len(rows) else f"{len(busy)} of {len(rows)} cells ran"
    return f"the machine was busy while {which}: {took}; no time is marked as the best, measure again when it is quiet"
