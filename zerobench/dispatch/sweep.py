"""A sweep whose launches run in the jobs of a Hydra launcher.

1. reuse      launches finished by an earlier sweep need no job
2. group      a job runs all repeats of a cell or, interleaved, the cells that agree in `launch.group_by`
3. launch     as many jobs as the plugin permits run concurrently, each launched from a thread
4. listen     a job's board is shown here; a row is taken once it is in the job's folder
5. end        if a job ends without a row for a launch, the launch is lost, and the composing process writes its row
6. again      launches to retry (`launch.retry`), and launches that a lost job had not begun, get a new job

States of a job: dispatch/job_folder.py.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from ..cluster import launchers
from ..config.cell import Cell
from ..config.compose import RefusedError
from ..config.flat import base_name
from ..host.signals import heed
from ..results.board import AWAITS, RUNNING, SKIPPED, WAITING
from ..sections import known
from ..sweep.cell import find_elsewhere, write_lost
from ..sweep.sweep import CellLaunch, Sweep, rounds, runs_again
from .job_folder import JobFolder, LauncherJob
from .plugin import NOTE_HERE, Plugin, at_once, groups_of, resources_for
from .slurm import SlurmWatch
from .threads import THREADS
from .watch import Fate, JobWatch

POLL_S = 0.5

STOP_S = 60.0
"""Seconds for jobs to end after Ctrl-C."""

INTERRUPTED = "interrupted"

SAY_EVERY_S = 10.0
"""Seconds between lines about waiting jobs."""


@dataclass
class DispatchedSweep(Sweep):
    """A sweep through `plugin`. `retries`: count per launch. `retried`: a launch's last row until its next attempt
    ends.
    """

    plugin: Plugin = field(kw_only=True)
    retries: Counter[CellLaunch] = field(default_factory=Counter)
    retried: dict[CellLaunch, dict[str, Any]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=partial(count, 1))
    watch: JobWatch = field(init=False)
    _said: tuple[str, float] = ("", 0.0)

    def __post_init__(self) -> None:
        choice = self.plugin.choice
        self.watch = SlurmWatch(choice) if choice.name == "submitit_slurm" else JobWatch(choice)

    def run(self, cells: list[Cell], first: int = 0, names: Sequence[str] | None = None) -> None:
        launches = list(rounds(cells, first, names))
        found = {launch: self._find(launch) for launch in launches}
        self.reporter.expect(launches, lambda one: found[one] is not None)
        self.run_all(launches, found)

    def run_one(self, launch: CellLaunch) -> dict[str, Any] | None:
        before = len(self.rows)
        self.run_all([launch], {launch: self._find(launch)})
        return self.rows[before] if len(self.rows) > before else None

    def run_apart(self, cell: Cell) -> dict[str, Any]:
        launch = CellLaunch(f"{base_name(cell.config)}, for a check", cell, 0)
        self.reporter.expect([launch])
        row = replace(self, check=None, rows=[]).run_one(launch)
        if row is None:
            raise KeyboardInterrupt
        return row

    def run_all(self, launches: Sequence[CellLaunch], found: dict[CellLaunch, dict[str, Any] | None]) -> None:
        """Takes the rows in `found`, writes the rows of invalid cells here, and runs the other launches in jobs.

        Raises RefusedError if the launcher would reject their jobs.
        """
        to_run = [one for one in launches if found[one] is None and not one.cell.problems]
        jobs = [self._job_of(mine) for mine in groups_of(to_run)]
        if jobs and (problems := self.watch.problems([job.resources for job in jobs])):
            raise RefusedError(problems)
        for launch in launches:
            if found[launch] is not None or launch.cell.problems:
                self._take_here(launch, found[launch])
        self._dispatch(jobs)

    def _find(self, launch: CellLaunch) -> dict[str, Any] | None:
        return find_elsewhere(launch.cell, launch.repeat, self.answers, self.plugin.choice.name)

    def _take_here(self, launch: CellLaunch, row: dict[str, Any] | None) -> None:
        """Takes a launch that needs no job: a reused one, or an invalid cell."""
        if row is None:
            with launchers.by(self.plugin.choice.name):
                super().run_one(launch)
            return
        self.reporter.start(launch)
        self.reused = True
        self.take(launch, row)

    # -- jobs -----------------------------------------------------------------------------------------------

    def _dispatch(self, waiting: list[LauncherJob]) -> None:
        under_way: list[LauncherJob] = []
        bound = at_once(self.plugin.choice, [job.resources for job in waiting]) or len(waiting)
        if self.plugin.choice.is_here and min(bound, len(waiting)) > 1:
            self.reporter.say(NOTE_HERE)
        try:
            while (waiting and not self.failed_fast) or under_way:
                heed()
                while waiting and len(under_way) < bound and not self.failed_fast:
                    under_way.append(self._launch(waiting.pop(0)))
                for job in list(under_way):
                    over = job.has_ended  # before its rows are read
                    self._listen(job)
                    if over or job.is_left_over:
                        self._end(job)
                        under_way.remove(job)
                        waiting += [self._job_of(job.again)] if job.again else []
                if self.failed_fast:
                    self._withdraw(under_way)
                self._say_who_waits(under_way)
                time.sleep(POLL_S if under_way else 0)
        except KeyboardInterrupt:
            self.stopped = True
            self._stop(under_way)
        for launch, row in self.retried.items():  # there was no time for another attempt
            self.take(launch, row)
        self.retried.clear()

    def _job_of(self, launches: Sequence[CellLaunch]) -> LauncherJob:
        return LauncherJob(next(self._numbers), list(launches), resources_for(launches, self.plugin.choice))

    def _launch(self, job: LauncherJob) -> LauncherJob:
        name, where = self.plugin.choice.name, Path(job.launches[0].cell.config.results_dir)
        self.reporter.submit(job.launches, f"job {job.number} of {name}")
        try:
            job.folder = JobFolder.make(where, job.number, job.launches, name, self.reporter.board_in(where))
        except OSError as error:
            job.error = error
            job.ended.set()
            return job
        THREADS.run(partial(self._run, job, job.folder))
        return job

    def _run(self, job: LauncherJob, folder: JobFolder) -> None:
        """Launches a job and waits for its end, in a thread."""
        try:
            job.code = self.plugin.launch(folder, job.resources)
        except BaseException as error:
            job.error = error
        finally:
            job.ended.set()

    def _listen(self, job: LauncherJob) -> None:
        if job.folder is None:
            return
        for place, seen in enumerate(job.folder.board()):
            job.has_begun |= seen.state not in (WAITING, SKIPPED)
            if seen.state in (WAITING, SKIPPED) or seen.mode == AWAITS:
                job.started.pop(place, None)  # if it was seen in the moment before it began to wait
                continue
            if place not in job.started:
                job.started[place] = time.time() - seen.seconds
                self.reporter.start(job.launches[place])
            if seen.state == RUNNING and place >= job.taken:
                self.reporter.show(job.launches[place], seen)
        for row in job.folder.rows()[job.taken :]:
            self._take_of(job, row)
        if job.taken == len(job.launches) and job.complete_since is None:
            job.complete_since = time.monotonic()

    def _say_who_waits(self, under_way: Sequence[LauncherJob]) -> None:
        before, at = self._said
        if time.monotonic() < at + SAY_EVERY_S:
            return
        words = self.watch.waiting([job.folder for job in under_way if job.folder is not None])
        if words and words != before:
            self.reporter.say(words)
        self._said = words, time.monotonic()

    def _take_of(self, job: LauncherJob, row: dict[str, Any] | None, reused: bool = False) -> None:
        """Takes the row of the job's next launch; None if the job skipped it because another one of its cell failed."""
        launch, self.reused = job.launches[job.taken], reused
        if row is not None and job.taken not in job.started:
            self.reporter.start(launch)
        job.taken += 1
        if row is None and any(one.cell is launch.cell for one in job.again):
            job.again.append(launch)
        elif row is None:
            self.reporter.skip(launch)
        elif runs_again(launch, row, self.retries[launch]):
            self.retries[launch] += 1
            self.retried[launch] = row
            self.reporter.again(launch, row)
            job.again.append(launch)
        else:
            self.retried.pop(launch, None)
            self.take(launch, row)
            self.failed_fast |= row["status"] != "ok" and launch.cell.config.fail_fast

    def _end(self, job: LauncherJob, fate: Fate | None = None) -> None:
        """Ends a job that is over. Its current launch gets a row with the reason, from `fate` or the launcher; launches
        that it had not begun get another job. If it had begun none, or was canceled, each launch gets such a row. A
        launch that another sweep has finished meanwhile takes that row instead.
        """
        rest = job.launches[job.taken :]
        if rest and fate is None:
            fate = self._fate(job)
        goes_on = self.stopped or ((job.taken or job.has_begun) and fate is not None and fate.status != INTERRUPTED)
        lost = rest[: job.taken in job.started] if goes_on else rest
        log = job.folder.last_words() if lost and job.folder is not None else ""
        for launch in lost:
            if (found := self._find(launch)) is not None:
                self._take_of(job, found, reused=True)
                continue
            end = known(fate)
            with launchers.by(self.plugin.choice.name):
                begun = job.started.get(job.taken)
                row = write_lost(launch.cell, launch.repeat, end.status, end.reason, log, self.unwritten.append, begun)
            self._take_of(job, vars(row))
        if not self.stopped and not self.failed_fast:
            job.again += job.launches[job.taken :]
        if job.folder is not None:
            if not job.has_ended:
                self.watch.withdraw([job.folder], whole=True)
            self.unwritten += job.folder.unwritten()
            job.folder.remove()

    def _fate(self, job: LauncherJob) -> Fate:
        if job.folder is None:
            return Fate("crash", f"no folder can be made for its job: {job.error}")
        return self.watch.fate(job.folder, job.error, job.code)

    def _withdraw(self, under_way: list[LauncherJob]) -> None:
        """Removes jobs that have not begun from the queue and from `under_way`; their launches are not started."""
        idle = {job: job.folder for job in under_way if job.folder is not None and not job.has_begun}
        gone = self.watch.withdraw(list(idle.values())) if idle else []
        for job, folder in idle.items():
            if folder in gone and not folder.rows():
                under_way.remove(job)
                folder.remove()

    def _stop(self, under_way: list[LauncherJob]) -> None:
        """Asks all jobs to end, withdraws jobs that have not begun, and takes the rows that the others still write."""
        folders = [job.folder for job in under_way if job.folder is not None]
        for folder in folders:
            folder.ask_to_stop()
        deadline = time.monotonic() + STOP_S
        left = list(under_way)
        while left and time.monotonic() < deadline:
            withdrawn = self.watch.withdraw([job.folder for job in left if job.folder is not None])
            for job in list(left):
                if job.has_ended or job.folder in withdrawn:
                    left.remove(job)
            time.sleep(POLL_S if left else 0)
        for job in under_way:
            self._listen(job)
            self._end(job, Fate(INTERRUPTED, "stopped by the user"))
