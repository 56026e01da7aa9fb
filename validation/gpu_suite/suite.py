"""Sections: cells for the harness or tasks of their own, and the table that they make. They are run against the clock,
and the results are written to the suite's folder as they come.

Cells are the harness's (sweep.py). Each pass of a cell may take half of the remaining time, or all of it where it is
the only one; no cell is started in the last seconds, and those that were not started are listed. A run that is cut
short keeps its finished parts:

summary.md        the short table so far
suite.json        the table with every launch: status, reason, seconds, its run's folder, a task's result
runs/SECTION/     the runs' own folders
*.parquet         all runs as one collection, which zerobench.load(FOLDER) reads, after each section
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from zerobench.config.cell import Cell, CellConfig
from zerobench.config.compose import compose_cells
from zerobench.host.files import read_text, replace_text
from zerobench.host.temporary import temporary_folder
from zerobench.ranks.rank_main import Worker
from zerobench.ranks.start_ranks import LaunchError, launch
from zerobench.results import tables
from zerobench.results.grid import Grid
from zerobench.results.provenance import machine, source_hash
from zerobench.sections import known
from zerobench.sweep.cell import pass_names
from zerobench.sweep.parity import ParityCheck
from zerobench.sweep.progress import Reporter
from zerobench.sweep.sweep import Sweep, rounds

WAITING, NOT_RUN, TOO_LATE = "waiting", "not run", "the time was over"
"""Besides the statuses of a RunRow: not yet reached, and no time was left, with its reason."""

LEAST_S = 5.0
"""Seconds below which nothing is started."""

NONE = "–"


@dataclass(frozen=True)
class SuiteSetup:
    """`device`: cuda or cpu. `small`: tiny models and few steps."""

    out: Path
    device: str
    small: bool


@dataclass(frozen=True)
class SuiteTask:
    """A process that runs no cell: `worker` with `job`."""

    name: str
    worker: Worker
    job: Any
    limit_s: float


@dataclass
class SuiteLaunch:
    """`config`, `row`: of a cell's launch, with its RunRow; None for a task. `result`: what a task found."""

    name: str
    config: CellConfig | None = None
    status: str = WAITING
    reason: str = ""
    seconds: float = 0.0
    reused: bool = False
    row: dict[str, Any] | None = None
    result: Any = None

    @property
    def cell(self) -> CellConfig:
        """The config of a launch that is a cell's."""
        return known(self.config)

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"

    @property
    def message(self) -> str:
        return f"{self.status}: {self.reason}" if self.reason else self.status


@dataclass(frozen=True)
class SuiteTable:
    """`rows` of text below `header`; dashes fill up a short one. `differs`: sentences on what is not as it must be; one
    fails the suite.
    """

    header: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SuiteSection:
    """`asks`: the question in a sentence. `about_s`: seconds on an H100. `sweeps`: cells, as a user would type them, or
    `small` ones. `answers`: how a launch may end so that the question is answered. `may_fail`: whether nothing is wrong
    if this one does not run. `limit_s`: most that a pass of a cell may take.
    """

    name: str
    title: str
    asks: str
    about_s: int
    table: Callable[[SuiteSetup, list[SuiteLaunch]], SuiteTable]
    sweeps: tuple[str, ...] = ()
    small: tuple[str, ...] = ()
    tasks: Callable[[SuiteSetup], list[SuiteTask]] = lambda _: []
    answers: tuple[str, ...] = ("ok",)
    may_fail: Callable[[SuiteLaunch], bool] = lambda _: False
    limit_s: float = 60.0

    def cells(self, setup: SuiteSetup) -> list[Cell]:
        """The cells, which write to this section's folder."""
        sweeps = self.small if setup.small else self.sweeps
        cells = [cell for sweep in sweeps for cell in compose_cells(["-m", *sweep.split(), f"device={setup.device}"])]
        return [cell.changed(results_dir=str(setup.out / "runs" / self.name)) for cell in cells]


def rows_of(done: Sequence[SuiteLaunch], show: Callable[[SuiteLaunch], list[list[str]]]) -> list[list[str]]:
    """Returns the rows that `show` makes of each launch that is ok; of another one its name and status."""
    return [row for launch in done for row in (show(launch) if launch.is_ok else [[launch.name, launch.message]])]


# -- the run -------------------------------------------------------------------------------------------------

TRIED = ("code", "torch", "device_class", "small")
"""Fields of suite.json that must agree for an earlier suite's results to count."""


class GpuSuite:
    """A run until `end` on the monotonic clock. `sections`: results so far as in suite.json, including those of an
    earlier, cut suite in this folder; `done`: section -> its launches and tasks.
    """

    def __init__(self, setup: SuiteSetup, order: Sequence[str], end: float) -> None:
        self.setup, self.order, self.end = setup, order, end
        self.done: dict[str, list[SuiteLaunch]] = {}
        self.differs: list[str] = []
        self.stopped = False
        where = machine(setup.device, "nccl" if setup.device == "cuda" else "gloo")
        self.about = {
            "code": source_hash("gpt"), "torch": where["versions"]["torch"], "device_class": where["device_class"],
            "small": setup.small, "began": datetime.now(UTC).isoformat(timespec="seconds"), "machine": where,
        }  # fmt: skip
        earlier = _read(setup.out / "suite.json")
        is_alike = all(earlier.get("about", {}).get(key) == self.about[key] for key in TRIED)
        self.sections: dict[str, dict[str, Any]] = earlier["sections"] if is_alike else {}

    def run(self, section: SuiteSection) -> None:
        """Runs a section as far as time permits. Sets `stopped` if the user interrupts."""
        print(f"{section.title}: {section.asks} About {section.about_s} s on an H100", file=sys.stderr)
        if self.is_late:  # results of an earlier suite in this folder stay
            skipped = SuiteLaunch("all of it", status=NOT_RUN, reason=TOO_LATE)
            self.done[section.name] = [skipped]
            if section.name not in self.sections:
                self._write(section, SuiteTable(["cell", "status"], [[skipped.name, skipped.message]]))
            return
        self.done[section.name] = []
        try:
            self._run_tasks(section, section.tasks(self.setup))
            self._run_cells(section, section.cells(self.setup))
        except KeyboardInterrupt:
            self.stopped = True
        if self.done[section.name]:
            self.differs += [f"{section.name}: {sentence}" for sentence in self._write(section).differs]
        if folders := [folder for folder in sorted(self.setup.out.glob("runs/*")) if folder.is_dir()]:
            tables.collect(tables.merge([tables.load(folder) for folder in folders]), self.setup.out)

    @property
    def left_s(self) -> float:
        """Seconds to the end, below 0 after it."""
        return self.end - time.monotonic()

    @property
    def is_late(self) -> bool:
        return self.left_s < LEAST_S

    def _run_tasks(self, section: SuiteSection, tasks: list[SuiteTask]) -> None:
        done = self.done[section.name] = [SuiteLaunch(task.name) for task in tasks]
        earlier = {cell["name"]: cell for cell in self.sections.get(section.name, {}).get("cells", [])}
        for task, one in zip(tasks, done, strict=True):
            if (kept := earlier.get(task.name)) and kept["status"] in section.answers:
                one.status, one.reason, one.seconds = kept["status"], kept["reason"], kept["seconds"]
                one.result, one.reused = kept.get("result"), True
            elif self.is_late:
                one.status, one.reason = NOT_RUN, TOO_LATE
            else:
                begun = time.monotonic()
                with temporary_folder() as folder:
                    try:
                        (one.result,) = launch(task.worker, [task.job], folder / "logs", min(task.limit_s, self.left_s))
                        one.status = "ok"
                    except LaunchError as error:
                        one.status, one.reason = error.status, error.reason
                one.seconds = time.monotonic() - begun
            print(f"{one.name}: {one.message}, {one.seconds:.1f} s{', reused' * one.reused}", file=sys.stderr)
            self._write(section)

    def _run_cells(self, section: SuiteSection, cells: list[Cell]) -> None:
        if not cells:
            return
        with Reporter() as reporter:
            sweep = Sweep(reporter, answers=section.answers, check=(check := ParityCheck()))
            launches = list(rounds(cells))
            reporter.expect(launches)
            done = [SuiteLaunch(cell.name, cell.config) for cell in launches]
            self.done[section.name] += done  # behind the tasks
            failed = set[str]()
            for cell, one in zip(launches, done, strict=True):
                if one.name in failed or self.is_late:
                    one.status, one.reason = ("skipped", "") if one.name in failed else (NOT_RUN, TOO_LATE)
                    reporter.skip(cell)
                else:
                    self._run_cell(section, sweep, cell, one)
                if not one.is_ok:
                    failed.add(one.name)
                self._write(section)
                if sweep.stopped:
                    raise KeyboardInterrupt
            check.finish(False, lambda _: None)

    def _run_cell(self, section: SuiteSection, sweep: Sweep, cell: Cell, one: SuiteLaunch) -> None:
        share = self.left_s / len(pass_names(cell.config))  # each pass has a share of the time left
        limit = replace(cell.config.launch, timeout_s=round(min(section.limit_s, share), 1))
        limited = cell.changed(launch=limit)
        sweep.reporter.replace(cell, limited)
        row = sweep.run_one(limited)
        if row is None:
            one.status, one.reason = "interrupted", "stopped by the user"
            return
        one.row, one.status, one.reason, one.seconds = vars(row), row.status, row.reason, row.seconds
        one.reused = sweep.reused
        if one.status == "timeout" and limit.timeout_s < section.limit_s:
            one.status, one.reason = NOT_RUN, f"{TOO_LATE} after {row.seconds:.0f} s of it"

    def _write(self, section: SuiteSection, table: SuiteTable | None = None) -> SuiteTable:
        """Replaces the results of a section, by default with the table of its launches so far. Returns the table."""
        done = self.done[section.name]
        table = table or section.table(self.setup, done)
        rows = [[*row, *[NONE] * (len(table.header) - len(row))] for row in table.rows]
        cells = [
            {"name": one.name, "status": one.status, "reason": one.reason, "seconds": round(one.seconds, 3),
             "reused": one.reused, "run_id": one.row["run_id"] if one.row else None,
             **({} if one.result is None else {"result": one.result})}
            for one in done
        ]  # fmt: skip
        self.sections[section.name] = {
            "title": section.title, "asks": section.asks, "cells": cells,
            "table": {"header": table.header, "rows": rows, "notes": table.notes}, "differs": table.differs,
        }  # fmt: skip
        self.sections = {name: self.sections[name] for name in self.order if name in self.sections}
        text = json.dumps({"about": self.about, "sections": self.sections}, indent=1)
        replace_text(self.setup.out / "suite.json", text + "\n")
        replace_text(self.setup.out / "summary.md", self.markdown(self.order))
        return table

    def markdown(self, names: Sequence[str]) -> str:
        where = self.about["machine"]
        lines = [
            f"# The GPU suite\n\n{self.about['device_class']}; {where['processor']}, {where['cores']} cores;"
            f" torch {self.about['torch']}, began {self.about['began']}; `{where['command']}`,"
            f" commit {where['commit'] or 'unknown'}\n"
        ]
        for section in (self.sections[name] for name in names if name in self.sections):
            table = section["table"]
            lines += [f"## {section['title']}\n\n{section['asks']}\n", Grid(table["header"], table["rows"]).markdown()]
            notes = [*table["notes"], *(f"**{sentence}**" for sentence in section["differs"])]
            waiting = sum(cell["status"] == WAITING for cell in section["cells"])
            notes += [f"Still to come: {waiting}."] * bool(waiting)
            lines += ["".join(f"- {note}\n" for note in notes)] * bool(notes)
        return "\n".join(lines)


def _read(path: Path) -> dict[str, Any]:
    """Reads an earlier suite.json; empty if there is none, or it is incomplete."""
    try:
        earlier = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return earlier if isinstance(earlier, dict) and "sections" in earlier else {}
