"""Passes over the processes of a joined job. Every process supervises one rank per pass, started afresh as on one
machine.

    rank 0      *leads*: it alone composes, prints and writes. For each pass it publishes an *order*, runs its own rank,
                and collects the others' *ends*
    the others  *follow*: they wait for the next order, run their rank if the pass has one for them, and post its *end*
    call-off    rank 0's message that a pass is over, because a rank failed or time is up: the others end their ranks

Keys in the store, n the number of the pass and r a rank: order/n, heard/n, off/n, end/n/r, left/r (see cluster/job.py).
Those of a pass are removed when it is over, since a sweep may be long: ends as they are taken, orders once all have
read them. A rank's results are sent as JSON, with the log of its process, because only rank 0 writes files.
"""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from ..calibrate.collectives_rank import calibrate_rank
from ..cluster.job import Job, JobContext, JobError, current_job, joined, too_many
from ..cluster.serialize import rebuild, to_plain
from ..cluster.store import LostError
from ..host.environment import JobRendezvous, Rendezvous
from ..host.signals import INTERRUPT, TERMINATE, interrupt_on
from ..host.temporary import temporary_folder
from ..results.provenance import source_hash
from ..sizes import printable
from ..worker import run_rank
from . import processes as here
from .processes import STOPPED, Failure, Interrupted, Outcome, explain

WORKERS: dict[str, Callable[..., Any]] = {one.__name__: one for one in (run_rank, calibrate_rank)}
"""Functions that an order may name. Jobs and results are rebuilt by the types in these functions' signatures."""

POLL_S = 0.05
FAREWELL_S = 20.0
"""Time, in seconds, for the others to read that the command is over, where rank 0's process hosts the store."""

LOG_BYTES = 256 * 2**10
"""Size, in bytes, of the end of a rank's log that is sent."""

INTERRUPTED = "was stopped by the user"


@dataclass(frozen=True)
class End:
    """The end of a pass on one process. `results`: its rank's, as plain values, or none."""

    failures: tuple[Failure, ...]
    results: list[Any]
    log: str


def places(ranks: int, file: Path) -> list[Rendezvous]:
    """Returns the rendezvous of each rank of the next pass: in the job's store, or else at `file`."""
    mine = current_job()
    if mine is None:
        return [str(file.resolve())] * ranks
    job, membership = mine.job, mine.membership
    if ranks > job.world_size:
        raise JobError(too_many(ranks, job.world_size))
    prefix, one_machine = f"{mine.prefix}/ranks/{mine.passes + 1}", membership.machines(ranks) == 1
    return [
        JobRendezvous(job.address, job.port, prefix, info.local_rank, one_machine)
        for info in membership.members[:ranks]
    ]


def launch(
    worker: Callable[..., Any],
    jobs: Sequence[Any],
    log_dir: Path,
    timeout_s: float,
    on_progress: Callable[[Any], None] = lambda _: None,
) -> Outcome:
    """Runs `launch.launch` over the processes of the job where one has been joined."""
    mine = current_job()
    if mine is None:
        return here.launch(worker, jobs, log_dir, timeout_s, on_progress)
    return _Pass(mine, worker, jobs, log_dir, timeout_s).run(on_progress)


# -- rank 0 -------------------------------------------------------------------------------------------------


def lead(job: Job, command: Callable[[], int]) -> int:
    """Runs `command` as rank 0, with `launch` over the job; the others end with it. Returns the exit code."""
    try:
        with joined(job, source_hash("")) as mine, interrupt_on([INTERRUPT, TERMINATE]):
            try:
                return command()
            finally:
                with contextlib.suppress(LostError):  # the others notice by themselves
                    _dismiss(mine)
    except (JobError, LostError) as error:
        print(printable(f"zerobench: {error}"), file=sys.stderr)
        return 2


def _dismiss(mine: JobContext) -> None:
    mine.store.post(f"order/{mine.passes + 1}", None)
    deadline = time.monotonic() + FAREWELL_S
    while not mine.job.agent and time.monotonic() < deadline:
        if all(mine.why_absent(rank) for rank in range(1, mine.job.world_size)):
            return
        time.sleep(POLL_S)


class _Pass:
    """One pass as rank 0 runs it. `ends`: of the other ranks, as far as they are known."""

    def __init__(
        self, mine: JobContext, worker: Callable[..., Any], jobs: Sequence[Any], log_dir: Path, timeout_s: float
    ) -> None:
        self.context, self.worker, self.jobs, self.log_dir, self.timeout_s = mine, worker, jobs, log_dir, timeout_s
        self.others, self.number = range(1, len(jobs)), mine.passes + 1
        self.ends: dict[int, End] = {}
        self.called_off = False

    def run(self, on_progress: Callable[[Any], None]) -> Outcome:
        """Runs the pass: 1 publish, 2 run the own rank, 3 wait for the others, 4 combine all ends."""
        self._collect()
        if self._failures():  # a rank had left before the pass began
            return self._outcome([], [])
        order = {"worker": self.worker.__name__, "jobs": to_plain(list(self.jobs)), "timeout_s": self.timeout_s}
        self.context.passes = self.number
        self.context.store.post(f"order/{self.number}", order)
        deadline = time.monotonic() + self.timeout_s
        try:
            mine = here.launch(
                self.worker, self.jobs[:1], self.log_dir, self.timeout_s, on_progress, watch=self._trouble
            )
            self._wait_for_others(mine, deadline)
        except BaseException:
            self._call_off(STOPPED)
            raise
        return self._outcome(mine.results, list(mine.failures))

    def _trouble(self) -> str | None:
        """Returns STOPPED where the own rank must be ended because another one has failed, else None."""
        self._collect()
        return STOPPED if self._failures() else None

    def _wait_for_others(self, mine: Outcome, deadline: float) -> None:
        while len(self.ends) < len(self.others):
            failures = [*mine.failures, *self._failures()]
            late = time.monotonic() > deadline or any(failure.status == "timeout" for failure in failures)
            if failures or late:
                self._call_off("timeout" if late else STOPPED)
            self._collect()
            time.sleep(POLL_S)
        if self.called_off:
            self.context.store.drop(f"off/{self.number}")

    def _collect(self) -> None:
        """Takes the posted ends; a rank that has left or is lost counts as ended. Raises Interrupted."""
        for rank in self.others:
            if rank in self.ends:
                continue
            found = self.context.store.take(f"end/{self.number}/{rank}")
            gone = self.context.why_absent(rank) if found is None else None
            if found is not None:
                self.ends[rank] = rebuild(End, found)
            elif gone is not None:
                self.ends[rank] = End((Failure(rank, "crash", gone),), [], "")
        if any(failure.text == INTERRUPTED for failure in self._failures()):
            raise Interrupted

    def _failures(self) -> list[Failure]:
        return [failure for end in self.ends.values() for failure in end.failures]

    def _call_off(self, status: str) -> None:
        if not self.called_off:
            self.called_off = True
            self.context.store.post(f"off/{self.number}", status)

    def _outcome(self, results: list[Any], failures: list[Failure]) -> Outcome:
        for rank, end in self.ends.items():
            self.log_dir.mkdir(parents=True, exist_ok=True)
            (self.log_dir / f"rank{rank}.log").write_text(end.log)
        failures += self._failures()
        if failures:
            return Outcome(*explain(failures, self.timeout_s), [], tuple(failures))
        kind = get_type_hints(self.worker)["return"]
        return Outcome("ok", "", [*results, *(rebuild(kind, self.ends[rank].results[0]) for rank in self.others)])


# -- the other ranks ----------------------------------------------------------------------------------------


def follow(job: Job) -> int:
    """Runs this process's rank of each pass that rank 0 publishes, until the last. Returns the exit code."""
    try:
        with joined(job, source_hash("")) as mine, interrupt_on([INTERRUPT, TERMINATE]), _saying_goodbye(mine):
            while (order := _next_order(mine)) is not None:
                if job.rank < len(order["jobs"]):
                    mine.store.post(f"end/{mine.passes}/{job.rank}", to_plain(_end_of(mine, order)))
        return 0
    except KeyboardInterrupt:
        return 130
    except (JobError, LostError) as error:
        print(printable(f"zerobench: rank {job.rank} of the job: {error}"), file=sys.stderr)
        return 2


@contextmanager
def _saying_goodbye(mine: JobContext) -> Iterator[None]:
    """Tells rank 0, as far as possible, that this process leaves, whatever ends it."""
    reason = "is gone: its process failed"
    try:
        yield
        reason = "is done"
    except KeyboardInterrupt:
        reason = INTERRUPTED
        raise
    finally:
        with contextlib.suppress(LostError):
            mine.leave(reason)


def _next_order(mine: JobContext) -> dict[str, Any] | None:
    """Waits for it; None where the command is over. Raises LostError where rank 0 is."""
    mine.passes += 1
    key = f"order/{mine.passes}"
    while not mine.store.has(key):
        if mine.monitor.silent(0):
            raise LostError("rank 0 is lost: its process says nothing")
        time.sleep(POLL_S)
    order: dict[str, Any] | None = mine.store.read(key)
    heard = f"heard/{mine.passes}"
    if order is not None and mine.store.increment(heard, 1) == mine.job.world_size - 1:  # the last process to read it
        mine.store.drop(key)
        mine.store.drop(heard)
    return order


def _end_of(mine: JobContext, order: dict[str, Any]) -> End:
    try:
        return _take_part(mine, order)
    except LostError:
        raise
    except Exception as error:  # this process's own, such as a full disk: the pass has failed, rank 0 reports why
        first = (str(error).strip() or "no message").splitlines()[0]
        words = f"could not run its part: {type(error).__name__}: {first}"
        return End((Failure(mine.job.rank, "crash", words),), [], traceback.format_exc())


def _take_part(mine: JobContext, order: dict[str, Any]) -> End:
    """Runs this process's rank of a pass. Its log is written here and sent to rank 0."""
    rank, worker = mine.job.rank, WORKERS[order["worker"]]
    job = rebuild(get_type_hints(worker)["job"], order["jobs"][rank])

    def called_off() -> str | None:
        if mine.monitor.silent(0):
            return STOPPED
        status: str | None = mine.store.read(f"off/{mine.passes}")
        return status

    with temporary_folder() as folder:
        log = folder / f"rank{rank}.log"
        outcome = here.launch(worker, [job], log.parent, order["timeout_s"], first=rank, watch=called_off)
        words = log.read_bytes()[-LOG_BYTES:].decode(errors="replace") if log.exists() else ""
    return End(outcome.failures, to_plain(outcome.results), words)
