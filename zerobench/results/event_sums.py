"""Live bytes after each event, from the table `events`: its rows of storages, added up in order.

change      what a row adds to the sum of a tier and category; a label moves a storage's size from one to another
"""

from __future__ import annotations

import pandas as pd

from ..records import CATEGORIES, TIERS

SIGNS = {"live": 1, "birth": 1, "free": -1, "label": 1}
"""Kind of an event -> sign of its bytes in the sum of its own category."""


def live_bytes(events: pd.DataFrame) -> pd.DataFrame:
    """Returns the sums after each event of one run and rank: index as `events`, columns (tier, category), int64, bytes.

    A tier in which nothing lives has columns of zeros.
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
