"""Passes over the processes of a distributed job. Each process supervises one rank per pass, newly started as on one
machine.

    rank 0      *leads*: only it composes, prints and writes. For each pass it publishes an *order*, runs its own rank,
                and collects the others' *ends*
    the others  *follow*: they wait for the next order, run their rank if the pass has one for them, and post its *end*
    call-off    rank 0's message that a pass is over because a rank failed or time is up: the others end their ranks

Keys in the store, with pass number n and rank r: order/n, heard/n, off/n, end/n/r, left/r (see host/job.py). Keys of
a pass are removed after it, since a sweep may be long: ends when they are taken, orders once all have read them. A
rank's results are sent as JSON with the log of its process, because only rank 0 writes files.

The ranks of a machine that dies are *lost* (host/job.py): the running cell is a crash, and so is each later one that
needs one of them, at once. The same command in a new job runs these cells.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from ..host.environment import JobRendezvous, Rendezvous
from ..host.job import TORCHRUN, Job, JobContext, JobError, current_job, joined, rebuild, to_plain, too_many
from ..host.pipes import first_line, print_note
from ..host.signals import HANG_UP, INTERRUPT, TERMINATE, end_with_parent, interrupt_on, interrupted_by
from ..host.store import LostError
from ..host.temporary import temporary_folder
from ..results.provenance import source_hash
from ..worker import run_rank
from . import start_ranks as here
from .collectives import calibrate_rank
from .start_ranks import STOPPED, Failure, Interrupted, LaunchError

FAREWELL_S = 20.0
"""Seconds for the others to read that the command is over, if rank 0's process hosts the store."""


def places(ranks: int, file: Path) -> list[Rendezvous]:
    """Returns the rendezvous of each rank of the next pass: in the job's store, or else in `file`."""
    context = current_job()
    if context is None:
        return [str(file.resolve())] * ranks
    job, membership = context.job, context.membership
    if ranks > job.world_size:
        raise JobError(too_many(ranks, job.world_size))
    prefix, one_machine = f"{context.prefix}/ranks/{context.passes + 1}", membership.machines(ranks) == 1
    members = membership.members[:ranks]
    return [JobRendezvous(job.address, job.port, prefix, info.local_rank, one_machine) for info in members]


def launch(
    worker: Callable[..., Any],
    jobs: Sequence[Any],
    log_dir: Path,
    timeout_s: float,
    on_progress: Callable[[Any], None] = lambda _: None,
) -> list[Any]:
    """Runs `start_ranks.launch`, over the processes of the job if one has been joined."""
    context = current_job()
    if context is None:
        return here.launch(worker, jobs, log_dir, timeout_s, on_progress)
    return _Pass(context, worker, jobs, log_dir, timeout_s).run(on_progress)


def lead(job: Job, command: Callable[[], int]) -> int:
    """Runs `command` as rank 0, with `launch` over the job; the others end with it. Returns the exit code."""

    def act(context: JobContext) -> int:
        try:
            code = command()
        finally:
            with contextlib.suppress(LostError):  # the others notice by themselves
                _dismiss(context)
        if job.agent:  # others may still be on their way to a command that was short
            with contextlib.suppress(LostError, JobError):
                context.wait_for_all(FAREWELL_S)
        if code in (1, 2):
            report_to_torchrun(JobError(f"the command ended with code {code}; rank 0's output says why"))
        return code

    return in_job(job, act)


def _dismiss(context: JobContext) -> None:
    context.store.post(f"order/{context.passes + 1}", None)
    deadline = time.monotonic() + FAREWELL_S
    while not context.job.agent and time.monotonic() < deadline:
        context.look()
        if len(context.lost) == context.job.world_size - 1:
            return
        time.sleep(POLL_S)


class _Pass:
    """One pass, run by rank 0. `others`: its ranks without rank 0; `ends`: the posted ends, by rank."""

    def __init__(
        self, context: JobContext, worker: Callable[..., Any], jobs: Sequence[Any], log_dir: Path, timeout_s: float
    ) -> None:
        self.context, self.worker, self.jobs, self.log_dir, self.timeout_s = context, worker, jobs, log_dir, timeout_s
        self.number, self.others = context.passes + 1, context.membership.members[1 : len(jobs)]
        self.ends: dict[int, End] = {}
        self.called_off = False

    def run(self, on_progress: Callable[[Any], None]) -> list[Any]:
        """Runs the pass: publishes it, runs its own rank, waits for the others, and returns the results of all ranks.
        Raises LaunchError.
        """
        self._collect()
        if self._failures():  # a rank had left before the pass began
            return self._results([], ())
        order = {"worker": self.worker.__name__, "jobs": to_plain(list(self.jobs)), "timeout_s": self.timeout_s}
        self.context.passes = self.number
        self.context.store.post(f"order/{self.number}", order)
        deadline = time.monotonic() + self.timeout_s
        try:
            own_results, own_failures = _run_here(
                self.worker, self.jobs[:1], self.log_dir, self.timeout_s, on_progress, watch=self._trouble
            )
            while len(self.ends) < len(self.others):
                failures = [*own_failures, *self._failures()]
                late = time.monotonic() > deadline or any(failure.status == "timeout" for failure in failures)
                if failures or late:
                    self._call_off("timeout" if late else STOPPED)
                self._collect()
                time.sleep(POLL_S)
            if self.called_off:
                self.context.store.drop(f"off/{self.number}")
        except BaseException:
            self._call_off(STOPPED)
            raise
        return self._results(own_results, own_failures)

    def _trouble(self) -> str | None:
        """Returns STOPPED if this process's rank must be ended because another rank has failed, else None."""
        look(self.context)
        self._collect()
        return STOPPED if self._failures() else None

    def _collect(self) -> None:
        """Takes the posted ends; a rank that has left or is lost counts as ended. Raises Interrupted."""
        unfinished = [info for info in self.others if info.rank not in self.ends]
        look(self.context, [info.rank for info in unfinished])
        for info in unfinished:
            end = self.context.store.take(f"end/{self.number}/{info.rank}")
            if end is not None:
                self.ends[info.rank] = rebuild(End, end)
            elif info.rank in self.context.lost:
                reason = f"{self.context.lost[info.rank]} (rank {info.rank} of the job, on {info.machine})"
                self.ends[info.rank] = End((Failure(info.rank, "crash", reason),), [], "")

    def _failures(self) -> list[Failure]:
        return [failure for end in self.ends.values() for failure in end.failures]

    def _call_off(self, status: str) -> None:
        if not self.called_off:
            self.called_off = True
            self.context.store.post(f"off/{self.number}", status)

    def _results(self, own_results: list[Any], own_failures: Sequence[Failure]) -> list[Any]:
        for rank, end in self.ends.items():
            self.log_dir.mkdir(parents=True, exist_ok=True)
            (self.log_dir / f"rank{rank}.log").write_text(end.log)
        if failures := [*own_failures, *self._failures()]:
            raise LaunchError(failures, self.timeout_s)
        kind = get_type_hints(self.worker)["return"]
        return [*own_results, *(rebuild(kind, self.ends[info.rank].results[0]) for info in self.others)]


def _run_here(*launch: Any, **options: Any) -> tuple[list[Any], tuple[Failure, ...]]:
    """Returns the results of a launch in this process, and its failures."""
    try:
        return here.launch(*launch, **options), ()
    except LaunchError as error:
        return [], error.failures


def look(context: JobContext, ranks: Iterable[int] | None = None) -> None:
    """Checks for lost ranks. Raises Interrupted with the reason if a signal stopped one of them."""
    context.look(ranks)
    for rank, reason in context.lost.items():
        if reason.startswith(INTERRUPTED):
            raise Interrupted(f"rank {rank} of the job {reason}")


WORKERS: dict[str, Callable[..., Any]] = {worker.__name__: worker for worker in (run_rank, calibrate_rank)}
"""Functions that an order may name. Their signatures' types are used to rebuild jobs and results."""

INTERRUPTED = "was stopped by "
"""Beginning of the reason of a process that leaves because of Ctrl-C or SIGTERM, which ends the whole command."""

SENDERS = {
    TORCHRUN: "torchrun, which ends all ranks after one has failed, or from kill",
    "srun": "scancel, a time limit, srun after it lost a rank or a node, or kill",
    "mpirun": "mpirun, which ends all ranks after one has failed, or from kill",
}
"""Launcher -> the possible senders of SIGTERM; the signal itself does not name its sender."""

POLL_S = 0.05

LOG_BYTES = 256 * 2**10
"""Maximum bytes sent from the end of a rank's log."""


@dataclass(frozen=True)
class End:
    """The end of a pass on one process. `results`: its rank's result, as plain values, or empty."""

    failures: tuple[Failure, ...]
    results: list[Any]
    log: str


def in_job(job: Job, act: Callable[[JobContext], int]) -> int:
    """Joins `job` and runs `act` in it. Returns the exit code. Processes of a torchrun agent end with the agent."""
    if job.launched_by == TORCHRUN:
        end_with_parent()
    try:
        with joined(job, source_hash("")) as context, interrupt_on([INTERRUPT, TERMINATE]):
            return act(context)
    except (JobError, LostError) as error:
        speaker = f"rank {job.rank} of the job: " if job.rank else ""
        print_note(f"zerobench: {speaker}{error}")
        report_to_torchrun(error)
        return 2


def report_to_torchrun(error: Exception) -> None:
    """Writes an error where torchrun looks for it, so that its report of failed processes includes the message."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        raise error  # the handler writes the traceback of the error at hand
    except (JobError, LostError):
        get_error_handler().record_exception(error)


def follow(job: Job) -> int:
    """Runs this process's rank of each pass that rank 0 publishes, until the last. Returns the exit code."""

    def act(context: JobContext) -> int:
        reason = "is gone: its process failed"
        try:
            while (order := _next_order(context)) is not None:
                if job.rank < len(order["jobs"]):
                    context.store.post(f"end/{context.passes}/{job.rank}", to_plain(_run_own_rank(context, order)))
            reason = "is done"
        except KeyboardInterrupt:
            reason = f"was {interruption()}"
            raise
        finally:  # rank 0 should know that this process leaves, whatever the reason
            with contextlib.suppress(LostError):
                context.leave(reason)
        return 0

    try:
        return in_job(job, act)
    except KeyboardInterrupt:
        return 130


def interruption() -> str:
    """Returns the cause of the interruption of this command, as far as it is known."""
    number, context = interrupted_by(), current_job()
    if number == INTERRUPT:
        return "stopped by the user"
    if number == HANG_UP:
        return "stopped by SIGHUP: its terminal was closed"
    return f"stopped by SIGTERM, from {SENDERS.get(context.job.launched_by if context else '', 'kill or a scheduler')}"


def _next_order(context: JobContext) -> dict[str, Any] | None:
    """Waits for the next order; returns None if the command is over. Raises LostError if rank 0 is lost."""
    context.passes += 1
    key = f"order/{context.passes}"
    while not context.store.has(key):
        if context.monitor.silent(0):
            raise LostError("rank 0 is lost: its process says nothing")
        time.sleep(POLL_S)
    order: dict[str, Any] | None = context.store.read(key)
    if order is None:
        return None
    heard = f"heard/{context.passes}"
    if context.store.increment(heard) == context.job.world_size - 1:  # the last process to read it
        context.store.drop(key)
        context.store.drop(heard)
    return order


def _run_own_rank(context: JobContext, order: dict[str, Any]) -> End:
    """Runs this process's rank of a pass. The log is written locally and sent to rank 0."""
    rank, worker = context.job.rank, WORKERS[order["worker"]]

    def called_off() -> str | None:
        if context.monitor.silent(0):
            return STOPPED
        status: str | None = context.store.read(f"off/{context.passes}")
        return status

    try:
        job = rebuild(get_type_hints(worker)["job"], order["jobs"][rank])
        with temporary_folder() as folder:
            log = folder / f"rank{rank}.log"
            results, failures = _run_here(worker, [job], log.parent, order["timeout_s"], first=rank, watch=called_off)
            text = log.read_bytes()[-LOG_BYTES:].decode(errors="replace") if log.exists() else ""
        return End(failures, to_plain(results), text)
    except LostError:
        raise
    except Exception as error:  # this process's own, such as a full disk: the pass has failed, rank 0 reports why
        reason = f"could not run its part: {type(error).__name__}: {first_line(error)}"
        return End((Failure(rank, "crash", reason),), [], traceback.format_exc())
