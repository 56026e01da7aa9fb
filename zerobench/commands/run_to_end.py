"""Another program, run to its end: no process of its group is left when it has ended, or has been ended."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

INTERRUPTED = (130, -signal.SIGINT)
GRACE_S = 5.0
"""Seconds between the request to end and the end by force."""


@dataclass(frozen=True)
class Ended:
    """How a command has ended: its exit code, None where it took too long, and the last lines of its output."""

    code: int | None
    said: str


def run_to_end(words: Sequence[str], where: Path, variables: dict[str, str], timeout_s: float) -> Ended:
    """Runs a program in a folder; `variables`: its whole environment.

    Raises KeyboardInterrupt where the program was interrupted.
    """
    try:
        process = subprocess.Popen(
            words, cwd=where, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True, text=True, errors="replace",
        )  # fmt: skip
    except OSError as error:
        return Ended(127, f"{words[0]} cannot be run: {error.strerror}")
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return Ended(None, f"it took more than {timeout_s:g} s")
    finally:
        _end(process)
        if process.stdout:
            process.stdout.close()
    if process.returncode in INTERRUPTED:
        raise KeyboardInterrupt
    lines = [line for line in output.splitlines() if line.strip()]
    return Ended(process.returncode, lines[-1].strip().removeprefix("zerobench: ") if lines else "")


def _end(process: subprocess.Popen[str]) -> None:
    """Ends what is left of the command's group of processes: asked first, then by force."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
