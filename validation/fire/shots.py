"""The processes of a sweep under fire, and the marksman, who draws shots by a seed and fires them from a thread.

Only processes that carry the mark of this campaign in their environment are ever signaled: the value is drawn again for
each campaign, and children inherit it, also those that have lost their parent. A shot's draw has an *aim*, the instant
that it waits for:

    any        a pause after the shot before
    running    a launch is under way, and some time of it is over
    written    a run has just got its name: its parent's verdict, board and next claim follow
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from zerobench.results.board import board_folders, read_board
from zerobench.results.folders import PARTIAL

if TYPE_CHECKING:
    from .campaign import SlurmNodes

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
    ("validation.fire.models", COMMAND),
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
class SweepScene:
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
    """Sends a signal to a process of the campaign; False if it has ended, whatever has its number now."""
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


def scene(where: Path) -> SweepScene:
    """Returns what the sweep into a results folder is doing now."""
    for partial in _partials(where):
        with suppress(OSError):
            modes = sorted((partial / "logs").iterdir(), key=lambda path: path.stat().st_mtime)
            waits = next((f"{one.name} pass" for one in reversed(modes) if one.is_dir()), "claimed")
            written = any(partial.glob("*.parquet"))
            return SweepScene(_prefix(partial), "writing" if written else waits)
    boards = (
        [board for path in board_folders(where) if (board := read_board(path)) is not None] if where.is_dir() else []
    )
    return SweepScene("", "between launches" if boards else "starting")


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


LOOK_S = 0.02

ROLES = {COMMAND: 4.0, RANK: 4.0, SERVER: 1.0, TRACKER: 0.5, AGENT: 2.0, JOB: 2.0, NODE: 3.0, HELPER: 0.5}
SIGNALS = {signal.SIGKILL: 4.0, signal.SIGTERM: 3.0, signal.SIGINT: 1.0, signal.SIGSTOP: 2.0}
AIMS = {"any": 2.0, "running": 5.0, "written": 3.0}
"""Weights of the draw."""

NODES_AWAY = 5.0
"""Time that a lost node is away, as a multiple of that for which a process is stopped."""


@dataclass
class Shot:
    """A shot as it was fired. `at`: UTC; `paused_s`: time until SIGCONT, of a SIGSTOP, or until a lost node is back.
    `outcome`: filled in when all is over: the run whose status it explains, "its partial run was removed", or "none".
    """

    number: int
    start: int
    command: str
    at: str
    aim: str
    signal: str
    role: str
    pid: int
    launch: str
    phase: str
    paused_s: float | None = None
    outcome: str | None = None


@dataclass(frozen=True)
class DrawnShot:
    """A shot as the seed has it."""

    aim: str
    signal: signal.Signals
    role: float
    pause_s: float
    delay: float
    stopped_s: float


def draw(seed: str, number: int, every_s: float) -> DrawnShot:
    """Draws shot `number` of a seed; two pauses are `every_s` apart in the mean."""
    random = Random(f"{seed} {number}")
    aim = random.choices(list(AIMS), list(AIMS.values()))[0]
    what = random.choices(list(SIGNALS), list(SIGNALS.values()))[0]
    return DrawnShot(
        aim, what, random.random(), random.uniform(0, 2 * every_s), random.random(), random.uniform(0.2, 3.0)
    )


class Marksman(threading.Thread):
    """Fires at one start of a command until told to stop. `pids`: all processes that were seen."""

    def __init__(
        self, campaign: str, seed: str, where: Path, start: int, command: str, first: int, every_s: float,
        nodes: SlurmNodes | None,
    ) -> None:  # fmt: skip
        super().__init__(name="marksman", daemon=True)
        self.campaign, self.seed, self.where, self.number, self.command = campaign, seed, where, start, command
        self.next, self.every_s, self.nodes = first, every_s, nodes
        self.shots: list[Shot] = []
        self.pids: set[int] = set()
        self._over = threading.Event()

    def stop(self) -> None:
        """Ends the thread after a shot that is under way."""
        self._over.set()
        self.join()

    def end_all(self) -> list[Shot]:
        """Kills all processes of the start; returns these shots."""
        before = len(self.shots)
        for one in victims(self.campaign):
            self._fire(DrawnShot("end", signal.SIGKILL, 0.0, 0.0, 0.0, 0.0), one)
        fired, self.shots = self.shots[before:], self.shots[:before]
        return fired

    def run(self) -> None:
        """Fires one shot after another."""
        while not self._over.is_set():
            drawn = draw(self.seed, self.next, self.every_s)
            if self._wait(drawn) and (victim := self._choose(drawn)) is not None:
                self._fire(drawn, victim)

    def _wait(self, drawn: DrawnShot) -> bool:
        """Waits for the shot's instant; False if the start is over before it."""
        if self._over.wait(drawn.pause_s):
            return False
        if drawn.aim == "running":
            return self._until(lambda: " pass" in scene(self.where).phase) and not self._over.wait(2 * drawn.delay)
        if drawn.aim == "written":
            before = finished(self.where)
            return self._until(lambda: finished(self.where) > before) and not self._over.wait(0.05 * drawn.delay)
        return True

    def _until(self, there: Callable[[], bool]) -> bool:
        while not there():
            if self._over.wait(LOOK_S):
                return False
        return True

    def _choose(self, drawn: DrawnShot) -> Victim | None:
        """Returns the victim: a role among those that live, by their weights, then one of the role."""
        living = [one for one in victims(self.campaign) if one.start == self.number or one.job]
        self.pids |= {one.pid for one in living}
        if drawn.aim == "written":
            living = [one for one in living if one.role in (COMMAND, JOB)] or living
        elif self.nodes is not None:
            living += [Victim(pid, NODE, self.number) for pid in self.nodes.living()]
        if not living:
            return None
        random = Random(drawn.role)
        roles = sorted({one.role for one in living})
        role = random.choices(roles, [ROLES[one] for one in roles])[0]
        return random.choice([one for one in living if one.role == role])

    def _fire(self, drawn: DrawnShot, victim: Victim) -> None:
        if victim.role == NODE:
            self._lose_node(drawn, victim)
            return
        seen, at = scene(self.where), _now()
        if not send(self.campaign, victim.pid, drawn.signal):  # it ended by itself: no shot
            return
        stops = drawn.signal == signal.SIGSTOP
        self._note(drawn.aim, drawn.signal, victim, at, seen, drawn.stopped_s if stops else None)
        if stops:
            time.sleep(drawn.stopped_s)
            send(self.campaign, victim.pid, signal.SIGCONT)

    def _lose_node(self, drawn: DrawnShot, victim: Victim) -> None:
        """Kills a node with all that runs on it, whatever signal was drawn; no shot is fired until it is back."""
        assert self.nodes is not None
        name = self.nodes.living().get(victim.pid)
        if name is None:  # its slurmd has ended by itself: no shot
            return
        away = NODES_AWAY * drawn.stopped_s
        self._note(drawn.aim, signal.SIGKILL, victim, _now(), scene(self.where), away)
        self.nodes.lose(name, away)

    def _note(
        self, aim: str, number: signal.Signals, victim: Victim, at: str, seen: SweepScene, paused_s: float | None
    ) -> None:
        paused = None if paused_s is None else round(paused_s, 2)
        self.shots.append(
            Shot(self.next, self.number, self.command, at, aim, number.name, victim.role, victim.pid,
                 seen.launch, seen.phase, paused)
        )  # fmt: skip
        self.next += 1


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
