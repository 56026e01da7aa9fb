"""Runs the cells of a sweep, launch by launch, and collects their rows.

Repeats are rounds: all cells once, then all again (A B C A B C), so that a drift of the machine over an hour affects
all cells equally. Finished launches are kept: a launch measured by an earlier sweep is reused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ..config.cell import Cell
from ..config.flat import name_cells
from ..host.job import report_row
from ..host.signals import raise_if_interrupted
from ..records import RunRow, SearchRow
from ..results.folders import Unwritten
from .cell import StoppedError, find_or_run, find_reusable
from .parity import ParityCheck, run_here


@dataclass
class Sweep:
    """A sweep. `rows`: of the launches so far, in order. `stopped`: interrupted by Ctrl-C; rows until then are
    complete.

    `answers`: statuses with which an earlier launch is reused. `check`: compares the training with DDP.
    """

    reporter: Any
    answers: tuple[str, ...] = ("ok",)
    check: ParityCheck | None = None
    rows: list[RunRow] = field(default_factory=list)
    stopped: bool = False
    failed_fast: bool = False
    unwritten: list[Unwritten] = field(default_factory=list)
    """Runs that could not be written to their results folder."""
    reused: bool = False
    """Whether the last row was reused from an earlier run."""
    by_cell: dict[str, list[RunRow]] = field(default_factory=dict)
    """Id of a cell -> rows of its launches."""
    runs_searches: ClassVar[bool] = False
    """Whether `run` runs a search as a whole, in a job."""
    searches: list[SearchRow] = field(default_factory=list)
    """Results of such searches."""
    combinations: list[RunRow] = field(default_factory=list)
    """Rows of the combinations that such searches tried."""

    def run(self, cells: list[Cell], first: int = 0, names: Sequence[str] | None = None) -> None:
        """Runs or reuses every launch of `cells`, numbered from `first`; a failing cell raises nothing. `names`: names
        of the cells; None: names that distinguish them.
        """
        spoilt: set[int] = set()
        for launch, reusable in self.expect(cells, first, names):
            if self.stopped or self.failed_fast:
                return
            if id(launch.config) in spoilt:  # an earlier launch of the same cell failed
                self.reporter.skip(launch)
                continue
            row = self.run_one(launch) if reusable is None else self.reuse(launch, reusable)
            if row is not None and row.status != "ok":
                spoilt.add(id(launch.config))
                self.failed_fast = launch.config.fail_fast and not self.stopped

    def expect(self, cells: list[Cell], first: int, names: Sequence[str] | None) -> list[tuple[Cell, RunRow | None]]:
        """Returns the launches in order, each with the row of an earlier run that it reuses."""
        launches = {launch: self.find(launch) for launch in rounds(cells, first, names)}
        self.reporter.expect(list(launches), lambda launch: launches[launch] is not None)
        return list(launches.items())

    def find(self, launch: Cell) -> RunRow | None:
        """Returns the row of an earlier run of this launch, or None."""
        return find_reusable(launch, self.answers)

    def reuse(self, launch: Cell, row: RunRow) -> RunRow:
        """Takes the row of an earlier run."""
        self.reporter.start(launch)
        self.reused = True
        self.take(launch, row)
        self.reused = False
        return row

    def run_one(self, launch: Cell) -> RunRow | None:
        """Returns the row of one launch, reused or new; None if the user stopped it before it had a row."""
        self.reporter.start(launch)
        row = self._attempt(launch)
        retries, policy = 0, launch.config.launch
        while row is not None and not self.stopped and row.status in policy.retry and retries < policy.retries:
            retries += 1
            self.reporter.again(launch, row)
            row = self._attempt(launch)
        if row is not None:
            self.take(launch, row)
        return row

    def _attempt(self, launch: Cell) -> RunRow | None:
        """Returns the row; None if the user stopped the launch before it had one."""
        self.reused = False
        try:
            raise_if_interrupted()
            row, self.reused = find_or_run(
                launch, self.reporter.progress, self.answers, self.reporter.wait, self.unwritten.append
            )
            return row
        except StoppedError as stop:
            self.stopped = True
            return stop.row
        except KeyboardInterrupt:
            self.stopped = True
            return None

    def run_apart(self, cell: Cell) -> RunRow:
        """Returns the row of a cell outside the sweep, reused or run where the sweep's cells run. Raises
        KeyboardInterrupt if the user stops it.
        """
        return run_here(cell)

    def take(self, launch: Cell, row: RunRow) -> None:
        """Adds the row of a finished launch."""
        self.rows.append(row)
        report_row(vars(row))
        self.by_cell.setdefault(launch.cell_id, []).append(row)
        if self.check is not None:
            self.check.see(launch, row)
        self.reporter.end(launch, row, reused=self.reused, stopped=self.stopped)


def rounds(cells: list[Cell], first: int = 0, names: Sequence[str] | None = None) -> Iterator[Cell]:
    """Yields launches in order. An invalid cell is launched once, for its row."""
    names = name_cells([cell.config for cell in cells]) if names is None else names
    repeats = [1 if cell.problems else cell.config.measure.repeats for cell in cells]
    for repeat in range(max(repeats, default=0)):
        for name, cell, wanted in zip(names, cells, repeats, strict=True):
            if repeat < wanted:
                yield replace(cell, name=name, repeat=first + repeat)
