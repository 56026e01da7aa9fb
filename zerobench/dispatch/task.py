"""The function that a launcher's job calls: it starts the command again in its own process, and supervises it.

A launcher may call it in a thread, a reused worker or a SLURM task; the command needs a main thread, for signals, and a
new interpreter. In a job of several tasks each starts the command, and they join as ranks do.

stop       if the folder has a file of that name, the command gets SIGTERM, and GRACE_S later SIGKILL
ended      SLURM has ended the command by a signal: it may requeue the job, so the task leaves no result, which would
           end the job for submitit
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..host.leases import TASK_LEASE, take
from ..host.signals import end_with_parent

JOB = "ZEROBENCH_JOB"
"""Environment variable with the job's folder, for the command."""

POLL_S = 0.2
GRACE_S = 20.0

ENDED = 130
"""Exit code of a command that was ended by a signal."""

BY_SIGNAL = (ENDED, -signal.SIGTERM)
"""Exit codes of a command ended by a signal; SLURM may send a second signal before the first is handled."""

EXECUTOR = "SUBMITIT_EXECUTOR"
"""Environment variable in which submitit passes the launcher's name to a job."""

TASK_NUMBERS = ("SLURM_PROCID",)


def run_job(folder: str, command: Sequence[str], cwd: str, _config: Any = None) -> int | None:
    """Runs the command of the job in `folder` to its end, and returns its exit code; None if it must not begin."""
    place, begun = Path(folder), next(filter(None, map(os.environ.get, TASK_NUMBERS)), "0")
    if (place / "stop").exists() or not place.is_dir():
        return None
    try:
        opened = (place / f"log-{begun}.txt").open("ab")
    except FileNotFoundError:  # a sweep has removed the folder just now
        return None
    with opened as log, _leased(place / f"{TASK_LEASE}{begun}"):
        process = subprocess.Popen(
            list(command), cwd=cwd, env={**os.environ, JOB: folder}, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            while process.poll() is None and not (place / "stop").exists():
                time.sleep(POLL_S)
        finally:
            _end(process)
    if process.returncode in BY_SIGNAL and os.environ.get(EXECUTOR) == "slurm" and not (place / "stop").exists():
        raise SystemExit(ENDED)
    return process.returncode


@contextmanager
def _leased(path: Path) -> Iterator[None]:
    """Keeps the task's lease, so that the folder counts as in use even if the composing process is killed."""
    lease = take(path)
    try:
        yield
    finally:
        if lease is not None:
            lease.release()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def leave_signals_to_task() -> None:
    """Makes the command end with its task, which a launcher may kill alone, and leaves warning signals to the task."""
    end_with_parent()
    for warning in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(warning, signal.SIG_IGN)
