"""Runs the sections against the clock. Cells are the harness's (sweep.py); finished ones are written at once.

Each pass of a cell may take half of the remaining time, or all of it where it is the only one; no cell is started in
the last seconds, and those that were not started are listed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ...host.temporary import temporary_folder
from ...launch.start_ranks import launch
from ...sweep.cell import passes_of
from ...sweep.progress import Reporter
from ...sweep.sweep import CellLaunch, Sweep, rounds
from .record import Record
from .section import NOT_RUN, Done, Section, Setup, Table, Task

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
        """True where nothing more must be started."""
        return self.left_s < LEAST_S


@dataclass
class Suite:
    """The state of a run. `done`: section -> its launches and tasks."""

    setup: Setup
    record: Record
    deadline: Deadline
    done: dict[str, list[Done]] = field(default_factory=dict)
    differs: list[str] = field(default_factory=list)
    stopped: bool = False

    def run(self, section: Section) -> None:
        """Runs a section as far as time permits. Sets `stopped` where the user interrupted."""
        print(f"{section.title}: {section.asks}", file=sys.stderr)
        if self.deadline.is_near:
            self._leave_out(section)
            return
        try:
            self._run_tasks(section, section.tasks(self.setup))
            self._run_cells(section)
        except KeyboardInterrupt:
            self.stopped = True
        if self.done.get(section.name):
            self.differs += [f"{section.name}: {words}" for words in self._write(section)]

    def _leave_out(self, section: Section) -> None:
        """Keeps the results of an earlier suite in this folder for a section that is not run."""
        done = self.done[section.name] = [Done("all of it", status=NOT_RUN, reason=TOO_LATE)]
        if section.name not in self.record.sections:
            self.record.write(section, done, Table(["cell", "status"], [[one.name, one.words] for one in done]))

    def _write(self, section: Section) -> list[str]:
        done = self.done[section.name]
        table = section.table(self.setup, done)
        self.record.write(section, done, table)
        return table.differs

    def _run_tasks(self, section: Section, tasks: list[Task]) -> None:
        self.done[section.name] = [Done(task.name) for task in tasks]
        known = [self.record.earlier(section.name, task.name) for task in tasks]  # before it is written anew
        for number, (task, one, earlier) in enumerate(zip(tasks, self.done[section.name], known, strict=True)):
            if earlier is not None and earlier["status"] in section.answers:
                one.status, one.reason, one.seconds = earlier["status"], earlier["reason"], earlier["seconds"]
                one.result, one.reused = earlier.get("result"), True
            elif self.deadline.is_near:
                one.status, one.reason = NOT_RUN, TOO_LATE
            else:
                self._run_task(task, one)
            how = "reused an earlier run" if one.reused else f"{one.seconds:.1f} s"
            print(f"[{number + 1}/{len(tasks)}] {one.name}: {one.words}, {how}", file=sys.stderr)
            self._write(section)

    def _run_task(self, task: Task, one: Done) -> None:
        begun = time.monotonic()
        with temporary_folder() as folder:
            jobs = task.jobs(f"{folder}/rendezvous")
            outcome = launch(task.worker, jobs, folder / "logs", min(task.limit_s, self.deadline.left_s))
        one.status, one.reason, one.seconds = outcome.status, outcome.reason, time.monotonic() - begun
        one.result = outcome.results[0] if outcome.results else None

    def _run_cells(self, section: Section) -> None:
        cells = section.cells(self.setup)
        if not cells:
            return
        with Reporter() as reporter:
            sweep, launches = Sweep(reporter, answers=section.answers), list(rounds(cells))
            reporter.expect(launches)
            mine = [Done(each.name, each.cell.config) for each in launches]
            self.done[section.name] += mine  # behind the tasks
            for each, one in zip(launches, mine, strict=True):
                spoilt = next((d for d in self._before(section, one) if d.name == one.name and not d.is_ok), None)
                if spoilt is not None or self.deadline.is_near:
                    one.status, one.reason = (NOT_RUN, TOO_LATE) if spoilt is None else ("skipped", "")
                    reporter.skip(each)
                else:
                    limited = self._limited(section, each)
                    reporter.replace(each, limited)
                    self._run_cell(section, sweep, limited, one)
                self._write(section)
                if sweep.stopped:
                    raise KeyboardInterrupt

    def _before(self, section: Section, one: Done) -> Iterator[Done]:
        """Yields the launches before it."""
        for other in self.done[section.name]:
            if other is one:
                return
            yield other

    def _limited(self, section: Section, each: CellLaunch) -> CellLaunch:
        """Returns a launch whose passes have the time that is left for them."""
        share = self.deadline.left_s / len(passes_of(each.cell.config))
        limit = round(min(section.limit_s, share), 1)
        launch = replace(each.cell.config.launch, timeout_s=limit)
        return replace(each, cell=each.cell.changed(launch=launch))

    def _run_cell(self, section: Section, sweep: Sweep, each: CellLaunch, one: Done) -> None:
        row = sweep.run_one(each)
        if row is None:
            one.status, one.reason = "interrupted", "stopped by the user"
            return
        one.row, one.status, one.reason, one.seconds = row, row["status"], row["reason"], row["seconds"]
        one.reused = sweep.reused
        if one.status == "timeout" and each.cell.config.launch.timeout_s < section.limit_s:
            one.status, one.reason = NOT_RUN, f"{TOO_LATE} after {row['seconds']:.0f} s of it"
        self.record.add_run(self.setup.folder(section.name), row["run_id"])
