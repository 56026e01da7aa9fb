"""A process of a distributed job; processes of ranks other than 0 follow rank 0 (over_cluster.py)."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_type_hints

from ..calibrate.collectives import calibrate_rank
from ..cluster.job import TORCHRUN, Job, JobContext, JobError, current_job, joined
from ..cluster.serialize import rebuild, to_plain
from ..cluster.store import LostError
from ..host.pipes import first_line, print_note
from ..host.signals import HANG_UP, INTERRUPT, TERMINATE, end_with_parent, interrupt_on, interrupted_by
from ..host.temporary import temporary_folder
from ..results.provenance import source_hash
from ..worker import run_rank
from . import start_ranks as here
from .start_ranks import STOPPED, Failure

WORKERS: dict[str, Callable[..., Any]] = {one.__name__: one for one in (run_rank, calibrate_rank)}
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
        tell_torchrun(error)
        return 2


def tell_torchrun(error: Exception) -> None:
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
                    context.store.post(f"end/{context.passes}/{job.rank}", to_plain(_end_of(context, order)))
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
    if context.store.increment(heard, 1) == context.job.world_size - 1:  # the last process to read it
        context.store.drop(key)
        context.store.drop(heard)
    return order


def _end_of(context: JobContext, order: dict[str, Any]) -> End:
    try:
        return _take_part(context, order)
    except LostError:
        raise
    except Exception as error:  # this process's own, such as a full disk: the pass has failed, rank 0 reports why
        reason = f"could not run its part: {type(error).__name__}: {first_line(error)}"
        return End((Failure(context.job.rank, "crash", reason),), [], traceback.format_exc())


def _take_part(context: JobContext, order: dict[str, Any]) -> End:
    """Runs this process's rank of a pass. The log is written locally and sent to rank 0."""
    rank, worker = context.job.rank, WORKERS[order["worker"]]
    job = rebuild(get_type_hints(worker)["job"], order["jobs"][rank])

    def called_off() -> str | None:
        if context.monitor.silent(0):
            return STOPPED
        status: str | None = context.store.read(f"off/{context.passes}")
        return status

    with temporary_folder() as folder:
        log = folder / f"rank{rank}.log"
        outcome = here.launch(worker, [job], log.parent, order["timeout_s"], first=rank, watch=called_off)
        text = log.read_bytes()[-LOG_BYTES:].decode(errors="replace") if log.exists() else ""
    return End(outcome.failures, to_plain(outcome.results), text)
