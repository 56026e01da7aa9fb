"""A sweep whose cells run in the jobs of a Hydra launcher: SLURM, Ray, parallel processes.

1. reuse      launches finished by an earlier sweep need no job
2. submit     a job runs one cell, with all its repeats: the command `zerobench WORDS` with the words of that cell. As
              many jobs as the launcher permits run concurrently. A thread each waits in the plugin's `launch`, which
              returns when its job is over
3. end        the rows of a job that is over are read from its file; the job has written the runs to the results folder.
              If a launch has no row, this process writes one

The sweep's folder is hidden in the results folder, on a file system that the jobs' machines share::

    rows-N.jsonl    from job N: its rows, and a search's result (host/job.py)
    log-N-TASK.txt  output of a task of job N
    closed          exists once no further job may begin
    stop            exists once all jobs must end
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, ClassVar

from hydra.core.utils import JobStatus

from ..config.cell import LOCAL, Cell, CellConfig
from ..config.compose import CommandLine
from ..config.composer import instantiate_launcher
from ..config.flat import differences, show_value
from ..config.plugins import LAUNCHER, RAY, SWEEPER, LauncherChoice, Resources, at_once, requested_resources
from ..host import job as cluster
from ..host.files import read_text
from ..host.signals import raise_if_interrupted
from ..host.temporary import claim, remove
from ..records import RunRow, SearchRow
from ..results.folders import JOBS
from ..sections import known
from .cell import find_elsewhere, new_row, write_lost
from .search import is_search
from .sweep import Sweep

POLL_S = 0.5

STOP_S = 60.0
"""Seconds for jobs to end after Ctrl-C."""

GRACE_S = 20.0
"""Seconds for a job's command to end after SIGTERM."""

NOTE_HERE = "jobs run side by side on this machine and disturb each other's times, not bytes and volumes"


def run_job(folder: str, number: int, command: Sequence[str], launcher: str, cwd: str, _config: Any = None) -> None:
    """Runs the command of a job to its end, in the job: the launcher's plugin calls it, in any thread or process."""
    sweep_folder, task = Path(folder), os.environ.get("SLURM_PROCID", "0")
    if not sweep_folder.is_dir() or (sweep_folder / "closed").exists():
        return
    variables = {cluster.LAUNCHER: launcher, cluster.ROWS: str(sweep_folder / f"rows-{number}.jsonl")}
    with (sweep_folder / f"log-{number}-{task}.txt").open("ab") as log:
        process = subprocess.Popen(
            list(command), cwd=cwd, env=os.environ | variables, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            while process.poll() is None and not (sweep_folder / "stop").exists():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
        finally:
            process.terminate()  # does nothing to a process that has ended
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclass(eq=False)
class LauncherJob:
    """A job of the launcher. `launches`: without a row so far, by repeat. `reason`: why they have none."""

    number: int
    cell: Cell
    launches: dict[int, Cell]
    resources: Resources
    reason: str = "ended without a row for it; the same command runs it again"


def resources_for(cell: Cell, choice: LauncherChoice) -> Resources:
    """Returns the resources that the job of a cell requests."""
    config = cell.config
    return requested_resources(choice, config.world_size, config.node_size, known(config.launch.threads), config.device)


def job_command(cell: Cell, composed: CommandLine) -> list[str]:
    """Returns the command that runs a cell in its job. The command contains resolved values: an interpolation may give
    another value there, and the job must run the planned cell. It also chooses the sweep's launcher and sweeper, as an
    experiment's settings for them would not compose otherwise; hydra.mode=RUN makes Hydra ignore both.
    """
    config = cell.config
    resolved = {"world_size": config.world_size, "device": config.device, "backend": config.backend}
    values = {"launch.threads": str(config.launch.threads)} | {key: str(value) for key, value in resolved.items()}
    for override in cell.overrides:
        key, _, value = override.lstrip("+").partition("=")
        section, _, last = key.rpartition(".")
        holder = getattr(config, section, None) if section else config
        if ("${" in value or "~" in value) and hasattr(holder, last):
            value = json.dumps(getattr(holder, last), ensure_ascii=False)
        lacks = key in composed.elsewhere and not hasattr(holder, last)
        if key in (LAUNCHER, SWEEPER) or (not key.startswith("hydra") and not lacks):
            values.setdefault(key, value)
    folders = [f"--config-dir={folder.absolute()}" for folder in composed.composer.extra_dirs]
    overrides = [f"{key}={value}" for key, value in values.items()]
    return [sys.executable, *program(), *folders, *overrides, "hydra.mode=RUN"]


def other_values(planned: CellConfig, row: RunRow) -> str:
    """Returns the values of a row that were planned otherwise, as on a command line, without those of its machine."""
    differing = {} if row.status == "invalid" else differences(CellConfig.from_json(row.config), planned)
    own = (*LOCAL, "ranks_per_gpu")
    return " ".join(f"{key}={show_value(value)}" for key, (value, _) in differing.items() if key not in own)


def program() -> list[str]:
    """Returns the arguments of Python for this program, perhaps a user's script, which registers models."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return ["-m", spec.name.removesuffix(".__main__")] if spec else [str(Path(sys.argv[0]).absolute())]


@dataclass
class JobSweep(Sweep):
    """A sweep through the jobs of `composed`'s launcher."""

    composed: CommandLine = field(kw_only=True)
    runs_searches: ClassVar[bool] = True
    _numbers: Any = field(default_factory=partial(count, 1))

    @property
    def choice(self) -> LauncherChoice:
        return known(self.composed.launcher)

    def run(self, cells: list[Cell], first: int = 0, names: Sequence[str] | None = None) -> None:
        jobs: dict[int, LauncherJob] = {}
        for launch, row in self.expect(cells, first, names):
            if launch.problems:
                self.run_one(launch)
                if launch.config.fail_fast:
                    self.failed_fast = True
                    return
            elif row is not None:
                self.reuse(launch, row)
            else:
                key = id(launch.config)
                if key not in jobs:
                    jobs[key] = LauncherJob(next(self._numbers), launch, {}, resources_for(launch, self.choice))
                jobs[key].launches[launch.repeat] = launch
        if jobs:
            self._run_jobs(list(jobs.values()))

    def run_apart(self, cell: Cell) -> RunRow:
        """Returns the row of a reference run, which a job has made."""
        if (row := self.find(cell)) is None:
            row = new_row(cell)
            row.status, row.reason = "crash", f"no job of {self.choice.name} has run it"
        return row

    def find(self, launch: Cell) -> RunRow | None:
        # a search has the id of one of its combinations, which is an ordinary run
        return None if is_search(launch) else find_elsewhere(launch, self.answers, self.choice.name)

    def _run_jobs(self, waiting: list[LauncherJob]) -> None:
        bound = at_once(self.choice, [job.resources for job in waiting]) or len(waiting)
        if self.choice.is_here and min(bound, len(waiting)) > 1:
            self.reporter.say(NOTE_HERE)
        if RAY in self.choice.settings:  # before threads do: the kernel ends Ray with the thread that started it
            start = import_module("hydra_plugins.hydra_ray_launcher._launcher_util").start_ray
            start(self.composed.composer.compose(self.composed.own).hydra.launcher.ray.init)
        results_dir = Path(waiting[0].cell.config.results_dir)
        results_dir.mkdir(parents=True, exist_ok=True)
        aside = claim(results_dir, JOBS, str(os.getpid()))
        under_way: set[LauncherJob] = set()
        over: SimpleQueue[tuple[LauncherJob, BaseException | None]] = SimpleQueue()
        try:
            while waiting or under_way:
                raise_if_interrupted()
                while waiting and len(under_way) < bound:
                    job = waiting.pop(0)
                    under_way.add(job)
                    self._submit(job, len(under_way), aside.path, over)
                with suppress(Empty):
                    job, error = over.get(timeout=POLL_S)
                    under_way.remove(job)
                    self._end(job, error, aside.path)
                if self.failed_fast:
                    waiting.clear()
                    (aside.path / "closed").touch()
        except KeyboardInterrupt:
            self.stopped = True
            for name in ("closed", "stop"):
                (aside.path / name).touch()
            ended, deadline = 0, time.monotonic() + STOP_S
            while ended < len(under_way) and time.monotonic() < deadline:
                with suppress(Empty):
                    over.get(timeout=POLL_S)
                    ended += 1
            for job in under_way:
                self._take_rows(job, aside.path)
        finally:
            remove(aside.path)
            aside.release()

    def _submit(
        self,
        job: LauncherJob,
        under_way: int,
        folder: Path,
        over: SimpleQueue[tuple[LauncherJob, BaseException | None]],
    ) -> None:
        """Starts a job. Once it has ended, it is in `over`, with the error of the plugin."""
        name = f"job {job.number} of {self.choice.name}"
        self.reporter.submit(list(job.launches.values()), name, under_way)
        command = job_command(job.cell, self.composed)
        task = partial(run_job, str(folder), job.number, command, self.choice.name, os.getcwd())
        settings = job.resources.settings(self.choice)
        try:
            line = self.composed
            launcher = instantiate_launcher(line.composer, line.own, folder, job.number, settings, task)
        except Exception as error:  # the other jobs are not to suffer; this one becomes a row
            over.put((job, error))
            return

        def launch() -> None:
            try:
                for done in launcher.launch([[]], initial_job_idx=job.number):
                    if done.status is JobStatus.FAILED:
                        raise done._return_value  # the public property prints a line before it raises
                over.put((job, None))
            except BaseException as error:
                over.put((job, error))

        threading.Thread(target=launch, name=name, daemon=True).start()

    def _take_rows(self, job: LauncherJob, folder: Path) -> None:
        """Takes the rows that a job has written."""
        path = folder / f"rows-{job.number}.jsonl"
        lines = read_text(path).splitlines(keepends=True) if path.exists() else []
        combinations: dict[tuple[str, int], RunRow] = {}
        for written in (json.loads(line) for line in lines if line.endswith("\n")):
            if "search_id" in written:
                result = SearchRow(**written)  # it ends the job's launches
                if job.launches:  # else the job was started again
                    self.searches.append(result)
                for launch in job.launches.values():
                    row = new_row(launch)
                    row.status, row.reason = result.status, result.reason or f"micro-batch {result.micro_batch}"
                    row.seconds, row.peak_bytes = sum(run.seconds for run in combinations.values()), result.peak_bytes
                    self.reporter.start(launch)
                    self.reporter.end(launch, row, reused=False)
                job.launches.clear()
            elif is_search(job.cell):
                row = RunRow(**written)
                combinations[row.cell_id, row.repeat] = row
            elif others := other_values(job.cell.config, RunRow(**written)):
                job.reason = f"ran another cell, with {others}; give such a key a plain value, without ${{...}}"
            elif written["repeat"] in job.launches:  # else the job was started again, and reused it
                self._take_row(job, RunRow(**written))
        self.combinations += combinations.values()

    def _take_row(self, job: LauncherJob, row: RunRow) -> None:
        launch = job.launches.pop(row.repeat)
        self.reporter.start(launch)
        self.take(launch, row)
        self.failed_fast |= row.status != "ok" and launch.config.fail_fast and not self.stopped

    def _end(self, job: LauncherJob, error: BaseException | None, folder: Path) -> None:
        """Ends a job that is over: its first launch without a row gets one, and the other launches of its cell none."""
        self._take_rows(job, folder)
        failed = any(row.status != "ok" for row in self.by_cell.get(job.cell.cell_id, []))
        if job.launches and not failed and not self.failed_fast:
            if error is not None:
                message = " ".join(str(error).split()) or "no message"
                job.reason = f"failed: {type(error).__name__}: {message[:600]}; the same command runs it again"
            reason = f"its job of {self.choice.name} {job.reason}"
            logs = [path.read_text(errors="replace") for path in sorted(folder.glob(f"log-{job.number}-*.txt"))]
            launch = next(iter(job.launches.values()))
            row = write_lost(launch, reason, self.choice.name, "\n".join(logs), self.unwritten.append)
            self._take_row(job, row)
        for launch in job.launches.values():
            self.reporter.skip(launch)
