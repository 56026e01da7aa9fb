"""Live bytes after each event of a stream, by tier and category."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ...records import CATEGORIES, OF_STORAGES

Sums = dict[str, dict[str, NDArray[np.int64]]]
"""Tier -> category -> bytes after each event."""


def live_bytes(events: pd.DataFrame) -> Sums:
    """Returns the live bytes after each event; of the device also where nothing lies on it."""
    kind, category, previous = (events[name].to_numpy(dtype=object) for name in ("kind", "category", "previous"))
    sizes, tiers = events["bytes"].to_numpy(dtype=np.int64), events["tier"].to_numpy(dtype=object)
    signed = np.where(kind == "free", -sizes, np.where(np.isin(kind, OF_STORAGES), sizes, 0))
    found: Sums = {}
    for tier in ("device", *sorted(set(tiers[np.isin(kind, OF_STORAGES)]) - {"device"})):
        here = tiers == tier
        found[tier] = {
            name: np.cumsum(
                np.where(here & (category == name), signed, 0)
                - np.where(here & (kind == "label") & (previous == name), sizes, 0)
            )
            for name in CATEGORIES
        }
    return found
