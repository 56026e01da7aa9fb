"""Runs cells as a command does: with progress while they run and a table afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..config.cell import Cell
from ..config.compose import RefusedError, refuse_senseless
from ..host.pipes import print_line, print_note
from ..host.terminal import is_quiet
from ..predict.estimate import refuse_unfit
from ..results import rescue, selection
from ..results.leftovers import tidy
from ..results.options import RESULTS
from ..results.printed_table import print_failures, print_results, print_searches
from ..sizes import show_count
from .cell import find_reusable
from .parity import DIFFERS
from .parity_check import REFERENCES, ParityCheck
from .progress import SUBMITTED, WAITING, Reporter, interruption_of
from .search import is_search, run_searches
from .sweep import Sweep


def run_cells(
    cells: list[Cell],
    chosen: Sequence[str] | None = None,
    tables: bool = True,
    kind: Callable[..., Sweep] = Sweep,
    here: bool = True,
    price: float | None = None,
) -> tuple[int, list[dict[str, Any]]]:
    """Runs the cells, and prints the results if `tables`, with the columns `chosen`. Returns the exit code and the rows
    of all launches: 0 all ok, 1 one failed or could not be written to its folder, 130 stopped by the user. Raises
    RefusedError if every cell is invalid, or if nothing could be written.

    `kind`: makes a sweep from a reporter. `here`: cells run on this machine and must fit into its memory. `price`:
    dollars per GPU hour.
    """
    cells = fitting(cells) if here else cells
    refuse_senseless(cells)
    check_folders(cells)
    with Reporter() as reporter:
        check = ParityCheck()
        sweep, search = kind(reporter, check=check), kind(reporter)
        searching = [cell for cell in cells if is_search(cell) and not sweep.runs_searches]
        sweep.run([cell for cell in cells if cell not in searching])
        searches = [] if sweep.stopped or sweep.failed_fast else [*run_searches(searching, search), *sweep.searches]
        sweep.stopped |= search.stopped
        sweep.stopped |= not check.finish(
            makes=not (sweep.stopped or sweep.failed_fast), say=reporter.say, run=sweep.run_apart
        )
    if tables and sweep.rows:
        print_results(sweep.rows, chosen, price)
    if tables and searches:
        print_searches(searches)
    tried = [*search.rows, *sweep.combinations]
    broken = [row for row in tried if row["status"] not in ("ok", "oom")]  # not fitting is a result
    print_failures(broken)
    rows, lost = [*sweep.rows, *tried], [*sweep.unwritten, *search.unwritten]
    print_ending(cells if rows and tables else [], lost, sweep, reporter)
    gone = _removed(cells, rows, lost)
    if sweep.stopped:
        return 130, rows
    failed = [row for row in sweep.rows if row["status"] != "ok" or row["training"] == DIFFERS]
    return int(bool(failed or broken or lost or gone)), rows


def _removed(cells: list[Cell], rows: list[dict[str, Any]], lost: list[rescue.Unwritten]) -> list[str]:
    """Returns runs that were removed meanwhile, after printing an error."""
    folders = dict.fromkeys(Path(cell.config.results_dir) for cell in cells)
    searched = [*folders, *(run.kept for run in lost if run.kept is not None)]
    written = [row["run_id"] for row in rows if row["status"] == "ok" and selection.split(row["run_id"])[1]]
    gone = [run for run in dict.fromkeys(written) if not any((folder / run).is_dir() for folder in searched)]
    if gone:
        runs, where = show_count(len(gone), "run"), ", ".join(map(str, folders))
        print_note(
            f"zerobench: {runs} of this sweep no longer in {where}: {', '.join(gone)}; removed while it ran; the same"
            " command measures them again"
        )
    return gone


def print_ending(cells: list[Cell], lost: list[rescue.Unwritten], sweep: Sweep, reporter: Reporter) -> None:
    """Prints where the tables are, which runs could not be written, and whether a failure or the user stopped it."""
    for folder in sorted({cell.config.results_dir for cell in cells if not cell.problems}) if not is_quiet() else ():
        if Path(folder).is_dir():
            print_line(f"tables: {folder}   ({_readers(folder)})")
    for message in rescue.messages_of(lost):
        print_note(f"zerobench: {message}")
    if sweep.failed_fast:
        left = sum(entry.state in (WAITING, SUBMITTED) for entry in reporter.entries)
        print_note(f"fail_fast=true: stopped at the first failure; launches not started: {left}")
    if sweep.stopped:
        print_note(f"zerobench: {interruption_of(reporter.entries)}")


def _readers(folder: str) -> str:
    """Returns commands that read a results folder; RESULTS is their default."""
    if folder == RESULTS:
        return "zerobench status, show, export; zerobench.load"
    return f"zerobench status {folder}; zerobench export {folder}; zerobench show --results {folder} RUN"


def fitting(cells: list[Cell]) -> list[Cell]:
    """Returns the cells, marked invalid if their states do not fit here and no earlier run can be reused."""
    checked = ((cell, refuse_unfit(cell)) for cell in cells)
    return [cell if fit is cell or find_reusable(cell) is not None else fit for cell, fit in checked]


def check_folders(cells: list[Cell]) -> None:
    """Raises RefusedError if a results folder is not writable, unless all its cells can be reused. Removes leftovers of
    killed sweeps there.
    """
    problems = []
    for where in dict.fromkeys(cell.config.results_dir for cell in cells):
        why = rescue.why_unwritable(Path(where))
        own_cells = [cell for cell in cells if cell.config.results_dir == where]
        if why and any(find_reusable(cell) is None for cell in own_cells):
            problems.append(f"results_dir={where}: it cannot be written to ({why}); name another folder")
        for folder in (Path(where), Path(where) / REFERENCES):
            tidy(folder)
    if problems:
        raise RefusedError(problems)
