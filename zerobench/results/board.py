"""The board of a sweep: its launches and their progress, for processes that follow it, including on other machines.

A board is a hidden folder inside the results folder, claimed by the sweep (host/temporary.py), with one file that is
replaced atomically. The sweep removes the board at its end, and the next sweep removes that of a killed sweep.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..host.files import read_text
from ..host.temporary import Aside, claim

BOARD = ".sweep-"
"""Prefix of a board's folder."""

FILE = "board.json"

EVERY_S = 1.0
"""Shortest interval, in seconds, between two versions of a board during a launch."""


WAITING, SUBMITTED, RUNNING = "waiting", "submitted", "running"
"""States of a launch that is not done."""

SKIPPED = "skipped"

AWAITS = "awaits"
"""Mode of a running launch that another sweep is measuring."""


@dataclass
class BoardLaunch:
    """A launch of a sweep. `state`: waiting, submitted (its job is waiting for the launcher), running, skipped, reused
    or its run's status. `mode`: the pass, or AWAITS; `step`: its progress, "3/10". `seconds`: elapsed time, or its
    duration.
    """

    name: str
    state: str = "waiting"
    mode: str = ""
    step: str = ""
    loss: float | None = None
    peak_bytes: int | None = None
    seconds: float = 0.0

    @property
    def is_done(self) -> bool:
        """True once it has ended, or will not run."""
        return self.state not in (WAITING, SUBMITTED, RUNNING)


@dataclass(frozen=True)
class Board:
    """A sweep's report on itself. `current`: index of its current launch; `left`: the remaining time, as text."""

    path: Path
    host: str
    pid: int
    current: int
    left: str
    launches: list[BoardLaunch]


@dataclass
class BoardWriter:
    """The boards of one sweep, one per results folder. A folder that cannot be written to has none: a sweep does not
    fail because it cannot be followed.
    """

    boards: dict[Path, Aside | None] = field(default_factory=dict)
    _written: float = 0.0

    def put_up(self, where: Path) -> None:
        """Creates a board in a results folder, unless this sweep already has one there."""
        if where not in self.boards:
            self.boards[where] = None
            with contextlib.suppress(OSError):
                where.mkdir(parents=True, exist_ok=True)
                self.boards[where] = claim(where, BOARD, str(os.getpid()), mode=0o777)

    def write(self, launches: Sequence[BoardLaunch], current: int, left: Callable[[], str], at_once: bool) -> None:
        """Rewrites the boards; unless `at_once`, at most once every EVERY_S."""
        now = time.monotonic()
        boards = [board for board in self.boards.values() if board is not None]
        if not boards or (not at_once and now - self._written < EVERY_S):
            return
        self._written = now
        said: dict[str, Any] = {"host": platform.node(), "pid": os.getpid(), "current": current, "left": left()}
        said["launches"] = [{one.name: getattr(launch, one.name) for one in fields(BoardLaunch)} for launch in launches]
        for board in boards:
            with contextlib.suppress(OSError):
                aside = board.path / f".{FILE}"
                aside.write_text(json.dumps(said))
                aside.replace(board.path / FILE)

    def take_down(self) -> None:
        """Removes the boards."""
        for board in self.boards.values():
            if board is not None:
                shutil.rmtree(board.path, ignore_errors=True)
                board.release()
        self.boards.clear()


def board_folders(where: Path) -> list[Path]:
    """Returns the boards of a results folder, including those of killed sweeps."""
    return sorted(path for path in where.glob(f"{BOARD}*") if path.is_dir() and not path.is_symlink())


def read_board(path: Path) -> Board | None:
    """Reads a board; None if it was removed, has no content yet, or is not a board."""
    try:
        said = json.loads(read_text(path / FILE))
        launches = [
            BoardLaunch(**{one.name: launch[one.name] for one in fields(BoardLaunch)}) for launch in said["launches"]
        ]
        return Board(path, str(said["host"]), int(said["pid"]), int(said["current"]), str(said["left"]), launches)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
