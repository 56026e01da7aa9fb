"""Passes over the processes of a distributed job. Each process supervises one rank per pass, newly started as on one
machine.

    rank 0      *leads*: only it composes, prints and writes. For each pass it publishes an *order*, runs its own rank,
                and collects the others' *ends*
    the others  *follow*: they wait for the next order, run their rank if the pass has one for them, and post its *end*
    call-off    rank 0's message that a pass is over because a rank failed or time is up: the others end their ranks
    crew        the processes of a pass, one per rank of its world: the first living ones of the job, in order. The rank
                of a process in a pass is its index in the crew, which is below its job rank once ranks are lost

Keys in the store, with pass number n and rank r: order/n, heard/n, off/n, end/n/r, left/r (see cluster/job.py). Keys of
a pass are removed after it, since a sweep may be long: ends when they are taken, orders once all have read them. A
rank's results are sent as JSON with the log of its process, because only rank 0 writes files.

The ranks of a machine that dies are *lost* (cluster/job.py), and the running cell is a crash. Each later cell checks
again, gets the first N living ranks of the job, and records their number of machines: a run on a different number of
machines is another cell. A cell with more ranks than are left is also a crash, with a message; the same command in a
new job runs it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from ..cluster.job import Job, JobContext, JobError, current_job, too_many
from ..cluster.serialize import rebuild, to_plain
from ..cluster.store import LostError
from ..config.cell import Cell, CellConfig
from ..host.environment import SIMULATED, JobRendezvous, Rendezvous
from . import start_ranks as here
from .follower import INTERRUPTED, POLL_S, End, in_job, tell_torchrun
from .start_ranks import STOPPED, Failure, Interrupted, Outcome, explain

FAREWELL_S = 20.0
"""Seconds for the others to read that the command is over, if rank 0's process hosts the store."""


def places(ranks: int, file: Path) -> list[Rendezvous]:
    """Returns the rendezvous of each rank of the next pass: in the job's store, or else in `file`."""
    mine = current_job()
    if mine is None:
        return [str(file.resolve())] * ranks
    job, living = mine.job, mine.living
    if ranks > len(living.members):
        raise JobError(too_few(mine, ranks) if mine.lost else too_many(ranks, job.world_size))
    prefix, one_machine = f"{mine.prefix}/ranks/{mine.passes + 1}", living.machines(ranks) == 1
    return [
        JobRendezvous(job.address, job.port, prefix, info.local_rank, one_machine) for info in living.members[:ranks]
    ]


def launch(
    worker: Callable[..., Any],
    jobs: Sequence[Any],
    log_dir: Path,
    timeout_s: float,
    on_progress: Callable[[Any], None] = lambda _: None,
) -> Outcome:
    """Runs `start_ranks.launch`, over the processes of the job if one has been joined."""
    mine = current_job()
    if mine is None:
        return here.launch(worker, jobs, log_dir, timeout_s, on_progress)
    return _Pass(mine, worker, jobs, log_dir, timeout_s).run(on_progress)


def lead(job: Job, command: Callable[[], int]) -> int:
    """Runs `command` as rank 0, with `launch` over the job; the others end with it. Returns the exit code."""

    def act(mine: JobContext) -> int:
        try:
            code = command()
        finally:
            with contextlib.suppress(LostError):  # the others notice by themselves
                _dismiss(mine)
        if job.agent:  # others may still be on their way to a command that was short
            with contextlib.suppress(LostError, JobError):
                mine.wait_for_all(FAREWELL_S)
        if code in (1, 2):
            tell_torchrun(JobError(f"the command ended with code {code}; rank 0's output says why"))
        return code

    return in_job(job, act)


def _dismiss(mine: JobContext) -> None:
    mine.store.post(f"order/{mine.passes + 1}", None)
    deadline = time.monotonic() + FAREWELL_S
    while not mine.job.agent and time.monotonic() < deadline:
        mine.look()
        if len(mine.lost) == mine.job.world_size - 1:
            return
        time.sleep(POLL_S)


class _Pass:
    """One pass, run by rank 0. `others`: the crew without rank 0, by rank; `ends`: their known ends."""

    def __init__(
        self, mine: JobContext, worker: Callable[..., Any], jobs: Sequence[Any], log_dir: Path, timeout_s: float
    ) -> None:
        self.context, self.worker, self.jobs, self.log_dir, self.timeout_s = mine, worker, jobs, log_dir, timeout_s
        self.living, self.number = mine.living.members, mine.passes + 1
        self.others = dict(enumerate(self.living[1 : len(jobs)], 1))
        self.ends: dict[int, End] = {}
        self.called_off = False

    def run(self, on_progress: Callable[[Any], None]) -> Outcome:
        """Runs the pass: publishes it, runs its own rank, waits for the others, and combines all ends."""
        self._collect()
        if self._failures():  # a rank had left before the pass began
            return self._outcome([], [])
        order = {"worker": self.worker.__name__, "jobs": to_plain(list(self.jobs)), "timeout_s": self.timeout_s}
        order["living"] = [info.rank for info in self.living]
        self.context.passes = self.number
        self.context.store.post(f"order/{self.number}", order)
        deadline = time.monotonic() + self.timeout_s
        try:
            mine = here.launch(
                self.worker, self.jobs[:1], self.log_dir, self.timeout_s, on_progress, watch=self._trouble
            )
            while len(self.ends) < len(self.others):
                failures = [*mine.failures, *self._failures()]
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
        return self._outcome(mine.results, list(mine.failures))

    def _trouble(self) -> str | None:
        """Returns STOPPED if this process's rank must be ended because another rank has failed, else None."""
        look(self.context)
        self._collect()
        return STOPPED if self._failures() else None

    def _collect(self) -> None:
        """Takes the posted ends; a rank that has left or is lost counts as ended. Raises Interrupted."""
        open_ends = {rank: info for rank, info in self.others.items() if rank not in self.ends}
        look(self.context, [info.rank for info in open_ends.values()])
        for rank, info in open_ends.items():
            found = self.context.store.take(f"end/{self.number}/{info.rank}")
            if found is not None:
                self.ends[rank] = rebuild(End, found)
            elif info.rank in self.context.lost:
                words = f"{self.context.lost[info.rank]} (rank {info.rank} of the job, on {info.machine})"
                self.ends[rank] = End((Failure(rank, "crash", words),), [], "")

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


LATER = "the same command runs it in a new job"


def look(mine: JobContext, ranks: Iterable[int] | None = None) -> None:
    """Checks for lost ranks. Raises Interrupted with the reason if a signal stopped one of them."""
    mine.look(ranks)
    for rank, reason in mine.lost.items():
        if reason.startswith(INTERRUPTED):
            raise Interrupted(f"rank {rank} of the job {reason}")


def place(cell: Cell) -> Cell:
    """Returns the cell that the remaining ranks would run: the same one, or one on another number of machines."""
    mine = _with_losses()
    if mine is None or cell.problems or _does_not_fit(mine, cell.config):
        return cell
    nodes = mine.living.machines(cell.config.world_size)
    return cell if cell.config.backend == SIMULATED or nodes == cell.config.nodes else cell.changed(nodes=nodes)


def why_not(config: CellConfig) -> str | None:
    """Returns why the remaining ranks cannot run a cell; None if they can, or if no rank is lost."""
    mine = _with_losses()
    return None if mine is None else _does_not_fit(mine, config)


def too_few(mine: JobContext, ranks: int) -> str:
    """Returns an error message for a world that is larger than the rest of the job."""
    where = sorted({info.machine for info in mine.membership.members if info.rank in mine.lost})
    left = f"{len(mine.living.members)} of the job's {mine.job.world_size} ranks are left, without the ranks of"
    return f"world_size={ranks}: {left} {', '.join(where)}; {LATER}"


def _with_losses() -> JobContext | None:
    mine = current_job()
    if mine is not None:
        look(mine)
    return mine if mine is not None and mine.lost else None


def _does_not_fit(mine: JobContext, config: CellConfig) -> str | None:
    ranks = 1 if config.backend == SIMULATED else config.world_size
    if ranks > len(mine.living.members):
        return too_few(mine, ranks)
    sharing = mine.living.ranks_per_gpu(ranks) if config.device == "cuda" else 1
    if sharing == config.ranks_per_gpu or max(sharing, config.ranks_per_gpu) <= 1:
        return None
    words = f"the ranks that are left are {sharing} per GPU, and the cell was composed for {config.ranks_per_gpu}"
    return f"world_size={ranks}: {words}; {LATER}"
