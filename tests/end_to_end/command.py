"""Runs the command line as a user would, from another folder."""

import io
import signal
import subprocess
import sys
import warnings
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from zerobench import cli

ROOT = Path(__file__).parents[2]

SMALL = [
    "model=gpt_tiny", "model.layers=1", "model.hidden=16", "model.heads=2", "measure=quick", "launch.threads=1",
    "sequence=16", "device=cpu"
]  # fmt: skip
"""A small cell. Threads that wait for one another on a busy machine would be most of its time."""


def heed_ctrl_c() -> None:
    """For a child of tests that a script has put in the background: its shell makes them, and theirs, ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def start(cwd: Path, *arguments: str, **more: Any) -> subprocess.Popen[str]:
    """Starts the command line in a process of its own, whose output is read later."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more
    command = [sys.executable, "-m", "zerobench", *arguments]
    return subprocess.Popen(command, cwd=cwd, text=True, preexec_fn=heed_ctrl_c, **streams)


def zerobench(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs the command line in this process: one of its own, and its fork server, load for four seconds of a core.

    What only a process has (signals, pipes, the interpreter's end) is tested on processes.
    """
    out, errors = io.StringIO(), io.StringIO()
    with chdir(cwd), redirect_stdout(out), redirect_stderr(errors), warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = cli._print_warning
        code = cli.run([*arguments])
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), errors.getvalue())
