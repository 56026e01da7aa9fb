"""Runs the cells of a sweep, launch by launch, and collects their rows.

Repeats are rounds: all cells once, then all again (A B C A B C), so that a drift of the machine over an hour affects
every cell alike. Finished launches are kept: one that an earlier sweep has measured is reused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ..config.cell import Cell
from ..config.names import name_cells
from ..host.signals import heed
from ..results.rescue import Unwritten
from .cell import StoppedError, find_or_run
from .parity_check import ParityCheck
from .reuse import find_reusable


@dataclass(frozen=True)
class CellLaunch:
    """One launch of a cell. `name` distinguishes the cell from the others of its sweep."""

    name: str
    cell: Cell
    repeat: int


@dataclass
class Sweep:
    """A sweep. `rows`: of the launches so far, in order. `stopped`: interrupted by Ctrl-C; the rows until then are
    complete.

    `answers`: statuses with which an earlier launch is reused. `check`: compares the training with DDP.
    """

    reporter: Any
    answers: tuple[str, ...] = ("ok",)
    check: ParityCheck | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    stopped: bool = False
    failed_fast: bool = False
    unwritten: list[Unwritten] = field(default_factory=list)
    """Runs that are not in their results folder."""
    reused: bool = False
    """True where the last row is of an earlier run."""

    def run(self, cells: list[Cell], first: int = 0) -> None:
        """Runs or reuses every launch of `cells`, numbered from `first`; no failure of a cell is raised."""
        launches = list(rounds(cells, first))
        self.reporter.expect(launches, lambda one: find_reusable(one.cell, one.repeat, self.answers) is not None)
        spoilt: set[int] = set()
        for launch in launches:
            if self.stopped or self.failed_fast:
                return
            if id(launch.cell) in spoilt:
                self.reporter.skip(launch)
                continue
            row = self.run_one(launch)
            if row is not None and row["status"] != "ok":
                spoilt.add(id(launch.cell))
                self.failed_fast = launch.cell.config.fail_fast

    def run_one(self, launch: CellLaunch) -> dict[str, Any] | None:
        """Returns the row of one launch, reused or new; None where the user stopped it before it had one."""
        self.reporter.start(launch)
        self.reused = False
        progress, wait = self.reporter.progress, self.reporter.wait
        try:
            heed()
            row, self.reused = find_or_run(
                launch.cell, progress, launch.repeat, self.answers, wait, self.unwritten.append
            )
        except StoppedError as stop:
            self.stopped, row = True, asdict(stop.row)
        except KeyboardInterrupt:
            self.stopped = True
            return None
        self.rows.append(row)
        if self.check is not None:
            self.check.see(launch.cell, row)
        self.reporter.end(row, reused=self.reused)
        return row


def rounds(cells: list[Cell], first: int = 0) -> Iterator[CellLaunch]:
    """Yields launches in order. An invalid cell is launched once, for its row."""
    names = name_cells([cell.config for cell in cells])
    repeats = [1 if cell.problems else cell.config.measure.repeats for cell in cells]
    for repeat in range(max(repeats, default=0)):
        for name, cell, wanted in zip(names, cells, repeats, strict=True):
            if repeat < wanted:
                yield CellLaunch(name, cell, first + repeat)
