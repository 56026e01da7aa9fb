"""`zerobench show RUN`: one run as a readable account.

RUN is its folder, its run_id or a part of that, or its cell's name.
"""

from __future__ import annotations

import argparse
import difflib
import sys
import warnings
from pathlib import Path

from ..config.cell import CellConfig
from ..config.names import name_cells
from ..results.tables import Results, load
from ..sizes import printable
from .account.account import print_account
from .holdings import Held, Holdings, look

LISTED = 10
"""Number of candidates that are listed where RUN fits several."""


def show(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code: 0, or 2 where RUN names no run, or several."""
    parser = argparse.ArgumentParser(
        prog="zerobench show",
        description="What was run, its memory, traffic, times and losses; for a failed run its reason and logs.",
    )
    parser.add_argument(
        "run",
        metavar="RUN",
        help="its folder, or a results folder of one run, its run_id or a part that fits one run, or, quoted, a cell's"
        " name as status prints it",
    )
    parser.add_argument(
        "--results", type=Path, default="results/runs", help="where to look for a run_id (default: %(default)s)"
    )
    chosen = parser.parse_args(arguments)
    try:
        run, results = find(chosen.run, chosen.results)
    except (OSError, ValueError) as error:
        for line in f"zerobench show: {error}".split("\n"):
            print(printable(line), file=sys.stderr)
        return 2
    print_account(run.row, results, run.folder)
    return 0


def find(name: str, where: Path) -> tuple[Held, Results]:
    """Returns the run and its tables. Raises ValueError, in a sentence, where `name` fits none or several."""
    for folder in (Path(name), where / name):
        if (folder / "run.json").is_file():
            return _only(look(folder)), _load_run(folder)
    if Path(name).is_dir() and (inside := look(Path(name))).runs:  # a results folder: of one run, it is meant
        name, held = "", inside
    else:
        held = look(where)
    run = pick(name, held)
    if run.folder is not None:
        return run, _load_run(run.folder)
    return run, load(where).of([run.row["run_id"]])


def _load_run(folder: Path) -> Results:
    """Raises ValueError where a table is damaged."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = load(folder)
    if results.runs.empty:
        raise ValueError("; ".join(str(warning.message) for warning in caught))
    return results


def pick(name: str, held: Holdings) -> Held:
    """Returns the run of that name, else the newest of the cell of that name, else the only one whose name begins with
    it, else the only one that contains it, else the newest of the only cell whose name begins with it: among more cells
    a name gets longer.
    """
    by_id = {run.row["run_id"]: run for run in held.runs}
    if name in by_id:
        return by_id[name]
    names = dict(
        zip(by_id, name_cells([CellConfig.from_json(run.row["config"]) for run in by_id.values()]), strict=True)
    )
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
        listed = "\n".join(f"  {run}  {by_id[run].row['status']}  {names[run]}" for run in newest)
        more = f"\n  and {len(fitting) - LISTED} older ones" if len(fitting) > LISTED else ""
        raise ValueError(f"{name or held.where} fits {len(fitting)} runs; name one of\n{listed}{more}")
    near = [repr(one) for one in difflib.get_close_matches(name, {*names.values()}, n=3, cutoff=0.6)]
    near = near or difflib.get_close_matches(name, by_id, n=3, cutoff=0.4)
    hint = f"; the nearest: {', '.join(near)}" if near else f"; `zerobench status {held.where}` lists what is there"
    raise ValueError(f"{name}: no such run in {held.where}{hint}")


def _only(held: Holdings) -> Held:
    if not held.runs:
        raise ValueError("; ".join(held.unreadable))
    return held.runs[0]
