"""SLURM: requests for jobs, jobs in its queue, and how jobs end that leave no row.

submitit detects a job's end by a file that the job leaves, or else by `sacct`. `sacct` needs slurmdbd, which many
clusters do not run, and without it a job that dies without leaving its file never ends for submitit. So this module
calls `squeue` once for all jobs, every LOOK_S seconds or more, and submitit's watcher uses the result instead of
`sacct`.

    state     SLURM's state of a job; OVER maps the final ones to the status of its launches. GONE: squeue does not list
              it. A job counts as over once two looks agree, since a requeued job passes through final states
    ids       of a folder: prefixes of the names of submitit's files in it, and jobs with its name. No pickle is read

Signals. SLURM sends them to each process of a step: submitit's process, our command, which is its child, and the ranks.
- SIGTERM precedes SIGKILL (KillWait) for scancel, a preemption and the time limit. submitit's process ignores it; our
  command ends its ranks, leaves no row and exits with 130; then the task exits without submitit's result file
  (dispatch/task.py), so that a job which SLURM requeues is not over. When started again, it resumes.
- SIGUSR2 comes `signal_delay_s` before the time limit. Our command and ranks ignore it. submitit requeues the job
  `max_num_timeout` times (default 0), which helps jobs of several launches (`launch.group_by`), since finished ones
  are kept; after the last time it fails the job with the words TIMED_OUT. Before 80 % of the time limit, it treats the
    signal as a preemption and requeues the job.

All requests are checked before the first is submitted: programs, partition, nodes, CPUs, and then everything else with
`sbatch --test-only`, since SLURM itself decides on accounts, time limits, features and memory. If it reports that
resources are busy or down at the moment, a job would wait for them, which is not an error.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config.launcher import GROUP, SETTINGS, LauncherChoice, Resources
from ..sizes import show_count
from .job_folder import JobFolder
from .watch import Fate, JobWatch

LOOK_S, SLOWNESS = 3.0, 20.0
"""Seconds between two looks; at least SLOWNESS times the duration of squeue, to spare a busy SLURM."""

APART_S = 1.0
"""Minimum seconds between two looks for the second to confirm the first."""

ANSWER_S = 60.0
"""Seconds to wait for an answer from SLURM."""

SETTLE_S = 20.0
"""Seconds for SLURM to end a job whose task has ended."""

GONE = "no longer listed"

OVER = {
    "COMPLETED": ("crash", "ended without a row for it"),
    "FAILED": ("crash", "failed without a row for it"),
    "NODE_FAIL": ("crash", "lost a node"),
    "BOOT_FAIL": ("crash", "got a node that did not start"),
    "CANCELLED": ("interrupted", "was canceled"),
    "PREEMPTED": ("interrupted", "was preempted, and not requeued"),
    "REVOKED": ("interrupted", "was revoked"),
    "TIMEOUT": ("timeout", "reached its time limit"),
    "DEADLINE": ("timeout", "reached its deadline"),
    "OUT_OF_MEMORY": ("oom", "ran out of memory"),
    GONE: ("crash", "left the SLURM queue without a row"),
}
"""Final state of a job -> the status of its launches without a row, and words for the reason."""

NO_REASON = ("", "None")

TIMED_OUT = "timed-out"
"""Words in submitit's error when it ends a job before the time limit."""


@dataclass(frozen=True)
class Seen:
    """A job as listed by squeue. `why`: SLURM's reason for its state. `name`: the job's name."""

    state: str
    nodes: str = ""
    why: str = ""
    name: str = ""


@dataclass
class Queue:
    """The user's jobs in SLURM's queue, from the last two looks. `trouble`: why the last look failed, or ""."""

    trouble: str = ""
    _looks: list[tuple[float, dict[str, Seen]]] = field(default_factory=list)
    _first_asked: dict[str, float] = field(default_factory=dict)
    _next: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def jobs(self, at_once: bool = False) -> dict[str, Seen]:
        """Returns id -> job from the last successful look; looks again if it is time to, or if `at_once`."""
        with self._lock:
            begun = time.monotonic()
            if at_once or begun >= self._next:
                self._look(begun)
                now = time.monotonic()
                self._next = now + max(LOOK_S, SLOWNESS * (now - begun))
            return self._looks[-1][1] if self._looks else {}

    def is_over(self, job_id: str) -> bool:
        """Returns True once two looks, both after the first query for the job, agree that it is over."""
        first = self._first_asked.setdefault(job_id, time.monotonic())
        self.jobs()
        with self._lock:
            looks = [seen.get(job_id, Seen(GONE)) for at, seen in self._looks if at > first]
        return len(looks) == 2 and all(seen.state in OVER for seen in looks)

    def _look(self, now: float) -> None:
        command = ["squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%N|%r|%j"]
        try:
            told = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True).stdout
        except subprocess.CalledProcessError as error:
            self.trouble = " ".join(error.stderr.split())
        except (OSError, subprocess.SubprocessError) as error:
            self.trouble = str(error)
        else:
            self.trouble = ""
            lines = (line.split("|", 4) for line in told.splitlines())
            before = [look for look in self._looks if now - look[0] >= APART_S]
            self._looks = [*before[-1:], (now, {line[0]: Seen(*line[1:]) for line in lines if len(line) == 5})]


@dataclass
class SlurmWatch(JobWatch):
    """Watches jobs in SLURM's queue, for us and for submitit."""

    queue: Queue = field(default_factory=Queue)

    def __post_init__(self) -> None:
        answer_submitit(self.queue)

    def problems(self, wanted: Sequence[Resources]) -> list[str]:
        return problems_of(self.choice, wanted)

    def ids(self, folder: JobFolder, jobs: dict[str, Seen]) -> list[str]:
        """Returns the ids of a folder's job, the newest last; several only if it was resubmitted."""
        names = (path.name.partition("_") for path in folder.path.glob(".submitit/*"))
        submitted = {first for first, mark, _ in names if mark and first.isdecimal()}
        return sorted(submitted | {one for one, seen in jobs.items() if seen.name == folder.name}, key=int)

    def waiting(self, folders: Sequence[JobFolder]) -> str:
        jobs = self.queue.jobs()
        mine = [jobs[one] for folder in folders for one in self.ids(folder, jobs)[-1:] if one in jobs]
        why = Counter(seen.why for seen in mine if seen.state == "PENDING")
        if self.queue.trouble:
            return f"SLURM: squeue does not answer: {self.queue.trouble}"
        if not why:
            return ""
        reasons = ", ".join(f"{reason} {count}" for reason, count in why.most_common() if reason not in NO_REASON)
        runs = sum(seen.state not in OVER and seen.state != "PENDING" for seen in mine)
        return f"SLURM: {show_count(why.total(), 'job')} waiting{reasons and f' ({reasons})'}, {runs} running"

    def fate(self, folder: JobFolder, error: BaseException | None, code: int | None) -> Fate:
        if error is not None and TIMED_OUT in str(error):
            early = "submitit ends jobs hydra.launcher.signal_delay_s earlier"
            return Fate("timeout", f"{self._named(folder)} reached its time limit ({early})")
        if isinstance(error, subprocess.CalledProcessError) and "requeue" in error.cmd:
            warned = "was warned by SLURM, of preemption or of a time limit that was set later, and may not be requeued"
            return Fate("interrupted", f"{self._named(folder)} {warned}")
        seen = self._settled(folder)
        if seen is None or seen.state not in OVER:
            return super().fate(folder, error, code)
        status, words = OVER[seen.state]
        why = f", {seen.why}" if seen.why not in NO_REASON else ""
        return Fate(status, f"{self._named(folder)} {words} ({seen.state}{why}); logs/job.log has its output")

    def withdraw(self, folders: Sequence[JobFolder], whole: bool = False) -> list[JobFolder]:
        """Cancels our waiting jobs, or all of our jobs if `whole`."""
        jobs = self.queue.jobs(at_once=True)
        mine = {one for folder in folders for one in self.ids(folder, jobs)}
        if cancel := [one for one in mine if (seen := jobs.get(one)) and (whole or seen.state == "PENDING")]:
            only = [] if whole else ["--state=PENDING"]  # one may begin meanwhile
            subprocess.run(["scancel", "--quiet", *only, *cancel], capture_output=True, timeout=ANSWER_S)
            jobs = self.queue.jobs(at_once=True)
        known = ((folder, self.ids(folder, jobs)) for folder in folders)
        return [one for one, ids in known if ids and all(jobs.get(job, Seen(GONE)).state in OVER for job in ids)]

    def _settled(self, folder: JobFolder) -> Seen | None:
        """Returns the folder's job once SLURM also reports that it is over; None if none was submitted."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            jobs = self.queue.jobs(at_once=True)
            ids = self.ids(folder, jobs)
            seen = jobs.get(ids[-1], Seen(GONE)) if ids else None
            if seen is None or seen.state in OVER or time.monotonic() > deadline:
                return seen
            time.sleep(APART_S)

    def _named(self, folder: JobFolder) -> str:
        jobs = self.queue.jobs()
        ids = self.ids(folder, jobs)
        where = jobs[ids[-1]].nodes if ids and ids[-1] in jobs else ""
        return f"SLURM job {ids[-1] if ids else '?'}" + (f" on {where}" if where else "")


def answer_submitit(queue: Queue) -> None:
    """Makes submitit's SLURM jobs query `queue` instead of calling sacct."""
    from submitit.slurm.slurm import SlurmInfoWatcher, SlurmJob

    class OfQueue(SlurmInfoWatcher):
        def is_done(self, job_id: str, mode: str = "standard") -> bool:
            return queue.is_over(job_id)

        def get_state(self, job_id: str, mode: str = "standard") -> str:
            return queue.jobs().get(job_id, Seen(GONE)).state

    SlurmJob.watcher = OfQueue()


PROGRAMS = ("sbatch", "srun", "squeue", "scancel", "sinfo")

FLAGS = {
    "partition": "partition", "qos": "qos", "account": "account", "constraint": "constraint", "exclude": "exclude",
    "gres": "gres", "timeout_min": "time", "mem_gb": "mem", "mem_per_cpu": "mem-per-cpu",
    "mem_per_gpu": "mem-per-gpu", "gpus_per_task": "gpus-per-task", "cpus_per_gpu": "cpus-per-gpu",
}  # fmt: skip
"""Setting of the plugin -> flag of sbatch."""

PASSING = ("busy", "not available now", "down, drained or reserved")
"""Words in a rejection that is only temporary."""


@dataclass
class Partition:
    """A partition as listed by sinfo. `cpus`: of its largest node."""

    nodes: int = 0
    cpus: int = 0
    is_default: bool = False


def problems_of(choice: LauncherChoice, wanted: Sequence[Resources]) -> list[str]:
    """Returns an error message for each kind of job that SLURM would reject."""
    for name in PROGRAMS:
        if shutil.which(name) is None:
            where = "start the sweep on a machine of the cluster from which jobs are submitted"
            return [f"{GROUP}={choice.name}: {name} is not on this machine; {where}"]
    try:
        partitions = ask_partitions()
        return _problems(choice, sorted(set(wanted), key=str), partitions)
    except subprocess.CalledProcessError as error:
        return [f"{GROUP}={choice.name}: SLURM does not answer: {_words(error.stderr)}"]
    except (OSError, subprocess.SubprocessError) as error:
        return [f"{GROUP}={choice.name}: SLURM does not answer: {error}"]


def _problems(choice: LauncherChoice, wanted: Sequence[Resources], partitions: Mapping[str, Partition]) -> list[str]:
    names = str(choice.settings.get("partition") or "").split(",")
    if names == [""]:
        names = [name for name, one in partitions.items() if one.is_default]
    if absent := [name for name in names if name not in partitions]:
        known = ", ".join(partitions) or "none"
        return [f"{SETTINGS}.partition={absent[0]}: SLURM has no such partition; it has {known}"]
    problems = [_too_large(one, names, partitions) or refusal(choice, one) for one in wanted]
    return [problem for problem in dict.fromkeys(problems) if problem]


def ask_partitions() -> dict[str, Partition]:
    """Returns SLURM's partitions by name. Raises OSError or subprocess.SubprocessError."""
    found: dict[str, Partition] = {}
    for line in _run("sinfo", "--noheader", "--format=%P|%D|%c").splitlines():
        name, nodes, cpus = line.split("|")
        one = found.setdefault(name.rstrip("*"), Partition())
        one.nodes += int(nodes)
        one.cpus = max(one.cpus, int(cpus.rstrip("+")))
        one.is_default |= name.endswith("*")
    return found


def _too_large(wanted: Resources, names: Sequence[str], partitions: Mapping[str, Partition]) -> str:
    """Returns an error message if no partition of `names` has enough nodes, or enough CPUs per node, for a job."""
    where = f"partition {' or '.join(names)}"
    nodes = max((partitions[name].nodes for name in names), default=wanted.nodes)
    if wanted.nodes > nodes:
        return f"{SETTINGS}.nodes: a job needs {show_count(wanted.nodes, 'node')}, and {where} has {nodes}"
    cpus = wanted.tasks_per_node * wanted.cpus_per_task
    most = max((partitions[name].cpus for name in names), default=cpus)
    if cpus > most:
        needs = f"{show_count(wanted.tasks_per_node, 'task')} of {show_count(wanted.cpus_per_task, 'CPU')} on a node"
        return f"{SETTINGS}.cpus_per_task: a job needs {needs}, and a node of {where} has {show_count(most, 'CPU')}"
    return ""


def refusal(choice: LauncherChoice, wanted: Resources) -> str:
    """Returns sbatch's error message if it rejects a request, else ""."""
    try:
        _run("sbatch", "--test-only", *flags(choice.settings, wanted), "--wrap=true")
    except subprocess.CalledProcessError as error:
        words = _words(error.stderr)
        if any(passing in words for passing in PASSING):
            return ""
        nodes, tasks = show_count(wanted.nodes, "node"), show_count(wanted.tasks_per_node, "task")
        return f"{GROUP}={choice.name}: sbatch refuses a job of {nodes} with {tasks} each: {words}"
    return ""


def flags(settings: Mapping[str, Any], wanted: Resources) -> list[str]:
    """Returns the flags of sbatch for a request, as submitit writes them."""
    given = {flag: settings[key] for key, flag in FLAGS.items() if settings.get(key) is not None}
    if "mem" in given:
        given["mem"] = f"{float(given['mem']) * 1024:.0f}M"
    given |= {"nodes": wanted.nodes, "ntasks-per-node": wanted.tasks_per_node, "cpus-per-task": wanted.cpus_per_task}
    if wanted.gpus_per_node is not None:
        given["gpus-per-node"] = wanted.gpus_per_node
    given |= {key.replace("_", "-"): value for key, value in (settings.get("additional_parameters") or {}).items()}
    return [f"--{flag}" if value is True else f"--{flag}={value}" for flag, value in given.items()]


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True).stdout


def _words(said: str) -> str:
    """Returns the last line of SLURM's output without its prefixes."""
    last = (said.strip().splitlines() or ["no message"])[-1]
    for prefix in ("sbatch: ", "error: ", "allocation failure: ", "Batch job submission failed: "):
        last = last.removeprefix(prefix)
    return last
