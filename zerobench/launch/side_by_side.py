"""Jobs side by side, each in a fresh process of its own, as many at once as asked for. They are no ranks of one pass:
the end of one is no other's.

waiting    jobs in their order
running    job -> its process, and the instant at which its time is over
outcomes   job -> its one result, or its failure: crash, oom or timeout
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from . import fork_server
from .rank_main import Worker
from .start_ranks import Interrupted, Outcome, RankProcess, end, listen, start

Heard = Callable[[int, Any], None]
"""Takes a job's number and news of it."""


def launch_each(
    worker: Worker, jobs: Sequence[Any], log_dir: Path, timeout_s: float, at_once: int, heard: Heard = lambda *_: None
) -> list[Outcome]:
    """Runs `worker(job, tell)` in a process for each of `jobs`, and returns their outcomes in the order of the jobs.

    What a worker passes to `tell` goes to `heard` with the job's number, and so does the outcome as soon as it is
    there. Raises Interrupted, with no process left, when the user interrupts.
    """
    waiting, outcomes = list(range(len(jobs))), dict[int, Outcome]()
    running: dict[RankProcess, float] = {}
    log_dir.mkdir(parents=True, exist_ok=True)
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                number = waiting.pop(0)
                log = log_dir / f"job{number}.log"
                running[start(fork_server.context(), worker, jobs[number], number, log)] = time.monotonic() + timeout_s
            _listen_once(running, heard)
            for job in [job for job, deadline in running.items() if _is_over(job, deadline)]:
                del running[job]
                end([job])
                outcomes[job.number] = _outcome_of(job, timeout_s)
                heard(job.number, outcomes[job.number])
    except KeyboardInterrupt as stop:
        raise Interrupted from stop
    finally:
        end(list(running))
    return [outcomes[number] for number in range(len(jobs))]


def _listen_once(running: dict[RankProcess, float], heard: Heard) -> None:
    """Waits for news of any job, or until the first one's time is over."""
    watched: dict[Any, RankProcess] = {job.pipe: job for job in running} | {
        job.process.sentinel: job for job in running
    }
    for ready in wait(list(watched), timeout=max(0.0, min(running.values()) - time.monotonic())):
        job = watched[ready]
        if not (job.finished or job.error):
            listen(job, partial(heard, job.number))


def _is_over(job: RankProcess, deadline: float) -> bool:
    return job.finished or job.error is not None or time.monotonic() >= deadline


def _outcome_of(job: RankProcess, timeout_s: float) -> Outcome:
    if job.finished:
        return Outcome("ok", "", [job.result])
    if job.error:
        return Outcome(*job.error, [])
    return Outcome("timeout", f"was not done after {timeout_s:g} s", [])
