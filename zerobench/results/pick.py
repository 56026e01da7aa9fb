"""Finds one run among rows by what a person types: a run_id, a part of one, or the name of a cell."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from ..config.cell import CellConfig
from ..config.names import name_cells

LISTED = 10
"""Number of candidates that are listed where a name fits several."""

Row = dict[str, Any]


def pick(name: str, rows: Sequence[Row], where: str, hint: str = "", left_out: Sequence[str] = ()) -> Row:
    """Returns the run of that name, else the newest of the cell of that name, else the only one whose name begins with
    it, else the only one that contains it, else the newest of the only cell whose name begins with it: among more cells
    a name gets longer.

    `rows`: in the order in which they began. For the sentence of the ValueError, where `name` fits none or several:
    `where` they are, a `hint`, and what is said of each run that was `left_out`, for it may be the one.
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
        listed = "\n".join(f"  {run}  {by_id[run]['status']}  {names[run]}" for run in newest)
        more = f"\n  and {len(fitting) - LISTED} older ones" if len(fitting) > LISTED else ""
        raise ValueError(f"{name or where} fits {len(fitting)} runs; name one of\n{listed}{more}")
    near = [repr(one) for one in difflib.get_close_matches(name, {*names.values()}, n=3, cutoff=0.6)]
    near = near or difflib.get_close_matches(name, by_id, n=3, cutoff=0.4)
    after = f"; the nearest: {', '.join(near)}" if near else hint
    raise ValueError(f"{name}: no such run in {where}{after}" + "".join(f"; {one}" for one in left_out[:LISTED]))
