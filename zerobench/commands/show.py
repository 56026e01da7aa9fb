"""`zerobench show RUN`: one run as a readable account.

RUN is its folder, its run_id or a part of it, or its cell's name.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from ..results import selection as rows
from ..results.options import RESULTS, Parser, verb
from ..results.tables import Results, load
from .account import print_account
from .folder_contents import FolderContents, RunInFolder, look


@verb
def show(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code: 0, or 2 if RUN names no run, or several."""
    description = "What was run, its memory, traffic, times and losses; for a failed run its reason and logs."
    parser = Parser("zerobench show", description)
    run_help = (
        "its folder, or a results folder of one run, its run_id or a part that fits one run, or, quoted, a cell's name"
        " as status prints it"
    )
    parser.add_argument("run", metavar="RUN", help=run_help)
    results_help = "where to look for a run_id (default: %(default)s)"
    parser.add_argument("--results", type=Path, default=RESULTS, help=results_help)
    chosen = parser.parse_args(arguments)
    run, results = find(chosen.run, chosen.results)
    print_account(run.row, results, run.folder)
    return 0


def find(name: str, where: Path) -> tuple[RunInFolder, Results]:
    """Returns the run and its tables. Raises ValueError if `name` fits none or several."""
    for folder in (Path(name), where / name):
        if (folder / "run.json").is_file():
            held = look(folder)
            if not held.runs:
                raise ValueError("; ".join(held.unreadable))
            return held.runs[0], _load_run(folder)
    if Path(name).is_dir() and (inside := look(Path(name))).runs:  # a results folder: of one run, it is meant
        name, held = "", inside
    else:
        held = look(where)
    run = pick(name, held)
    if run.folder is not None:
        return run, _load_run(run.folder)
    return run, load(where).of([run.row["run_id"]])


def _load_run(folder: Path) -> Results:
    """Raises ValueError if a table is damaged."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = load(folder)
    if results.runs.empty:
        raise ValueError("; ".join(str(warning.message) for warning in caught))
    return results


def pick(name: str, held: FolderContents) -> RunInFolder:
    """Returns the run that `name` selects (results/selection.py)."""
    hint = f"; `zerobench status {held.where}` lists the runs"
    row = rows.pick(name, [run.row for run in held.runs], str(held.where), hint, held.unreadable)
    return next(run for run in held.runs if run.row is row)
