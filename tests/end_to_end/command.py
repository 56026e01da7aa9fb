"""Runs the command line as a user would, from another folder."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SMALL = [
    "model=gpt_tiny",
    "model.layers=1",
    "model.hidden=16",
    "model.heads=2",
    "measure=quick",
    "sequence=16",
    "device=cpu",
]


def heed_ctrl_c() -> None:
    """For a child of tests that a script has put in the background: its shell makes them, and theirs, ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def zerobench(*arguments: str, cwd: Path, timeout: float = 180) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zerobench", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout)
