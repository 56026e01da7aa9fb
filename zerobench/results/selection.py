"""Selects the runs of a verb or a figure: by keys (--where), without failed and superseded attempts unless --all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pandas as pd

from ..config.flat import by_key
from ..config.names import show_value
from ..config.unknown_keys import meant
from ..sizes import show_count
from .conditions import Where
from .tables import Results, latest

ATTEMPTS = ("crash", "timeout", "invalid", "interrupted")
"""Statuses of rows without a result. Others are results: that a cell does not fit (oom), for example."""


def chosen(results: Results, where: Sequence[Where], everything: bool = True) -> tuple[Results, str]:
    """Returns the tables of the selected runs, and a sentence on attempts that were left out, or nothing.

    Raises ValueError, a sentence, for a key that no run has, and for conditions that none meets.
    """
    runs = matching(results.runs, where)
    kept = runs if everything else standing(runs)
    if len(kept) == len(results.runs):
        return results, ""
    failed = int(runs["status"].isin(ATTEMPTS).sum())
    left = {"failed attempt": failed, "superseded run": len(runs) - len(kept) - failed}
    words = " and ".join(show_count(number, name) for name, number in left.items() if number)
    return results.of(kept["run_id"]), f"{words} left out; --all takes them" if words and not everything else ""


def standing(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the runs without failed attempts and without those that a newer one of the same cell supersedes."""
    ended = runs[~runs["status"].isin(ATTEMPTS)]
    return runs.loc[sorted(latest(ended).index)] if len(ended) else ended


def standing_or_failed(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the standing runs, and the attempts at cells that have no other run."""
    good = standing(runs)
    return runs.loc[sorted([*good.index, *runs.index[~runs["cell_id"].isin(good["cell_id"])]])]


def matching(runs: pd.DataFrame, where: Sequence[Where]) -> pd.DataFrame:
    """Returns the runs that meet every condition."""
    if not where or runs.empty:
        return runs
    configs = [by_key(json.loads(text)) for text in runs["config"]]
    kept = pd.Series(True, index=runs.index)
    for number, one in enumerate(where):
        met = kept & pd.Series(_meets(one, runs, configs), index=runs.index)
        if not met.any():
            values = [value for value, left in zip(_values(one.key, runs, configs), kept, strict=True) if left]
            found = " or ".join(sorted({show_value(value) for value in values}))
            among = f" among those with {' '.join(map(str, where[:number]))}" if number else ""
            raise ValueError(f"--where {one}: no such run{among}; {one.key} is {found}")
        kept = met
    return runs[kept]


def _meets(one: Where, runs: pd.DataFrame, configs: list[dict[str, Any]]) -> list[bool]:
    return [
        any(_equal(value, wanted) for wanted in one.values) != one.is_not for value in _values(one.key, runs, configs)
    ]


def _values(key: str, runs: pd.DataFrame, configs: list[dict[str, Any]]) -> list[Any]:
    """Returns each run's value: from its config or, for a name that is not a key, from its row."""
    key = "threads" if key == "launch.threads" else key
    if any(key in config for config in configs):
        return [config.get(key) for config in configs]
    if key in runs:
        return [None if pd.isna(value) else value for value in runs[key]]
    known = dict.fromkeys([*(key for config in configs for key in config), *runs.columns])
    raise ValueError(f"--where {key}: no run has such a key or column{meant(key, list(known))}")


def _equal(value: Any, wanted: str) -> bool:
    """Compares as text or, for numbers, as numbers: 1e-3 equals 0.001."""
    if show_value(value) == wanted:
        return True
    try:
        return not isinstance(value, bool | str) and value is not None and float(value) == float(wanted)
    except (TypeError, ValueError):
        return False
