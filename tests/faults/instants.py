"""A sweep that ends at an exact instant: before its k-th change of the results folder, by SIGKILL or as by Ctrl-C.

change     a call that changes files: open for writing, mkdir, rename, remove, rmdir, and what takes a lock
instant    the moment before a change, numbered from 1

The sweep runs in a process forked for it, with the records of ranks that an earlier run has left, so that only files
are at work. Python's audit events tell of each change; what C++ writes (parquet) lies between two of them.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from zerobench.config.cell import Cell
from zerobench.host.signals import interrupt_on
from zerobench.rank_record import RankRecord
from zerobench.sweep import cell as life
from zerobench.sweep.command import run_cells

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "fcntl.flock", "fcntl.lockf", "shutil.rmtree")
LOCKS = ("fcntl.flock", "fcntl.lockf")
"""Events of a descriptor, which does not tell its file."""

Records = dict[str, list[RankRecord]]
"""Cell -> what its ranks returned, by cell_id."""


def is_change(event: str, arguments: Sequence[Any], below: str) -> bool:
    """Returns True where an audit event is a change below a folder."""
    if event == "open":
        path, mode, flags = (*arguments, None, None)[:3]
        writes = bool(flags and flags & WRITES) or bool(mode and set(mode) & set("wax+"))
        return writes and str(path).startswith(below)
    return event in LOCKS or (event in CHANGES and str(arguments[0]).startswith(below))


def age(where: Path) -> None:
    """Makes what is hidden in a results folder as old as if it had been left long ago."""
    for path in where.glob(".*"):
        os.utime(path, (0, 0))


def run_until(
    instant: int, how: signal.Signals, cells: list[Cell], records: Records, where: Path, counted: Path | None = None
) -> int:
    """Runs a sweep in a process of its own that ends at an instant; returns its wait status.

    `instant`: 0 for a sweep that nothing ends; the number of its changes is then written to the file `counted`.
    """
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    code = 99
    try:
        changes = _end_at(instant, how, str(where))
        code = _sweep(cells, records)
        if counted is not None:
            counted.write_text(str(changes()))
    finally:
        os._exit(code)


def _end_at(instant: int, how: signal.Signals, below: str) -> Callable[[], int]:
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if is_change(event, arguments, below):
            seen += 1
            if seen == instant:
                os.kill(os.getpid(), how)

    sys.addaudithook(hook)
    return lambda: seen


def _sweep(cells: list[Cell], records: Records) -> int:
    life._run_passes = lambda cell, *_: ("ok", "", records[cell.cell_id])
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            with interrupt_on([signal.SIGTERM]):
                return run_cells(cells)[0]
        except KeyboardInterrupt:
            return 130
