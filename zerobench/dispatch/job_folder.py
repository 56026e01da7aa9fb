"""The folder through which the composing process and a job communicate, whichever machine the job runs on.

It is JOBS/NUMBER-*, hidden in the results folder, on a file system that both can access::

    order.json   from the composing process: the launches to run, the command that runs them, the launcher's name
    stop         from the composing process: exists once the job must end, or must not begin
    rows.json    from the job: the rows of its launches so far, in order, replaced as a whole
    unwritten.json  from the job: runs that could not be written to their results folder, if any
    .sweep-*     the job's board, while it runs (results/board.py)
    log*.txt     output of the job's processes, one file per task
    lease-*      leases (results/leftovers.py) of the job's tasks, while they live; that of the composing
                 process is NAME.lease, next to the folder
    .submitit/   from submitit: files whose names begin with the job's id

The job runs only one thing from it: its own interpreter with the command that started the composing process.

States of a job, as the composing process sees it:

waiting    in the list of jobs, without a folder yet
under way  launched from a thread; `error` is the exception of the plugin, `code` the exit code of the job's command
over       the plugin has returned; or all rows were taken AFTER_S ago, as for a job that is requeued needlessly
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import SoftFileLease

from ..config.cell import Cell, CellConfig
from ..config.launcher import Resources
from ..host.files import read_text, replace_text
from ..host.temporary import lease_folder, remove
from ..results.board import BoardLaunch, board_folders, read_board
from ..results.leftovers import JOBS, ORDER
from ..results.rescue import Unwritten
from ..sweep.sweep import CellLaunch

LOG_BYTES = 64 * 2**10
"""Maximum bytes read from the end of a log."""


@dataclass(frozen=True)
class JobFolder:
    """Reads and writes the files of one job. `lease`: of the composing process."""

    path: Path
    lease: SoftFileLease | None = None

    @classmethod
    def make(
        cls, results_dir: Path, number: int, launches: Sequence[CellLaunch], launcher: str, board: str = ""
    ) -> JobFolder:
        """Creates the folder of a new job. `board`: name of the composing process's board. Raises OSError."""
        name = f"{number}-{uuid.uuid4().hex[:8]}"
        jobs = (results_dir / JOBS).absolute()
        aside = cls(jobs / f".{name}")  # until it has its lease and its order: no other process takes it for abandoned
        with suppress(FileNotFoundError):  # JOBS was empty, and another process removed it between two calls
            aside.path.mkdir(parents=True)
        aside.path.mkdir(parents=True, exist_ok=True)
        lease = lease_folder(jobs / name)
        told = [  # without launch.retry: another attempt is another job's
            {
                "name": one.name,
                "config": one.cell.changed(launch=replace(one.cell.config.launch, retry=[])).config.as_dict(),
                "problems": one.cell.problems,
                "repeat": one.repeat,
            }
            for one in launches
        ]
        order = {"launcher": launcher, "board": board, "command": own_command(), "cwd": os.getcwd(), "launches": told}
        aside._replace(ORDER, order)
        return cls(aside.path.rename(jobs / name), lease)

    @property
    def name(self) -> str:
        return f"zerobench-{self.path.name}"

    def order(self) -> dict[str, Any]:
        """Returns the order as it was written. Raises ValueError if it is damaged, or OSError."""
        path = self.path / ORDER
        try:
            return dict(json.loads(read_text(path)))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}: the order of a job is damaged: {error!s:.200}") from error

    def launches(self) -> list[CellLaunch]:
        """Returns the launches to run; equal cells are one object. Raises as `order` does."""
        cells: dict[str, Cell] = {}
        found = []
        try:
            for one in self.order()["launches"]:
                key = json.dumps([one["config"], one["problems"]], sort_keys=True)
                cell = cells.setdefault(key, Cell(CellConfig.from_dict(one["config"]), tuple(one["problems"])))
                found.append(CellLaunch(str(one["name"]), cell, int(one["repeat"])))
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{self.path / ORDER}: it names no launches: {error!s:.200}") from error
        return found

    def write_rows(self, rows: Sequence[dict[str, Any] | None]) -> None:
        """Replaces the rows of the first launches; None for a launch skipped because another one of its cell failed."""
        self._replace("rows.json", list(rows))

    def rows(self) -> list[dict[str, Any] | None]:
        """Returns the rows so far; before the job's end there are fewer rows than launches."""
        try:
            rows: Any = json.loads(read_text(self.path / "rows.json"))
        except (OSError, ValueError, RecursionError):  # not there yet, or its name is seen before its bytes
            return []
        whole = isinstance(rows, list) and all(one is None or isinstance(one, dict) for one in rows)
        return rows if whole else []

    def write_unwritten(self, lost: Sequence[Unwritten]) -> None:
        """Replaces the list of runs that the job could not write to their results folder, with the job's machine."""
        host = socket.gethostname()
        told = [(str(one.results_dir), f"{one.error}, on {host}", one.kept and str(one.kept)) for one in lost]
        self._replace("unwritten.json", told)

    def unwritten(self) -> list[Unwritten]:
        try:
            told: Any = json.loads(read_text(self.path / "unwritten.json"))
            return [Unwritten(Path(where), str(error), Path(kept) if kept else None) for where, error, kept in told]
        except (OSError, ValueError, TypeError, RecursionError):  # none, mostly
            return []

    def board(self) -> list[BoardLaunch]:
        """Returns the launches as shown on the job's board; empty until the board exists."""
        boards = [board for path in board_folders(self.path) if (board := read_board(path)) is not None]
        return boards[-1].launches if boards else []

    def ask_to_stop(self) -> None:
        (self.path / "stop").touch()

    @property
    def is_to_stop(self) -> bool:
        return (self.path / "stop").exists()

    def log(self, task: str) -> Path:
        return self.path / f"log-{task}.txt"

    def last_words(self) -> str:
        """Returns the end of each of its logs."""
        parts = []
        for path in [*sorted(self.path.glob("log-*.txt")), *sorted(self.path.glob(".submitit/*_log.*"))]:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - LOG_BYTES))
                parts.append(f"== {path.name}\n{file.read().decode(errors='replace')}")
        return "\n".join(parts)

    def remove(self) -> None:
        """Removes the folder; its rows are in the results folder."""
        if self.lease is not None:
            self.lease.release()
        remove(self.path)
        with suppress(OSError):  # others' jobs are in it
            self.path.parent.rmdir()

    def _replace(self, name: str, value: Any) -> None:
        replace_text(self.path / name, json.dumps(value))


def own_command() -> list[str]:
    """Returns the command that started this process, perhaps a user's script, which a job needs to know its models."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        module = spec.name.removesuffix(".__main__")
        return [sys.executable, "-m", module, *sys.argv[1:]]
    return [sys.executable, str(Path(sys.argv[0]).absolute()), *sys.argv[1:]]


AFTER_S = 30.0
"""Seconds for a job to end after its last row."""


@dataclass(eq=False)
class LauncherJob:
    """A job of the launcher. `taken`: number of launches whose rows have been taken. `started`: index of a launch ->
    time since the epoch at which it began. `has_begun`: its command has reached a launch, even if it only waits for
    another sweep's. `again`: launches that another job will run.
    """

    number: int
    launches: list[CellLaunch]
    resources: Resources
    folder: JobFolder | None = None
    error: BaseException | None = None
    code: int | None = None
    taken: int = 0
    complete_since: float | None = None
    started: dict[int, float] = field(default_factory=dict)
    has_begun: bool = False
    again: list[CellLaunch] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def has_ended(self) -> bool:
        return self.ended.is_set()

    @property
    def is_left_over(self) -> bool:
        """Whether all rows were taken AFTER_S ago and the plugin still waits."""
        return self.complete_since is not None and time.monotonic() > self.complete_since + AFTER_S
