"""The processes of a sweep under fire, by a mark in their environment, and how far the sweep is.

Only processes that carry the mark of this campaign are ever signaled: the value is drawn anew for each, and children
inherit it, also those that have lost their parent.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zerobench.results.board import board_folders, read_board
from zerobench.results.folders import PARTIAL

MARK = "ZEROBENCH_FIRE"
"""Environment variable; its value is CAMPAIGN:START."""

COMMAND, RANK, SERVER, TRACKER, AGENT, JOB, NODE, HELPER = (
    "command", "rank", "fork server", "tracker", "agent", "job", "node", "helper"
)  # fmt: skip
"""Roles of victims. The tracker is multiprocessing's, of its shared resources; a job is a launcher's process, or the
command that it has started; a node is SLURM's, with all that runs on it; a helper any other program.
"""

PROGRAMS = (
    ("resource_tracker", TRACKER),
    ("multiprocessing.forkserver", SERVER),
    ("torch.distributed.run", AGENT),
    ("submitit.core._submit", JOB),
    ("loky", JOB),
    ("tests.fire.models", COMMAND),
)
"""Words of a process's command line -> its role."""


@dataclass(frozen=True)
class Victim:
    """A living process of the sweep. `start`: which start of the command it belongs to. `job`: its job's id at SLURM,
    or "".
    """

    pid: int
    role: str
    start: int
    job: str = ""


@dataclass(frozen=True)
class Scene:
    """The instant of a sweep. `launch`: the run in work, without its attempt; `phase`: starting, between, or a
    pass; writing once all passes have logs of their end.
    """

    launch: str
    phase: str


def victims(campaign: str) -> list[Victim]:
    """Returns the living processes of a campaign."""
    mark = f"{MARK}={campaign}:".encode()
    found = {}
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if (start := _value(environment, mark)) and pid != os.getpid():
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                found[pid] = int(start), line, _value(environment, b"SLURM_JOB_ID=")
    roles = {
        pid: next((role for word, role in PROGRAMS if word in line), HELPER) for pid, (_, line, _) in found.items()
    }
    for pid, role in list(roles.items()):
        if role == SERVER and roles.get(_parent(pid)) in (SERVER, RANK):  # forked from it, with its command line
            roles[pid] = RANK
        if role == COMMAND and roles.get(_parent(pid)) == JOB:
            roles[pid] = JOB
    return [Victim(pid, roles[pid], start, job) for pid, (start, _, job) in sorted(found.items())]


def _value(environment: list[bytes], prefix: bytes) -> str:
    return next((word[len(prefix) :].decode() for word in environment if word.startswith(prefix)), "")


def send(campaign: str, pid: int, number: signal.Signals) -> bool:
    """Sends a signal to a process of the campaign; False where it has ended, whatever has its number now."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if f"{MARK}={campaign}:".encode() not in Path(f"/proc/{pid}/environ").read_bytes():
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def _parent(pid: int) -> int:
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def scene(where: Path) -> Scene:
    """Returns what the sweep into a results folder is doing now."""
    for partial in _partials(where):
        with suppress(OSError):
            modes = sorted((partial / "logs").iterdir(), key=lambda path: path.stat().st_mtime)
            waits = next((f"{one.name} pass" for one in reversed(modes) if one.is_dir()), "claimed")
            written = any(partial.glob("*.parquet"))
            return Scene(_prefix(partial), "writing" if written else waits)
    boards = (
        [board for path in board_folders(where) if (board := read_board(path)) is not None] if where.is_dir() else []
    )
    return Scene("", "between launches" if boards else "starting")


def _partials(where: Path) -> Iterator[Path]:
    for folder in (where, where / ".references"):
        if folder.is_dir():
            yield from sorted(folder.glob(f"{PARTIAL}*"))


def _prefix(partial: Path) -> str:
    return partial.name.removeprefix(PARTIAL).rpartition("-")[0]


def finished(where: Path) -> set[str]:
    """Returns the names of the runs in a results folder."""
    if not where.is_dir():
        return set()
    return {entry.name for entry in os.scandir(where) if not entry.name.startswith(".") and entry.is_dir()}
