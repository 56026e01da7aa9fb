"""Launches N new rank processes and supervises them. All return a result, or LaunchError says why; none is left behind.

Ranks are forked from a server that has loaded torch but never used CUDA: 0.35 s for four ranks, while spawning takes
7.7 s. Each rank dies with its parent, writes its output to its own file, and on a timeout first writes its stacks
there.

torch's start_processes (torch.distributed.elastic.multiprocessing) could start them from the same server, but its ranks
outlive a killed parent, it waits forever for a rank that exits without a result, it reports only one rank of a failed
pass, which may not be the cause, and it changes the caller's signal handlers (docs/explanation/ranks-and-engines.md).

`launch_each` runs independent jobs in parallel, one at a time in a process; unlike ranks of a pass, one that fails
ends its own process alone.

waiting    jobs in their order
running    processes that have a job -> its deadline
ready      processes that have done a job and are fit for another
ended      job -> its result, or its Failure: crash, oom or timeout
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

from . import fork_server
from .rank_main import GoesOn, Worker, once, rank_main

GRACE_S = 3.0
"""Seconds for ranks to write their stacks or to exit."""

WATCH_S = 1.0
"""Seconds between a launch's calls of its `watch`."""

STOPPED = "stopped"
"""Status of a rank that was ended because of an event elsewhere."""

STILL_RAN = "still ran"

BROKEN = ("the connection broke while", "ended, or did not answer, while")
"""Messages of the engine (zero/comm/out_of_step.py) on a rank that lost a peer."""

HALTED = {
    psutil.STATUS_STOPPED: "was stopped by a signal (SIGSTOP, for example), and others may have waited for it",
    psutil.STATUS_TRACING_STOP: "was stopped by a debugger, and others may have waited for it",
    psutil.STATUS_DISK_SLEEP: "waited in the kernel, for a disk or a device",
}
"""Process states that explain a timeout."""

Watch = Callable[[], str | None]
"""Called regularly while ranks run: returns None, or the status ("timeout", STOPPED) with which to end them."""


@dataclass(frozen=True)
class Failure:
    """A rank without a result. `status`: crash, oom, timeout or STOPPED. `text` follows "rank N"."""

    rank: int
    status: str
    text: str


class LaunchError(Exception):
    """Raised if a rank of a pass has no result. `status`, `reason`: of the likely cause; `failures`: of all ranks."""

    def __init__(self, failures: Sequence[Failure], timeout_s: float) -> None:
        self.failures = tuple(failures)
        self.status, self.reason = explain(failures, timeout_s)
        super().__init__(f"{self.status}: {self.reason}")


class Interrupted(KeyboardInterrupt):
    """Raised if the user interrupted the command (Ctrl-C or SIGTERM) while ranks ran; all ranks have ended."""


@dataclass(eq=False)
class RankProcess:
    """A running rank. `finished`: its result has arrived; `error`: status and text of a failure that it reported."""

    number: int
    process: Any
    pipe: Connection
    log: Path
    server: int | None
    """Process id of the fork server."""
    system: psutil.Process | None = None
    """The rank's process as the system has it, not the fork server; None if it had ended already."""
    result: Any = None
    finished: bool = False
    error: tuple[str, str] | None = None


def launch(
    worker: Worker,
    jobs: Sequence[Any],
    log_dir: Path,
    timeout_s: float,
    on_progress: Callable[[Any], None] = lambda _: None,
    first: int = 0,
    watch: Watch = lambda: None,
) -> list[Any]:
    """Runs `worker(job, report)` in a new process for each of `jobs`, as ranks from `first` on, and returns the results
    in order.

    `worker` must be importable. Values that it passes to `report` go to `on_progress` here. If a job names a folder as
    its `scratch`, files that its rank leaves there are removed. Once all processes have ended, raises LaunchError if a
    rank has no result, and Interrupted if the user interrupts.
    """
    from ..host.environment import memory_kills  # it loads torch

    kills_before, ranks = memory_kills(), list[RankProcess]()
    log_dir.mkdir(parents=True, exist_ok=True)
    try:
        context = fork_server.start()
        for number, job in enumerate(jobs, first):
            ranks.append(start(context, worker, job, number, log_dir / f"rank{number}.log"))
        failures = _supervise(ranks, time.monotonic() + timeout_s, on_progress, watch)
    except KeyboardInterrupt as stop:
        raise Interrupted(*stop.args) from stop
    except (EOFError, ConnectionError):  # ranks were still being started
        server = f"process {ranks[0].server}" if ranks else "process unknown"
        text = f"was lost with the fork server of all ranks, {server}, before it began"
        failures = [Failure(len(ranks), "crash", text)]
    finally:
        end(ranks)
        for folder in {job.scratch for job in jobs if getattr(job, "scratch", None)}:
            from ..zero.offload.disk import sweep  # it loads torch

            sweep(folder)
    if not failures:
        return [rank.result for rank in ranks]
    if memory_kills() > kills_before:
        for index, failure in enumerate(failures):
            if failure.status == "crash" and not _lost_a_peer(failure):
                text = f"{failure.text}; the kernel ran out of memory and killed a process"
                failures[index] = replace(failure, status="oom", text=text)
    raise LaunchError(failures, timeout_s)


def explain(failures: Sequence[Failure], timeout_s: float) -> tuple[str, str]:
    """Returns status and reason of a pass's likely cause: a rank that died before peers that lost their connection."""
    causes = sorted(
        failures, key=lambda f: (f.status == STOPPED, _lost_a_peer(f), f.status == "timeout", f.status != "oom")
    )
    if causes[0].status != "timeout":
        return causes[0].status, f"rank {causes[0].rank} {causes[0].text}"
    late = [failure for failure in failures if failure.status == "timeout"]
    names = ", ".join(str(failure.rank) for failure in late)
    halted = "".join(f"; rank {failure.rank} {failure.text}" for failure in late if failure.text != STILL_RAN)
    reason = f"launch.timeout_s={timeout_s:g} was over and rank {names} still ran{halted}"
    return "timeout", f"{reason}; the stacks are in the logs"


def _lost_a_peer(failure: Failure) -> bool:
    signs = ("Connection closed by peer", "Connection reset", "Broken pipe", "gloo", *BROKEN)
    return failure.status == "crash" and any(sign in failure.text for sign in signs)


def start(context: Any, worker: Worker, job: Any, number: int, log: Path, goes_on: GoesOn = once) -> RankProcess:
    """Forks a rank from the server; its output goes to `log`. `goes_on`: see `launch_each`."""
    here, there = context.Pipe()
    process = context.Process(target=rank_main, args=(worker, job, there, str(log), goes_on), daemon=True)
    process.start()
    there.close()
    rank = RankProcess(number, process, here, log, fork_server.process_id())
    with contextlib.suppress(psutil.NoSuchProcess):
        rank.system = psutil.Process(process.pid)
    return rank


def _supervise(
    ranks: list[RankProcess], deadline: float, on_progress: Callable[[Any], None], watch: Watch
) -> list[Failure]:
    """Waits until every rank is done, one has failed, or `watch` ends the pass. Returns the failures."""
    look = time.monotonic() + WATCH_S
    while not all(rank.finished for rank in ranks):
        now = time.monotonic()
        if now >= deadline:
            return give_up(ranks, "timeout")
        if now >= look:
            look = now + WATCH_S
            if (status := watch()) is not None:
                return give_up(ranks, status)
        _listen_until(min(deadline, look), ranks, lambda _, value: on_progress(value))
        if any(rank.error for rank in ranks):
            time.sleep(0.2)  # messages of peers, or the first cause, may still be in transit
            for rank in ranks:
                if not rank.finished and not rank.error:
                    listen(rank, lambda _: None)
            return [Failure(rank.number, *rank.error) for rank in ranks if rank.error]
    return []


OnMessage = Callable[[int, Any], None]
"""Takes the number of a rank, or of a job of `launch_each`, and its progress; from `launch_each` also its end."""


def _listen_until(deadline: float, ranks: Iterable[RankProcess], heard: OnMessage) -> None:
    """Waits until a rank has sent a message or has ended, or until `deadline`."""
    sources = {source: rank for rank in ranks if not rank.finished for source in (rank.pipe, rank.process.sentinel)}
    for ready in wait(list(sources), timeout=max(0.0, deadline - time.monotonic())):
        if not (sources[ready].finished or sources[ready].error):
            listen(sources[ready], partial(heard, sources[ready].number))


def listen(rank: RankProcess, on_progress: Callable[[Any], None]) -> None:
    """Receives a rank's messages; a rank that ended without a result has failed."""
    try:
        while rank.pipe.poll():
            kind, value = pickle.loads(rank.pipe.recv_bytes())
            if kind == "progress":
                on_progress(value)
            elif kind == "result":
                rank.result, rank.finished = value, True
            else:
                rank.error = value
            if kind != "progress":
                return
    except (EOFError, OSError):
        rank.process.join(GRACE_S)
    if rank.process.is_alive() or rank.finished or rank.error is not None:
        return
    code = rank.process.exitcode
    text = f"exited early with code {code}"
    if rank.server is not None and _state(rank.server) in ("", psutil.STATUS_ZOMBIE):
        text = f"was lost with the fork server of all ranks, process {rank.server}, which was killed"
    elif code is not None and code < 0:
        from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

        name = ProcessFailure(rank.number, rank.process.pid, code, error_file="").signal_name()
        text = f"was killed by signal {-code} ({name})"
    rank.error = ("crash", text)


def give_up(ranks: list[RankProcess], status: str) -> list[Failure]:
    """Marks the ranks that still run as failed; on a timeout they write their stacks to their logs first."""
    late = [rank for rank in ranks if not rank.finished]
    states = {rank.number: HALTED.get(_state(rank.process.pid), STILL_RAN) for rank in late}
    if status == "timeout":
        for rank in late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
    return [Failure(rank.number, status, states[rank.number]) for rank in late]


def end(ranks: list[RankProcess]) -> None:
    """Ends all processes: finished ones get a moment to exit, the others are killed."""
    deadline = time.monotonic() + GRACE_S
    for rank in ranks:
        if rank.finished:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        if rank.process.is_alive():
            rank.process.kill()
        rank.process.join()
        rank.pipe.close()
    for rank in ranks:  # for multiprocessing a rank whose fork server was killed has ended
        deadline = time.monotonic() + GRACE_S
        with contextlib.suppress(psutil.NoSuchProcess):
            while rank.system and rank.system.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
                rank.system.kill()
                time.sleep(0.01)


def _state(pid: int) -> str:
    """Returns the state of a process as a psutil constant; "" if it is gone."""
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return ""


def launch_each(
    worker: Worker, jobs: Sequence[Any], log_dir: Path, timeout_s: float, at_once: int,
    heard: OnMessage = lambda *_: None, goes_on: GoesOn = once, ready: list[RankProcess] | None = None,
) -> list[Any]:  # fmt: skip
    """Runs `worker(job, report)` in a process for each of `jobs`, and returns the result or the Failure of each.

    `heard` gets a job's number with each value that the worker passes to `report`, and with its result or Failure; jobs
    that `heard` then adds to `jobs` run, too. A process gets another job if `goes_on` returns True for its result.
    `ready`: processes that are left from an earlier launch of the same worker and are used first; the list is updated,
    and the caller dismisses them. If the user interrupts, ends all running processes, then raises Interrupted.
    """
    ended: dict[int, Any] = {}
    running: dict[RankProcess, float] = {}
    kept = [] if ready is None else ready
    log_dir.mkdir(parents=True, exist_ok=True)
    try:
        while len(ended) < len(jobs):
            while len(running) < at_once and (number := len(ended) + len(running)) < len(jobs):
                process = _given(kept, jobs[number], number) or start(
                    fork_server.context(), worker, jobs[number], number, log_dir / f"job{number}.log", goes_on
                )
                running[process] = time.monotonic() + timeout_s
            _listen_until(min(running.values()), running, heard)
            now = time.monotonic()
            for job in [job for job, deadline in running.items() if job.finished or job.error or now >= deadline]:
                del running[job]
                late = ("timeout", f"was not done after {timeout_s:g} s")
                ended[job.number] = job.result if job.finished else Failure(job.number, *(job.error or late))
                fit = job.finished and goes_on(job.result)
                kept.append(job) if fit else end([job])
                heard(job.number, ended[job.number])
    except KeyboardInterrupt as stop:
        raise Interrupted from stop
    finally:
        end([*running])
        if ready is None:
            dismiss(kept)
    return [ended[number] for number in range(len(jobs))]


def dismiss(ready: list[RankProcess]) -> None:
    """Ends processes that wait for another job."""
    for process in ready:
        process.pipe.close()
    end(ready)


def _given(ready: list[RankProcess], job: Any, number: int) -> RankProcess | None:
    """Gives the job to a process that is ready for it, and returns that; None if there is none."""
    while ready:
        process = ready.pop()
        try:
            process.pipe.send_bytes(pickle.dumps(job))
        except OSError:  # it was killed since
            end([process])
            continue
        process.number, process.result, process.finished = number, None, False
        return process
    return None
