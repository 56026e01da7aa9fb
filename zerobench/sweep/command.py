"""Runs cells as a command does: with progress while they run and a table afterwards. They are listed, or a Hydra
sweeper (Optuna, Nevergrad, ...) proposes them from the objective of earlier ones.

feasible     it ran, is within the memory limit, and has a value for each objective
infeasible   otherwise: invalid, oom, crash, timeout, diverged, or over the limit; its sweeper gets infinity
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from ..config.cell import Cell, CellConfig
from ..config.compose import LIMIT, CommandLine, RefusedError, propose, refuse_senseless
from ..config.flat import base_name
from ..config.plugins import OBJECTIVE, Objective
from ..host.environment import SIMULATED
from ..host.pipes import print_line, print_note
from ..host.terminal import is_quiet
from ..predict.estimate import refuse_unfit
from ..records import RunRow
from ..results import folders, selection
from ..results.frames import frame_of
from ..results.options import RESULTS
from ..results.printed_table import print_failures, print_results, print_searches
from ..results.summary import summarize
from ..sizes import parse_memory, show_count
from .cell import find_reusable
from .parity import DIFFERS, REFERENCES, ParityCheck
from .progress import SUBMITTED, WAITING, Reporter, interruption_message
from .search import is_search, run_searches, used_bytes
from .sweep import Sweep


def run_cells(
    cells: list[Cell],
    chosen: Sequence[str] | None = None,
    tables: bool = True,
    kind: Callable[..., Sweep] = Sweep,
    here: bool = True,
    price: float | None = None,
) -> tuple[int, list[RunRow]]:
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
    broken = [row for row in tried if row.status not in ("ok", "oom")]  # not fitting is a result
    print_failures((base_name(CellConfig.from_json(row.config)), vars(row)) for row in broken)
    rows, lost = [*sweep.rows, *tried], [*sweep.unwritten, *search.unwritten]
    print_ending(cells if rows and tables else [], lost, sweep, reporter)
    results_dirs = dict.fromkeys(Path(cell.config.results_dir) for cell in cells)
    searched = [*results_dirs, *(run.kept for run in lost if run.kept is not None)]
    written = [row.run_id for row in rows if row.status == "ok" and selection.split(row.run_id)[1]]
    gone = [run for run in dict.fromkeys(written) if not any((folder / run).is_dir() for folder in searched)]
    if gone:
        runs, where = show_count(len(gone), "run"), ", ".join(map(str, results_dirs))
        print_note(
            f"zerobench: {runs} of this sweep no longer in {where}: {', '.join(gone)}; removed while it ran; the same"
            " command measures them again"
        )
    if sweep.stopped:
        return 130, rows
    failed = [row for row in sweep.rows if row.status != "ok" or row.training == DIFFERS]
    return int(bool(failed or broken or lost or gone)), rows


def print_ending(cells: list[Cell], lost: list[folders.Unwritten], sweep: Sweep, reporter: Reporter) -> None:
    """Prints where the tables are, which runs could not be written, and whether a failure or the user stopped it."""
    for folder in sorted({cell.config.results_dir for cell in cells if not cell.problems}) if not is_quiet() else ():
        if Path(folder).is_dir():
            readers = "zerobench status, show, export; zerobench.load"  # whose default is RESULTS
            if folder != RESULTS:
                readers = f"zerobench status {folder}; zerobench export {folder}; zerobench show --results {folder} RUN"
            print_line(f"tables: {folder}   ({readers})")
    for message in folders.unwritten_messages(lost):
        print_note(f"zerobench: {message}")
    if sweep.failed_fast:
        left = sum(entry.state in (WAITING, SUBMITTED) for entry in reporter.entries)
        print_note(f"fail_fast=true: stopped at the first failure; launches not started: {left}")
    if sweep.stopped:
        print_note(f"zerobench: {interruption_message(reporter.entries)}")


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
        why = folders.why_unwritable(Path(where))
        own_cells = [cell for cell in cells if cell.config.results_dir == where]
        if why and any(find_reusable(cell) is None for cell in own_cells):
            problems.append(f"results_dir={where}: it cannot be written to ({why}); name another folder")
        for folder in (Path(where), Path(where) / REFERENCES):
            folders.tidy(folder)
    if problems:
        raise RefusedError(problems)


def run_composed(composed: CommandLine, chosen: Sequence[str] | None) -> int:
    """Runs the cells of a command line: on this machine, in a launcher's jobs, or for a sweeper. Prints the table of
    the columns `chosen`, and returns the exit code. Raises RefusedError.
    """
    launcher = composed.launcher
    here = launcher is None or launcher.is_here
    kind: Callable[..., Sweep] = Sweep
    if launcher is not None:
        from .jobs import JobSweep

        kind = partial(JobSweep, composed=composed)
    if composed.proposes:
        return run_proposed(composed, chosen, kind, here)
    return run_cells(composed.cells, chosen, kind=kind, here=here, price=composed.price)[0]


OVER = "over the limit"
"""Status of a trial that needs more memory than permitted."""

ANSWERS = ("ok", "oom", "invalid", "diverged", OVER)
"""Statuses that answer a sweeper's question; others are failures of the run."""


def run_proposed(composed: CommandLine, chosen: Sequence[str] | None, kind: Callable[..., Sweep], here: bool) -> int:
    """Runs the sweep, and prints its table and what the sweeper found. Returns the exit code: 0 if all trials answered
    the sweeper (not fitting counts as an answer); otherwise 1; 130 if the user stopped it. Raises RefusedError.

    `kind`: makes a sweep from a reporter. `here`: cells run on this machine and must fit into its memory.
    """
    limits = [word for word in composed.fixed if word.startswith(LIMIT)]
    limit = composed.composer.config_of([*composed.own, *limits]).search.memory_limit
    try:
        limit_bytes = None if limit is None else parse_memory(limit)
    except ValueError as error:
        raise RefusedError([f"search.memory_limit: {error}"]) from None
    account: dict[str, Any] = {}
    refused: RefusedError | None = None
    with Reporter() as reporter:
        training = ParityCheck()
        cells = kind(reporter, check=training)
        trials = Trials(cells, composed.objectives, here, limit_bytes)
        try:
            account = propose(composed, trials.run)
        except EndedError:
            pass
        except KeyboardInterrupt:
            cells.stopped = True
        except RefusedError as error:
            refused = error
        ended = cells.stopped or cells.failed_fast or refused is not None
        cells.stopped |= not training.finish(makes=not ended, say=reporter.say, run=cells.run_apart)
    if refused is not None and not cells.rows:
        raise refused
    if cells.rows:
        print_results(cells.rows, chosen, composed.price)
    counts = Counter(trials.statuses.values())
    statuses = ", ".join(f"{number} {status}" for status, number in counts.items())
    print_line(f"{composed.sweeper}: {len(trials.statuses)} cells: {statuses}")
    for line in yaml.safe_dump(account, sort_keys=False).splitlines() if account else ["it reports no result"]:
        print_line(line)
    print_ending(trials.cells, cells.unwritten, cells, reporter)
    if refused is not None:
        raise refused
    if cells.stopped:
        return 130
    differs = any(row.training == DIFFERS for row in cells.rows)
    failed = any(status not in ANSWERS for status in counts)
    return int(bool(failed or differs or cells.unwritten or cells.failed_fast or not account))


class EndedError(Exception):
    """Raised out of the sweeper: the user or a failure has stopped the sweep."""


@dataclass
class Trials:
    """Runs the batches of a sweeper. `statuses`, `values` for the sweeper: by cell; a cell that is proposed again runs
    once.
    """

    sweep: Sweep
    objectives: tuple[Objective, ...]
    here: bool
    limit_bytes: int | None
    cells: list[Cell] = field(default_factory=list)
    statuses: dict[str, str] = field(default_factory=dict)
    values: dict[str, list[float]] = field(default_factory=dict)

    def run(self, batch: list[Cell]) -> list[list[float]]:
        """Returns the values of a batch's cells. Raises EndedError, or RefusedError for a results folder that cannot be
        written to, or an ok run without an objective.
        """
        fresh = list({cell.cell_id: cell for cell in batch if cell.cell_id not in self.values}.values())
        fresh = fitting(fresh) if self.here else fresh
        check_folders(fresh)
        self.cells += fresh
        self.sweep.run(fresh)
        for cell in fresh:
            if rows := self.sweep.by_cell.get(cell.cell_id):
                self._judge(cell, rows)
        if self.sweep.stopped or self.sweep.failed_fast:
            raise EndedError
        return [self.values[cell.cell_id] for cell in batch]

    def _judge(self, cell: Cell, rows: list[RunRow]) -> None:
        """Takes the values of a cell, summarized over launches as in tables."""
        row: Any = next(summarize(frame_of(rows, RunRow)).itertuples())
        over = row.status == "ok" and self.limit_bytes is not None and used_bytes(row) > self.limit_bytes
        self.statuses[cell.cell_id] = status = OVER if over else row.status
        if status != "ok":
            self.values[cell.cell_id] = [objective.worst for objective in self.objectives]
            return
        columns = [objective.column for objective in self.objectives]
        if lacking := [column for column in columns if pd.isna(getattr(row, column))]:
            simulated = row.backend == SIMULATED
            why = "a simulated world has no times and no losses" if simulated else "measure.passes=both measures all"
            raise RefusedError([f"{OBJECTIVE}={lacking[0]}: a run has no such figure; {why}"])
        figures = zip(self.objectives, columns, strict=True)
        self.values[cell.cell_id] = [objective.directed(getattr(row, column)) for objective, column in figures]
