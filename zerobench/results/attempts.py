"""The order in which runs began, independent of a clock that was set back.

A run's folder is named PREFIX-ATTEMPT-TOKEN: cell and environment, a number that grows with every attempt at them in
one folder, and a random word by which runs of different machines differ (older runs have none). Among attempts of one
prefix in one folder the number decides, unless two have the same one, as after a merge; between others the wall clock's
`started` does. A *moment* is (started, attempt): the latest start of this attempt and those before it, which gives all
runs one order.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import pandas as pd

Moment = tuple[str, int]

_NAME = re.compile(r"(.+)-(\d+)(?:-x[0-9a-f]{6})?", re.ASCII)


def split(run_id: str) -> tuple[str, int]:
    """Splits a run's name into PREFIX and ATTEMPT; a name without a number is its own prefix, attempt 0."""
    found = _NAME.fullmatch(run_id)
    return (found[1], int(found[2])) if found else (run_id, 0)


def moments(runs: Iterable[tuple[str, str]]) -> list[Moment]:
    """Returns the moments of (run_id, started) of one folder, given in the order of a collection or
    sorted by `split`.
    """
    named = [(*split(run_id), started) for run_id, started in runs]
    counts = Counter((prefix, number) for prefix, number, _ in named)
    merged = {prefix for (prefix, _), count in counts.items() if count > 1}
    latest: dict[str, str] = {}
    found = []
    for prefix, number, started in named:
        latest[prefix] = started if prefix in merged else max(started, latest.get(prefix, ""))
        found.append((latest[prefix], number))
    return found


def by_number(runs: pd.DataFrame) -> pd.DataFrame:
    """Sorts the runs of a results folder by prefix and attempt."""
    return runs.iloc[sorted(range(len(runs)), key=[split(run_id) for run_id in runs["run_id"]].__getitem__)]


def in_order(places: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Concatenates the runs of all folders, each as `moments` expects them, in the order in which they began."""
    filled = [runs for runs in places if len(runs)]
    if not filled:
        return pd.DataFrame()
    keys = [key for runs in filled for key in moments(zip(runs["run_id"], runs["started"], strict=True))]
    return pd.concat(filled, ignore_index=True).iloc[sorted(range(len(keys)), key=keys.__getitem__)]
