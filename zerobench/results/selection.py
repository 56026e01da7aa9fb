"""Selection of runs: by keys (--where), by name, the newest of each cell, in the order in which they began.

A run's folder is named PREFIX-ATTEMPT-TOKEN: cell and environment, a number that grows with every attempt at them in
one folder, and a random word that distinguishes runs of different machines (older runs have none). Attempts with the
same prefix in one folder are ordered by number, unless two have the same one, as after a merge; all others by the wall
clock's `started`, which may have been set back. A *moment* is (started, attempt): the latest start of this attempt and
the ones before it, which puts all runs in one order.
"""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ..config.cell import CellConfig
from ..config.flat import by_key, name_cells, show_value
from ..config.keys import meant
from ..sizes import show_count
from .frames import Row
from .options import Where

ATTEMPTS = ("crash", "timeout", "invalid", "interrupted")
"""Statuses of rows without a result. Other statuses are results: for example, that a cell does not fit (oom)."""


def select(runs: pd.DataFrame, where: Sequence[Where], everything: bool) -> tuple[pd.DataFrame, str]:
    """Returns the selected runs, and a message on attempts that were left out, or an empty one. `everything`: take
    failed attempts and superseded runs, too.

    Raises ValueError for a key that no run has, and for conditions that no run meets.
    """
    met = matching(runs, where)
    kept = met if everything else standing(met)
    failed = int(met["status"].isin(ATTEMPTS).sum())
    left = {} if everything else {"failed attempt": failed, "superseded run": len(met) - len(kept) - failed}
    left_out = " and ".join(show_count(number, name) for name, number in left.items() if number)
    return kept, f"{left_out} left out; --all takes them" if left_out else ""


def standing(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the runs without failed attempts and without those superseded by a newer run of the same cell."""
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
    for number, condition in enumerate(where):
        values = _values(condition.key, runs, configs)
        meets = [any(_equal(value, wanted) for wanted in condition.values) != condition.is_not for value in values]
        met = kept & pd.Series(meets, index=runs.index)
        if not met.any():
            left = [value for value, is_left in zip(values, kept, strict=True) if is_left]
            remaining = " or ".join(sorted({show_value(value) for value in left}))
            among = f" among those with {' '.join(map(str, where[:number]))}" if number else ""
            raise ValueError(f"--where {condition}: no such run{among}; {condition.key} is {remaining}")
        kept = met
    return runs[kept]


def _values(key: str, runs: pd.DataFrame, configs: list[dict[str, Any]]) -> list[Any]:
    """Returns each run's value: from its config or, for a name that is not a key, from its row."""
    key = "threads" if key == "launch.threads" else key
    if any(key in config for config in configs):
        return [config.get(key) for config in configs]
    if key in runs:
        return [None if pd.isna(value) else value for value in runs[key]]
    names = dict.fromkeys([*(key for config in configs for key in config), *runs.columns])
    raise ValueError(f"--where {key}: no run has such a key or column{meant(key, list(names))}")


def _equal(value: Any, wanted: str) -> bool:
    """Compares as text or, for numbers, as numbers: 1e-3 equals 0.001."""
    if show_value(value) == wanted:
        return True
    try:
        return not isinstance(value, bool | str) and value is not None and float(value) == float(wanted)
    except (TypeError, ValueError):
        return False


LISTED = 10
"""Most candidates that are listed if a name fits several."""


def pick(
    name: str, rows: Sequence[Row], where: str, hint: str = "", left_out: Sequence[str] = (), how: str = ""
) -> Row:
    """Returns the first match: the run of this name; the newest run of the cell of this name; the only run whose name
    begins with it or, if none does, contains it; the newest run of the only cell whose name begins with it, since the
    names of cells get longer if there are more cells.

    `rows`: in the order in which they began. Raises ValueError if `name` fits no run or several, with a message made of
    `where` the runs are, a `hint`, messages on runs that were `left_out` and may be meant, and `how` to name a run.
    """
    by_id = {str(row["run_id"]): row for row in rows}
    if name in by_id:
        return by_id[name]
    names = dict(zip(by_id, name_cells([CellConfig.from_json(row["config"]) for row in by_id.values()]), strict=True))
    called = [run for run, cell in names.items() if cell == name]
    if called:  # as `zerobench status` prints it: the newest launch
        return by_id[called[-1]]
    fitting = [run for run in by_id if run.startswith(name)] or [run for run in by_id if name in run]
    if len(fitting) == 1:
        return by_id[fitting[0]]
    fitting = fitting or [run for run, cell in names.items() if cell.startswith(f"{name} ")]
    if len({names[run] for run in fitting}) == 1 and " " in name:
        return by_id[fitting[-1]]
    if fitting:
        newest = fitting[: -LISTED - 1 : -1]
        listed = "\n".join(
            f"  {run}  {by_id[run]['status']}  {names[run]}  {str(by_id[run]['started'])[:19]}" for run in newest
        )
        more = f"\n  and {len(fitting) - LISTED} older ones" if len(fitting) > LISTED else ""
        raise ValueError(f"{name or where} fits {len(fitting)} runs; name one of these{how}\n{listed}{more}")
    near = [repr(cell_name) for cell_name in difflib.get_close_matches(name, {*names.values()}, n=3, cutoff=0.6)]
    near = near or difflib.get_close_matches(name, by_id, n=3, cutoff=0.4)
    after = f"; the nearest: {', '.join(near)}" if near else hint
    raise ValueError(f"{name}: no such run in {where}{after}" + "".join(f"; {why}" for why in left_out[:LISTED]))


Moment = tuple[str, int]

_NAME = re.compile(r"(.+)-(\d+)(?:-x[0-9a-f]{6})?", re.ASCII)

CODE = ("source_hash", "torch_version", "device_class")
"""Columns in which launches of a cell must agree to be the same measurement."""


def split(run_id: str) -> tuple[str, int]:
    """Splits a run's name into PREFIX and ATTEMPT; a name without a number is its own prefix, with attempt 0."""
    match = _NAME.fullmatch(run_id)
    return (match[1], int(match[2])) if match else (run_id, 0)


def moments(runs: Iterable[tuple[str, str]]) -> list[Moment]:
    """Returns the moments of (run_id, started) of one folder, in a collection's order or sorted by `split`."""
    named = [(*split(run_id), started) for run_id, started in runs]
    counts = Counter((prefix, number) for prefix, number, _ in named)
    merged = {prefix for (prefix, _), count in counts.items() if count > 1}
    latest: dict[str, str] = {}
    ordered = []
    for prefix, number, started in named:
        latest[prefix] = started if prefix in merged else max(started, latest.get(prefix, ""))
        ordered.append((latest[prefix], number))
    return ordered


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


def latest(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns each cell's newest launch of each repeat, all by the same code; cells in order of first appearance."""
    last = runs.drop_duplicates("cell_id", keep="last").set_index("cell_id")[list(CODE)]
    same = (runs[list(CODE)].to_numpy() == last.loc[runs["cell_id"]].to_numpy()).all(axis=1)
    kept = runs[same].drop_duplicates(["cell_id", "repeat"], keep="last")
    position = {cell: number for number, cell in enumerate(dict.fromkeys(runs["cell_id"]))}
    order = np.lexsort((kept["repeat"].astype("int64"), kept["cell_id"].map(position)))
    ordered: pd.DataFrame = kept.iloc[order]
    return ordered
