"""Sections: cells for the harness or tasks of their own, and the table that they make. They are run against the clock,
and the results are written to the suite's folder as they come.

Cells are the harness's (sweep.py). Each pass of a cell may take half of the remaining time, or all of it where it is
the only one; no cell is started in the last seconds, and those that were not started are listed. A run that is cut
short keeps its finished parts:

summary.md        the short table so far
suite.json        the table with every launch: status, reason, seconds, its run's folder, a task's result
runs/SECTION/     the runs' own folders
*.parquet         all runs as one collection, which zerobench.load(FOLDER) reads
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from zerobench.config.cell import Cell, CellConfig
from zerobench.config.compose import compose_cells
from zerobench.host.files import read_text, replace_text
from zerobench.host.temporary import temporary_folder
from zerobench.ranks.rank_main import Worker
from zerobench.ranks.start_ranks import LaunchError, launch
from zerobench.results import tables
from zerobench.results.provenance import machine, source_hash
from zerobench.sections import known
from zerobench.sweep.cell import pass_names
from zerobench.sweep.progress import Reporter
from zerobench.sweep.sweep import Sweep, rounds

WAITING, NOT_RUN = "waiting", "not run"
"""Besides the statuses of a RunRow: not yet reached, and no time was left."""

OURS = "zero1,zero2,zero3"
NONE = "–"


@dataclass(frozen=True)
class SuiteSetup:
    """`device`: cuda or cpu. `small`: tiny models and few steps."""

    out: Path
    device: str
    small: bool

    def cells(self, section: str, *overrides: str) -> list[Cell]:
        """The cells of a sweep, as a user would type it, that write to this section's folder."""
        cells = compose_cells(["-m", *overrides, f"device={self.device}"])
        return [cell.changed(results_dir=str(self.folder(section))) for cell in cells]

    def folder(self, section: str) -> Path:
        """Returns the folder of a section's runs."""
        return self.out / "runs" / section


@dataclass(frozen=True)
class SuiteTask:
    """Ranks that are no cell: one for each of `jobs`. The result is rank 0's."""

    name: str
    worker: Worker
    jobs: list[Any]
    limit_s: float


@dataclass
class SuiteLaunch:
    """`row`: a RunRow of a cell's launch. `result`: what a task found."""

    name: str
    config: CellConfig | None = None
    """Run of a cell; None for a task."""
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
        """True if it has a usable result."""
        return self.status == "ok"

    @property
    def message(self) -> str:
        """The status, with the reason if there is one."""
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
    """`asks`: the question in a sentence. `like`: launches of RECORDED that take as long: section, pattern of names,
    how many times. `answers`: how a launch may end so that the question is answered. `may_fail`: whether nothing is
    wrong if this one does not run. `limit_s`: most that a pass of a cell may take.
    """

    name: str
    title: str
    asks: str
    like: tuple[tuple[str, str, float], ...]
    table: Callable[[SuiteSetup, list[SuiteLaunch]], SuiteTable]
    cells: Callable[[SuiteSetup], list[Cell]] = lambda _: []
    tasks: Callable[[SuiteSetup], list[SuiteTask]] = lambda _: []
    answers: tuple[str, ...] = ("ok",)
    may_fail: Callable[[SuiteLaunch], bool] = lambda _: False
    limit_s: float = 60.0

    @property
    def expected_s(self) -> int:
        """Seconds of its launches on an H100, rounded up."""
        total = 0.0
        for section, pattern, times in self.like:
            found = [cell["seconds"] for cell in recorded()[section]["cells"] if re.search(pattern, cell["name"])]
            total += times * sum(found)
        return math.ceil(total)


RECORDED = Path(__file__).parents[2] / "results/h100/suite.json"
"""The suite of an H100, whose launches say how long a launch takes."""


@cache
def recorded() -> dict[str, Any]:
    """Returns the sections of the recorded suite."""
    return dict(json.loads(read_text(RECORDED))["sections"])


def rows_of(
    done: Sequence[SuiteLaunch], show: Callable[[SuiteLaunch], list[list[str]]],
    name: Callable[[SuiteLaunch], str] = lambda launch: launch.name,
) -> list[list[str]]:  # fmt: skip
    """Returns the rows that `show` makes of each launch that is ok; of another one its name and status."""
    return [row for launch in done for row in (show(launch) if launch.is_ok else [[name(launch), launch.message]])]


def shorter(done: Sequence[SuiteLaunch]) -> tuple[dict[str, str], list[str]]:
    """Names less the words that all of them have, and a note with these."""
    names = [one.name.split() for one in done]
    common = [word for word in names[0] if all(word in other for other in names)] if len(names) > 1 else []
    short = {one.name: " ".join(w for w in name if w not in common) for one, name in zip(done, names, strict=True)}
    return short, [f"all: {' '.join(common)}"] if common else []


# -- the record ----------------------------------------------------------------------------------------------

Told = dict[str, Any]
"""A section in suite.json: title, asks, cells, table."""

TRIED = ("code", "torch", "device_class", "small")
"""Fields of suite.json that must agree for an earlier suite's results to count."""


class SuiteRecord:
    """The record. `sections`: results so far, including those of an earlier, cut suite in this folder."""

    def __init__(self, setup: SuiteSetup, order: Iterable[str]) -> None:
        self.setup = setup
        self.order = list(order)
        setup.out.mkdir(parents=True, exist_ok=True)
        where = machine(setup.device, "gloo")
        self.about = {
            "code": source_hash("gpt"), "torch": where["versions"]["torch"], "device_class": where["device_class"],
            "small": setup.small, "began": datetime.now(UTC).isoformat(timespec="seconds"), "machine": where,
        }  # fmt: skip
        earlier = _read(setup.out / "suite.json")
        alike = all(earlier.get("about", {}).get(key) == self.about[key] for key in TRIED)
        self.sections: dict[str, Told] = earlier["sections"] if alike else {}
        self._runs = tables.merge(
            [tables.load(folder) for folder in sorted(setup.out.glob("runs/*")) if folder.is_dir()]
        )

    def add_run(self, run: Path) -> None:
        """Adds a new or reused run to the collection."""
        if run.name not in set(self._runs.runs["run_id"]):
            self._runs = tables.merge([self._runs, tables.load(run)])
            tables.collect(self._runs, self.setup.out)

    def write(self, section: SuiteSection, done: list[SuiteLaunch], table: SuiteTable) -> None:
        """Replaces the results of a section."""
        rows = [[*row, *[NONE] * (len(table.header) - len(row))] for row in table.rows]
        self.sections[section.name] = {
            "title": section.title, "asks": section.asks, "cells": [_told(one) for one in done],
            "table": {"header": table.header, "rows": rows, "notes": table.notes}, "differs": table.differs,
        }  # fmt: skip
        ordered = {name: self.sections[name] for name in self.order if name in self.sections}
        text = json.dumps({"about": self.about, "sections": ordered}, indent=1)
        replace_text(self.setup.out / "suite.json", text + "\n")
        replace_text(self.setup.out / "summary.md", markdown(self.about, ordered))


def _told(one: SuiteLaunch) -> Told:
    told = {"name": one.name, "status": one.status, "reason": one.reason, "seconds": round(one.seconds, 3)}
    told |= {"reused": one.reused, "run_id": one.row["run_id"] if one.row else None}
    return told | ({"result": one.result} if one.result is not None else {})


def _read(path: Path) -> dict[str, Any]:
    """Reads an earlier suite.json; empty if there is none, or it is incomplete."""
    try:
        found = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and "sections" in found else {}


def markdown(about: Told, sections: dict[str, Told]) -> str:
    """Formats the short table, one part per section."""
    where = about["machine"]
    lines = [
        "# The GPU suite",
        "",
        f"{about['device_class']}; {where['processor']}, {where['cores']} cores; torch {about['torch']}, began"
        f" {about['began']}; `{where['command']}`, commit {where['commit'] or 'unknown'}",
    ]
    for told in sections.values():
        header, rows = told["table"]["header"], told["table"]["rows"]
        lines += ["", f"## {told['title']}", "", told["asks"], ""]
        lines += ["| " + " | ".join(header) + " |", "| --- |" + " --: |" * (len(header) - 1)]
        lines += ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows]
        words = [*told["table"]["notes"], *(f"**{sentence}**" for sentence in told["differs"])]
        lines += ["", *(f"- {one}" for one in words)] if words else []
        waiting = sum(cell["status"] == WAITING for cell in told["cells"])
        lines += ["", f"Still to come: {waiting}."] if waiting else []
    return "\n".join(lines) + "\n"


# -- the run -------------------------------------------------------------------------------------------------

TOO_LATE = "the time was over"
LEAST_S = 5.0
"""Seconds below which nothing is started."""


@dataclass(frozen=True)
class Deadline:
    """`end`: on the monotonic clock."""

    end: float

    @property
    def left_s(self) -> float:
        """Seconds to the end, below 0 after it."""
        return self.end - time.monotonic()

    @property
    def is_near(self) -> bool:
        """True if nothing more must be started."""
        return self.left_s < LEAST_S


@dataclass
class GpuSuite:
    """The state of a run. `done`: section -> its launches and tasks."""

    setup: SuiteSetup
    record: SuiteRecord
    deadline: Deadline
    done: dict[str, list[SuiteLaunch]] = field(default_factory=dict)
    differs: list[str] = field(default_factory=list)
    stopped: bool = False

    def run(self, section: SuiteSection) -> None:
        """Runs a section as far as time permits. Sets `stopped` where the user interrupted."""
        print(f"{section.title}: {section.asks}", file=sys.stderr)
        if self.deadline.is_near:  # results of an earlier suite in this folder stay
            done = self.done[section.name] = [SuiteLaunch("all of it", status=NOT_RUN, reason=TOO_LATE)]
            if section.name not in self.record.sections:
                rows = [[one.name, one.message] for one in done]
                self.record.write(section, done, SuiteTable(["cell", "status"], rows))
            return
        try:
            self._run_tasks(section, section.tasks(self.setup))
            self._run_cells(section)
        except KeyboardInterrupt:
            self.stopped = True
        if self.done.get(section.name):
            self.differs += [f"{section.name}: {words}" for words in self._write(section)]

    def _write(self, section: SuiteSection) -> list[str]:
        done = self.done[section.name]
        table = section.table(self.setup, done)
        self.record.write(section, done, table)
        return table.differs

    def _run_tasks(self, section: SuiteSection, tasks: list[SuiteTask]) -> None:
        self.done[section.name] = [SuiteLaunch(task.name) for task in tasks]
        kept = self.record.sections.get(section.name, {}).get("cells", [])  # of an earlier suite in this folder
        known = {cell["name"]: cell for cell in kept}
        for number, (task, one) in enumerate(zip(tasks, self.done[section.name], strict=True)):
            if (earlier := known.get(task.name)) and earlier["status"] in section.answers:
                one.status, one.reason, one.seconds = earlier["status"], earlier["reason"], earlier["seconds"]
                one.result, one.reused = earlier.get("result"), True
            elif self.deadline.is_near:
                one.status, one.reason = NOT_RUN, TOO_LATE
            else:
                self._run_task(task, one)
            how = "reused an earlier run" if one.reused else f"{one.seconds:.1f} s"
            print(f"[{number + 1}/{len(tasks)}] {one.name}: {one.message}, {how}", file=sys.stderr)
            self._write(section)

    def _run_task(self, task: SuiteTask, one: SuiteLaunch) -> None:
        begun = time.monotonic()
        with temporary_folder() as folder:
            try:
                results = launch(task.worker, task.jobs, folder / "logs", min(task.limit_s, self.deadline.left_s))
                one.status, one.reason, one.result = "ok", "", results[0]
            except LaunchError as error:
                one.status, one.reason = error.status, error.reason
        one.seconds = time.monotonic() - begun

    def _run_cells(self, section: SuiteSection) -> None:
        cells = section.cells(self.setup)
        if not cells:
            return
        with Reporter() as reporter:
            sweep, launches = Sweep(reporter, answers=section.answers), list(rounds(cells))
            reporter.expect(launches)
            mine = [SuiteLaunch(each.name, each.config) for each in launches]
            self.done[section.name] += mine  # behind the tasks
            failed = set[str]()
            for each, one in zip(launches, mine, strict=True):
                if one.name in failed or self.deadline.is_near:
                    one.status, one.reason = ("skipped", "") if one.name in failed else (NOT_RUN, TOO_LATE)
                    reporter.skip(each)
                else:
                    self._run_cell(section, sweep, each, one)
                if not one.is_ok:
                    failed.add(one.name)
                self._write(section)
                if sweep.stopped:
                    raise KeyboardInterrupt

    def _run_cell(self, section: SuiteSection, sweep: Sweep, each: Cell, one: SuiteLaunch) -> None:
        share = self.deadline.left_s / len(pass_names(each.config))  # each pass has a share of the time left
        limit = replace(each.config.launch, timeout_s=round(min(section.limit_s, share), 1))
        limited = each.changed(launch=limit)
        sweep.reporter.replace(each, limited)
        row = sweep.run_one(limited)
        if row is None:
            one.status, one.reason = "interrupted", "stopped by the user"
            return
        one.row, one.status, one.reason, one.seconds = vars(row), row.status, row.reason, row.seconds
        one.reused = sweep.reused
        if one.status == "timeout" and limit.timeout_s < section.limit_s:
            one.status, one.reason = NOT_RUN, f"{TOO_LATE} after {row.seconds:.0f} s of it"
        self.record.add_run(self.setup.folder(section.name) / row.run_id)
