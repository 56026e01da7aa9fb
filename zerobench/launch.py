"""N fresh rank processes, supervised. Whatever becomes of them is an Outcome; none is left behind.

Ranks come from a fork server that has torch loaded and has never touched CUDA: 0.35 s for four of them
where spawning takes 7.7. Each rank dies with its parent, writes its output to a file of its own, and on
a timeout first says where it hangs.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from . import fork_server

Worker = Callable[[Any, Callable[[Any], None]], Any]

OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
"""What is said by others than torch's allocator: the system's, CUDA, cuBLAS, NCCL."""

GRACE_S = 3.0
"""What ranks get to write their stacks or finish dying."""

WATCH_S = 1.0
"""How often a launch asks its `watch`."""

STOPPED = "stopped"
"""The status of a rank that was ended because of what happened elsewhere."""

Watch = Callable[[], str | None]
"""Asked now and then while ranks run: None, or the status ("timeout", STOPPED) with which to end the ones that do."""


@dataclass(frozen=True)
class Failure:
    """What became of a rank that brought no result: crash, oom, timeout or STOPPED. `text` follows "rank N"."""

    rank: int
    status: str
    text: str


@dataclass
class Outcome:
    """How a pass ended. `results`: a value a rank, in order, where status is "ok". `failures`: elsewhere, by rank."""

    status: str
    reason: str
    results: list[Any]
    failures: tuple[Failure, ...] = ()


class Interrupted(KeyboardInterrupt):
    """The user stopped us (Ctrl-C or SIGTERM) while ranks ran; they are gone."""


@dataclass
class _Rank:
    number: int
    process: Any
    pipe: Connection
    log: Path
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
) -> Outcome:
    """Runs `worker(job, tell)` in a fresh process for each of `jobs`, ranks from `first` on, and waits for all.

    `worker` must be importable. What it returns comes back in `results`; what it tells goes to `on_progress` here.
    Where a job names a folder as its `scratch`, what its rank leaves there is removed.
    Raises Interrupted, with no process left, when the user stops us.
    """
    context = fork_server.context()
    kills_before = _oom_kills()
    log_dir.mkdir(parents=True, exist_ok=True)
    ranks: list[_Rank] = []
    try:
        for number, job in enumerate(jobs, first):
            ranks.append(_start(context, worker, job, number, log_dir / f"rank{number}.log"))
        failures = _supervise(ranks, time.monotonic() + timeout_s, on_progress, watch)
    except KeyboardInterrupt as stop:
        raise Interrupted from stop
    finally:
        _end(ranks)
        _tidy({job.scratch for job in jobs if getattr(job, "scratch", None)})
    if not failures:
        return Outcome("ok", "", [rank.result for rank in ranks])
    if _oom_kills() > kills_before:
        failures = [_blame_memory(failure) for failure in failures]
    return Outcome(*explain(failures, timeout_s), [], tuple(failures))


def explain(failures: Sequence[Failure], timeout_s: float) -> tuple[str, str]:
    """Status and reason of a pass with these failures: its first cause.

    A rank that died tells more than its peers, who only lost their connection to it.
    """
    causes = sorted(failures, key=lambda f: (f.status == STOPPED, _lost_a_peer(f), f.status == "timeout", _no_oom(f)))
    if causes[0].status != "timeout":
        return causes[0].status, f"rank {causes[0].rank} {causes[0].text}"
    names = ", ".join(str(failure.rank) for failure in failures if failure.status == "timeout")
    return "timeout", f"launch.timeout_s={timeout_s:g} was over and rank {names} still ran; the stacks are in the logs"


def _no_oom(failure: Failure) -> bool:
    return failure.status != "oom"


def _lost_a_peer(failure: Failure) -> bool:
    words = ("Connection closed by peer", "Connection reset", "Broken pipe", "gloo")
    return failure.status == "crash" and any(word in failure.text for word in words)


def _blame_memory(failure: Failure) -> Failure:
    if failure.status != "crash" or _lost_a_peer(failure):
        return failure
    return replace(failure, status="oom", text=f"{failure.text}; the kernel ran out of memory and killed a process")


def _start(context: Any, worker: Worker, job: Any, number: int, log: Path) -> _Rank:
    here, there = context.Pipe()
    process = context.Process(target=_rank_main, args=(worker, job, there, str(log)), daemon=True)
    process.start()
    there.close()
    return _Rank(number, process, here, log)


def _supervise(ranks: list[_Rank], deadline: float, on_progress: Callable[[Any], None], watch: Watch) -> list[Failure]:
    """Waits until every rank is done, one has failed, or `watch` ends it. Returns what failed."""
    look = time.monotonic() + WATCH_S
    while not all(rank.finished for rank in ranks):
        now = time.monotonic()
        if now >= deadline:
            return _give_up(ranks, "timeout")
        if now >= look:
            look = now + WATCH_S
            if (status := watch()) is not None:
                return _give_up(ranks, status)
        watched: dict[Any, _Rank] = {rank.pipe: rank for rank in ranks if not rank.finished}
        watched |= {rank.process.sentinel: rank for rank in ranks if not rank.finished}
        for ready in wait(list(watched), timeout=max(0.0, min(deadline, look) - now)):
            _listen(watched[ready], on_progress)
        if any(rank.error for rank in ranks):
            return _all_failures(ranks)
    return []


def _listen(rank: _Rank, on_progress: Callable[[Any], None]) -> None:
    """Takes what a rank has sent; a rank that ended without a result has failed."""
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
    if not rank.process.is_alive() and not rank.finished and rank.error is None:
        rank.error = ("crash", _explain_exit(rank.process.exitcode))


def _explain_exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"exited early with code {code}"


def _all_failures(ranks: list[_Rank]) -> list[Failure]:
    """Those that failed so far; peers' and the first cause's words may still be on their way."""
    time.sleep(0.2)
    for rank in ranks:
        if not rank.finished and not rank.error:
            _listen(rank, lambda _: None)
    return [Failure(rank.number, *rank.error) for rank in ranks if rank.error]


def _give_up(ranks: list[_Rank], status: str) -> list[Failure]:
    """The ranks that still run have failed; in a timeout they are asked for their stacks, which go to their logs."""
    late = [rank for rank in ranks if not rank.finished]
    if status == "timeout":
        for rank in late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
    return [Failure(rank.number, status, "still ran") for rank in late]


def _end(ranks: list[_Rank]) -> None:
    """No process is left: the finished ones get a moment to leave, the others are killed."""
    deadline = time.monotonic() + GRACE_S
    for rank in ranks:
        if rank.finished:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        if rank.process.is_alive():
            rank.process.kill()
        rank.process.join()
        rank.pipe.close()


def _tidy(folders: set[str]) -> None:
    for folder in folders:
        from .zero.nvme import sweep

        sweep(folder)


def _oom_kills() -> int:
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


# -- inside a rank ------------------------------------------------------------------------------------------


def _rank_main(worker: Worker, job: Any, pipe: Connection, log: str) -> None:
    _detach(log)
    try:
        result = worker(job, lambda value: _send(pipe, "progress", value))
        gc.disable()  # a process group that is collected, interpreter held, may wait for a thread that waits for that
        _send(pipe, "result", result)
    except BaseException as error:
        traceback.print_exc()
        _send(pipe, "error", _classify(error))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.close()
    os._exit(0)  # nothing of the cell is left to tidy up, and a hung library thread must not keep us


def _send(pipe: Connection, kind: str, value: Any) -> None:
    """By plain pickle: multiprocessing's own would pass tensors as handles that die with this process."""
    pipe.send_bytes(pickle.dumps((kind, value)))


def _detach(log: str) -> None:
    """Dies with the fork server and with the process that asked for us, leaves Ctrl-C to it, writes to `log`."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        with contextlib.suppress(OSError):  # if memory runs out, the kernel is to take a rank and not the sweep
            Path("/proc/self/oom_score_adj").write_text("1000")
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def _leave_with_parent() -> None:
    """The fork server lives on while ranks do, so its death tells nothing of the process that launched us."""
    parent = mp.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _classify(error: BaseException) -> tuple[str, str]:
    import torch

    text = f"raised {type(error).__name__}: {str(error).strip() or 'no message'}"
    out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or any(w in text for w in OUT_OF_MEMORY)
    return ("oom" if out_of_memory else "crash"), text.splitlines()[0]
