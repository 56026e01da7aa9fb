"""A sweep whose cells a Hydra sweeper (Optuna, Nevergrad, ...) proposes from the objective of earlier ones.

feasible     it ran, is within the memory limit, and has a value for each objective
infeasible   otherwise: invalid, oom, crash, timeout, diverged, or over the limit; its sweeper gets infinity
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import yaml

from ..config.cell import Cell
from ..config.compose import LIMIT, CommandLine, RefusedError, propose
from ..config.plugins import OBJECTIVE, Objective
from ..host.pipes import print_line
from ..records import RunRow
from ..results.frames import frame_of
from ..results.printed_table import print_results
from ..results.summary import summarize
from ..sizes import parse_memory
from .command import check_folders, fitting, print_ending
from .parity import DIFFERS
from .parity_check import ParityCheck
from .progress import Reporter
from .search import used_bytes
from .sweep import Sweep

OVER = "over the limit"
"""Status of a trial that needs more memory than permitted."""

ANSWERS = ("ok", "oom", "invalid", "diverged", OVER)
"""Statuses that answer a sweeper's question; others are failures of the run."""


def run_proposed(composed: CommandLine, chosen: Sequence[str] | None, kind: Callable[..., Sweep], here: bool) -> int:
    """Runs the sweep, and prints its table and what the sweeper found. Returns the exit code: 0 if all trials answered
    the sweeper (not fitting counts as an answer); otherwise 1; 130 if the user stopped it. Raises RefusedError.

    `kind`: makes a sweep from a reporter. `here`: cells run on this machine and must fit into its memory.
    """
    account: dict[str, Any] = {}
    refused: RefusedError | None = None
    with Reporter() as reporter:
        training = ParityCheck()
        cells = kind(reporter, check=training)
        trials = Trials(cells, composed.objectives, here, _limit_of(composed))
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
    differs = any(row["training"] == DIFFERS for row in cells.rows)
    failed = any(status not in ANSWERS for status in counts)
    return int(bool(failed or differs or cells.unwritten or cells.failed_fast or not account))


def _limit_of(composed: CommandLine) -> int | None:
    limits = [word for word in composed.fixed if word.startswith(LIMIT)]
    limit = composed.composer.config_of([*composed.own, *limits]).search.memory_limit
    try:
        return None if limit is None else parse_memory(limit)
    except ValueError as error:
        raise RefusedError([f"search.memory_limit: {error}"]) from None


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

    def _judge(self, cell: Cell, rows: list[dict[str, Any]]) -> None:
        """Takes the values of a cell, summarized over launches as in tables."""
        row: dict[str, Any] = summarize(frame_of(rows, RunRow)).to_dict("records")[0]  # type: ignore[assignment]
        over = row["status"] == "ok" and self.limit_bytes is not None and used_bytes(row) > self.limit_bytes
        self.statuses[cell.cell_id] = status = OVER if over else row["status"]
        if status != "ok":
            self.values[cell.cell_id] = [objective.worst for objective in self.objectives]
            return
        if lacking := [objective.column for objective in self.objectives if pd.isna(row[objective.column])]:
            simulated = row["backend"] == "simulated"
            why = "a simulated world has no times and no losses" if simulated else "measure.passes=both measures all"
            raise RefusedError([f"{OBJECTIVE}={lacking[0]}: a run has no such figure; {why}"])
        self.values[cell.cell_id] = [objective.value_of(row) for objective in self.objectives]
