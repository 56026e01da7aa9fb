"""A sweep whose cells run in the jobs of a Hydra launcher: SLURM, Ray, parallel processes.

1. reuse      launches finished by an earlier sweep need no job
2. submit     a job runs one cell, with all its repeats: the command `zerobench WORDS` with the words of that cell. As
              many jobs as the launcher permits run concurrently, each launched from a thread, since a plugin's `launch`
              returns when its job is over
3. listen     a job appends each finished row to its file in the sweep's folder, and its run to the results folder
4. end        a job that is over without a row for its launch lost it: this process writes the row

The sweep's folder is hidden in the results folder, on a file system that the jobs' machines share::

    rows-N.jsonl    from job N: its rows so far, and a search's result (cluster/launchers.py)
    beat-N          touched by job N while it runs: without sacct, submitit waits for a lost job without end
    log-N-TASK.txt  output of a task of job N
    closed          exists once no further job may begin
    stop            exists once all jobs must end
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.utils import JobStatus

from ..cluster import launchers
from ..config.cell import Cell
from ..config.compose import Composed, instantiate_launcher
from ..config.launcher import GROUP, RAY, LauncherChoice, Resources, at_once, resources_of
from ..config.overrides import SWEEPER
from ..host.files import read_text
from ..host.signals import heed
from ..host.temporary import claim, remove
from ..records import SearchRow
from ..results.leftovers import JOBS
from ..sections import known
from .cell import find_elsewhere, write_lost
from .search import is_search
from .sweep import CellLaunch, Sweep

POLL_S = 0.5

STOP_S = 60.0
"""Seconds for jobs to end after Ctrl-C."""

GRACE_S = 20.0
"""Seconds for a job's command to end after SIGTERM."""

BEAT_S, LOST_S = 2.0, 150.0
"""Seconds between a job's signs of life, and without one until it counts as lost; NFS caches times for a minute."""

NOTE_HERE = "jobs run side by side on this machine and disturb each other's times, not bytes and volumes"


def run_job(folder: str, number: int, command: Sequence[str], launcher: str, cwd: str, _config: Any = None) -> None:
    """Runs the command of a job to its end, in the job: the launcher's plugin calls it, in any thread or process."""
    sweep_folder, task = Path(folder), os.environ.get("SLURM_PROCID", "0")
    if not sweep_folder.is_dir() or (sweep_folder / "closed").exists():
        return
    variables = {launchers.LAUNCHER: launcher, launchers.ROWS: str(sweep_folder / f"rows-{number}.jsonl")}
    with (sweep_folder / f"log-{number}-{task}.txt").open("ab") as log:
        process = subprocess.Popen(
            list(command), cwd=cwd, env=os.environ | variables, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            while process.poll() is None and not (sweep_folder / "stop").exists():
                with contextlib.suppress(OSError):  # the folder of a killed sweep is removed; its jobs go on
                    (sweep_folder / f"beat-{number}").touch()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(BEAT_S)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@dataclass(eq=False)
class LauncherJob:
    """A job of the launcher. `launches`: without a row so far, by repeat. `rows`: read so far. `beat`: time of its
    last sign of life, and when that was seen. `error`: raised by the plugin. `combinations`: rows of a search's
    combinations, by cell and repeat.
    """

    number: int
    cell: Cell
    launches: dict[int, CellLaunch]
    resources: Resources
    rows: int = 0
    beat: tuple[float, float] = (0.0, math.inf)
    error: BaseException | None = None
    combinations: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def reason(self) -> str:
        """Why its launches have no rows, after it is over."""
        if self.error is None:
            return "ended without a row for it"
        words = " ".join(str(self.error).split()) or "no message"
        return f"failed: {type(self.error).__name__}: {words[:600]}"


def resources_for(cell: Cell, choice: LauncherChoice) -> Resources:
    """Returns the resources that the job of a cell requests."""
    config = cell.config
    return resources_of(choice, config.world_size, config.node_size, known(config.launch.threads), config.device)


def command_of(cell: Cell, composed: Composed) -> list[str]:
    """Returns the command that runs a cell in its job. It has the values that were resolved for the job, so that the
    job runs the cell that was planned. The launcher and the sweeper are chosen as for the sweep, since an experiment's
    settings of them compose with no others, and ignored: hydra.mode=RUN.
    """
    config, check = cell.config, composed.check
    resolved = {"world_size": config.world_size, "device": config.device, "backend": config.backend}
    words = {"launch.threads": str(config.launch.threads)} | {key: str(value) for key, value in resolved.items()}
    for word in composed.words[cell.cell_id]:
        key, _, value = word.lstrip("+").partition("=")
        section, _, last = key.partition(".")
        lacks = key in check.elsewhere and not hasattr(getattr(config, section, None), last)
        if key in (GROUP, SWEEPER) or (not key.startswith("hydra") and not lacks):
            words.setdefault(key, value)
    folders = [f"--config-dir={folder.absolute()}" for folder in check.extra_dirs]
    return [
        sys.executable, *program(), *folders, *(f"{key}={value}" for key, value in words.items()), "hydra.mode=RUN",
    ]  # fmt: skip


def program() -> list[str]:
    """Returns the arguments of Python for this program, perhaps a user's script, which registers models."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return ["-m", spec.name.removesuffix(".__main__")] if spec else [str(Path(sys.argv[0]).absolute())]


@dataclass
class JobSweep(Sweep):
    """A sweep through the jobs of `composed`'s launcher."""

    composed: Composed = field(kw_only=True)
    runs_searches: ClassVar[bool] = True
    _numbers: Any = field(default_factory=partial(count, 1))

    @property
    def choice(self) -> LauncherChoice:
        return known(self.composed.line.launcher)

    def run(self, cells: list[Cell], first: int = 0, names: Sequence[str] | None = None) -> None:
        jobs: dict[int, LauncherJob] = {}
        for launch, row in self.expect(cells, first, names):
            cell = launch.cell
            if cell.problems:
                self.run_one(launch)
            elif row is not None:
                self.reuse(launch, row)
            else:
                if id(cell) not in jobs:
                    jobs[id(cell)] = LauncherJob(next(self._numbers), cell, {}, resources_for(cell, self.choice))
                jobs[id(cell)].launches[launch.repeat] = launch
        if jobs:
            self._run_jobs(list(jobs.values()))

    def run_apart(self, cell: Cell) -> dict[str, Any]:
        """Returns the row of a reference run, which a job has made."""
        missing = {"status": "crash", "reason": f"no job of {self.choice.name} has run it"}
        return self.find(cell, 0) or missing

    def find(self, cell: Cell, repeat: int) -> dict[str, Any] | None:
        return find_elsewhere(cell, repeat, self.answers, self.choice.name)

    def _run_jobs(self, jobs: list[LauncherJob]) -> None:
        bound = at_once(self.choice, [job.resources for job in jobs]) or len(jobs)
        if self.choice.is_here and min(bound, len(jobs)) > 1:
            self.reporter.say(NOTE_HERE)
        if RAY in self.choice.settings:  # before threads do: the kernel ends Ray with the thread that started it
            start = import_module("hydra_plugins.hydra_ray_launcher._launcher_util").start_ray
            start(self.composed.check.hydra_of([*self.composed.line.hydra]).launcher.ray.init)
        results_dir = Path(jobs[0].cell.config.results_dir)
        results_dir.mkdir(parents=True, exist_ok=True)
        aside = claim(results_dir, JOBS, str(os.getpid()))
        waiting, under_way = list(jobs), list[LauncherJob]()
        try:
            while waiting or under_way:
                heed()
                while waiting and len(under_way) < bound:
                    under_way.append(self._submit(waiting.pop(0), aside.path))
                time.sleep(POLL_S)
                for job in list(under_way):
                    over = job.over.is_set() or self._is_lost(job, aside.path)  # before its rows are read
                    self._listen(job, aside.path)
                    if over:
                        self._end(job, aside.path)
                        under_way.remove(job)
                if self.failed_fast:
                    waiting.clear()
                    (aside.path / "closed").touch()
        except KeyboardInterrupt:
            self.stopped = True
            for name in ("closed", "stop"):
                (aside.path / name).touch()
            deadline = time.monotonic() + STOP_S
            while not all(job.over.is_set() for job in under_way) and time.monotonic() < deadline:
                time.sleep(POLL_S)
            for job in under_way:
                self._listen(job, aside.path)
        finally:
            remove(aside.path)
            aside.release()

    def _submit(self, job: LauncherJob, folder: Path) -> LauncherJob:
        self.reporter.submit(list(job.launches.values()), f"job {job.number} of {self.choice.name}")
        command = command_of(job.cell, self.composed)
        task = partial(run_job, str(folder), job.number, command, self.choice.name, os.getcwd())
        settings = job.resources.settings(self.choice)
        try:
            launcher = instantiate_launcher(self.composed, folder, job.number, settings, task)
        except Exception as error:  # the other jobs are not to suffer; this one becomes a row
            job.error = error
            job.over.set()
            return job

        def launch() -> None:
            try:
                for done in launcher.launch([[]], initial_job_idx=job.number):
                    if done.status is JobStatus.FAILED:
                        raise done._return_value  # the public property prints a line before it raises
            except BaseException as error:
                job.error = error
            finally:
                job.over.set()

        threading.Thread(target=launch, name=f"job {job.number}", daemon=True).start()
        return job

    def _is_lost(self, job: LauncherJob, folder: Path) -> bool:
        with contextlib.suppress(OSError):  # it has not begun
            beat = (folder / f"beat-{job.number}").stat().st_mtime
            if beat != job.beat[0]:
                job.beat = beat, time.monotonic()
        return time.monotonic() - job.beat[1] > LOST_S

    def _listen(self, job: LauncherJob, folder: Path) -> None:
        """Takes the rows that a job has appended since."""
        try:
            lines = read_text(folder / f"rows-{job.number}.jsonl").splitlines(keepends=True)
        except OSError:  # it has none yet
            return
        rows = [json.loads(line) for line in lines[job.rows :] if line.endswith("\n")]
        job.rows += len(rows)
        for row in rows:
            if "search_id" in row:
                result = SearchRow(**row)  # it ends the job's launches
                if job.launches:  # else the job was started again
                    self.searches.append(result)
                seconds = sum(combination["seconds"] for combination in job.combinations.values())
                reason = result.reason or f"micro-batch {result.micro_batch}"
                ending = {"status": result.status, "reason": reason, "seconds": seconds}
                for ended in job.launches.values():
                    self.reporter.start(ended)
                    self.reporter.end(ended, ending | {"peak_bytes": result.peak_bytes}, reused=False)
                job.launches.clear()
            elif is_search(job.cell):
                job.combinations[row["cell_id"], row["repeat"]] = row
            elif launch := job.launches.get(row["repeat"]):  # else the job was started again, and reused it
                self._take_of(job, launch, row)

    def _take_of(self, job: LauncherJob, launch: CellLaunch, row: dict[str, Any]) -> None:
        del job.launches[launch.repeat]
        self.reporter.start(launch)
        self.take(launch, row)
        self.failed_fast |= row["status"] != "ok" and launch.cell.config.fail_fast

    def _end(self, job: LauncherJob, folder: Path) -> None:
        """Ends a job that is over: its first launch without a row gets one, and the other launches of its cell none."""
        left = list(job.launches.values())
        self.combinations += job.combinations.values()
        failed = any(row["status"] != "ok" for row in self.by_cell.get(job.cell.cell_id, []))
        if left and not failed and not self.failed_fast:
            launch = left.pop(0)
            why = f"its job of {self.choice.name} {job.reason}; the same command runs it again"
            logs = [path.read_text(errors="replace") for path in sorted(folder.glob(f"log-{job.number}-*.txt"))]
            row = write_lost(launch.cell, launch.repeat, why, self.choice.name, "\n".join(logs), self.unwritten.append)
            self._take_of(job, launch, vars(row))
        for launch in left:
            self.reporter.skip(launch)
