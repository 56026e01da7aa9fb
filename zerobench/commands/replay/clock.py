"""One clock for all streams of a world, so that one cursor moves through all of them.

anchor    an event that every stream has exactly once: the beginning of a phase, or of a module's forward or backward
clock     0 to TICKS. Anchors are at the same tick in all streams; events between two anchors are spread evenly

A tick is not a time: the instrument slows the accounted pass down, and streams differ in length. The order within each
stream is kept, and events between the same two anchors are shown between the same two ticks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

TICKS = 10_000
MOST_ANCHORS = 400
"""If there are more, only those of the outer modules are kept."""

Key = tuple[str, str, str, int]
"""Kind, name, direction, and the number of identical events before it."""


def ticks_of(streams: Sequence[pd.DataFrame]) -> list[NDArray[np.int64]]:
    """Returns the ticks of each stream's events, in order."""
    anchors = [_anchors(stream) for stream in streams]
    keys = [key for key in anchors[0] if all(key in other for other in anchors)]
    if len(keys) > MOST_ANCHORS:
        depth = sorted(key[1].count(".") for key in keys)[MOST_ANCHORS]
        keys = [key for key in keys if key[0] == "phase" or key[1].count(".") < depth]
    common = _in_one_order({key: np.array([each[key] for each in anchors]) for key in keys})
    indices = [
        np.array([-1, *(each[key] for key in common), len(stream)])
        for each, stream in zip(anchors, streams, strict=True)
    ]
    begins = [int((stream["kind"] == "live").sum()) for stream in streams]
    for index, begin in zip(indices, begins, strict=True):
        index[0] = max(begin - 1, 0)
    widths = np.maximum(np.mean([np.diff(index) for index in indices], axis=0), 0.0)
    at = np.concatenate([[0.0], np.cumsum(widths)])
    at *= TICKS / max(at[-1], 1.0)
    return [
        np.rint(np.interp(np.arange(len(s)), index, at)).astype(np.int64)
        for s, index in zip(streams, indices, strict=True)
    ]


def phases_of(stream: pd.DataFrame, ticks: NDArray[np.int64]) -> list[tuple[str, int]]:
    """Returns the phases and the ticks at which they begin."""
    begins = stream.index[stream["kind"] == "phase"]
    return [(str(stream["name"].iloc[index]), int(ticks[index])) for index in begins]


def _anchors(stream: pd.DataFrame) -> dict[Key, int]:
    """Returns the indices of a stream's anchors."""
    seen: Counter[tuple[str, str, str]] = Counter()
    anchors: dict[Key, int] = {}
    for index, (kind, name, operator) in enumerate(
        zip(stream["kind"], stream["name"], stream["operator"], strict=True)
    ):
        if kind in ("phase", "module"):
            event = str(kind), str(name), str(operator or "")
            anchors[(*event, seen[event])] = index
            seen[event] += 1
    return anchors


def _in_one_order(shared: dict[Key, NDArray[np.int64]]) -> list[Key]:
    """Returns the longest sequence of anchors that is in the same order in all streams."""
    keys, indices = list(shared), list(shared.values())
    best, before = np.ones(len(keys), dtype=int), np.full(len(keys), -1)
    for here in range(len(keys)):
        for there in range(here):
            if best[there] >= best[here] and (indices[there] < indices[here]).all():
                best[here], before[here] = best[there] + 1, there
    chain, at = [], int(best.argmax()) if keys else -1
    while at >= 0:
        chain.append(keys[at])
        at = int(before[at])
    return chain[::-1]
