"""The marksman: draws shots by a seed and fires them at a running sweep, from a thread.

A shot's draw has an *aim*, the instant that it waits for:

    any        a pause after the shot before
    running    a launch is under way, and some time of it is over
    written    a run has just got its name: its parent's verdict, board and next claim follow
"""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random

from .nodes import Nodes
from .victims import (
    AGENT,
    COMMAND,
    HELPER,
    JOB,
    NODE,
    RANK,
    SERVER,
    TRACKER,
    Scene,
    Victim,
    finished,
    scene,
    send,
    victims,
)

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
class Draw:
    """A shot as the seed has it."""

    aim: str
    signal: signal.Signals
    role: float
    pause_s: float
    delay: float
    stopped_s: float


def draw(seed: str, number: int, every_s: float) -> Draw:
    """Draws shot `number` of a seed; two pauses are `every_s` apart in the mean."""
    random = Random(f"{seed} {number}")
    aim = random.choices(list(AIMS), list(AIMS.values()))[0]
    what = random.choices(list(SIGNALS), list(SIGNALS.values()))[0]
    return Draw(aim, what, random.random(), random.uniform(0, 2 * every_s), random.random(), random.uniform(0.2, 3.0))


class Marksman(threading.Thread):
    """Fires at one start of a command until told to stop. `pids`: all processes that were seen."""

    def __init__(
        self, campaign: str, seed: str, where: Path, start: int, command: str, first: int, every_s: float,
        nodes: Nodes | None,
    ) -> None:  # fmt: skip
        super().__init__(name="marksman", daemon=True)
        self.campaign, self.seed, self.where, self.start_number, self.command = campaign, seed, where, start, command
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
            self._fire(Draw("end", signal.SIGKILL, 0.0, 0.0, 0.0, 0.0), one)
        fired, self.shots = self.shots[before:], self.shots[:before]
        return fired

    def run(self) -> None:
        """Fires one shot after another."""
        while not self._over.is_set():
            drawn = draw(self.seed, self.next, self.every_s)
            if self._wait(drawn) and (victim := self._choose(drawn)) is not None:
                self._fire(drawn, victim)

    def _wait(self, drawn: Draw) -> bool:
        """Waits for the shot's instant; False where the start is over before it."""
        if self._over.wait(drawn.pause_s):
            return False
        if drawn.aim == "running":
            return self._until(lambda: " pass" in scene(self.where).phase) and not self._over.wait(2 * drawn.delay)
        if drawn.aim == "written":
            before = finished(self.where)
            return self._until(lambda: finished(self.where) > before) and not self._over.wait(0.05 * drawn.delay)
        return True

    def _until(self, there) -> bool:
        while not there():
            if self._over.wait(LOOK_S):
                return False
        return True

    def _choose(self, drawn: Draw) -> Victim | None:
        """Returns the victim: a role among those that live, by their weights, then one of the role."""
        living = [one for one in victims(self.campaign) if one.start == self.start_number or one.job]
        self.pids |= {one.pid for one in living}
        if drawn.aim == "written":
            living = [one for one in living if one.role in (COMMAND, JOB)] or living
        elif self.nodes is not None:
            living += [Victim(pid, NODE, self.start_number) for pid in self.nodes.living()]
        if not living:
            return None
        random = Random(drawn.role)
        roles = sorted({one.role for one in living})
        role = random.choices(roles, [ROLES[one] for one in roles])[0]
        return random.choice([one for one in living if one.role == role])

    def _fire(self, drawn: Draw, victim: Victim) -> None:
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

    def _lose_node(self, drawn: Draw, victim: Victim) -> None:
        """Kills a node with all that runs on it, whatever signal was drawn; no shot is fired until it is back."""
        assert self.nodes is not None
        name = self.nodes.living().get(victim.pid)
        if name is None:  # its slurmd has ended by itself: no shot
            return
        away = NODES_AWAY * drawn.stopped_s
        self._note(drawn.aim, signal.SIGKILL, victim, _now(), scene(self.where), away)
        self.nodes.lose(name, away)

    def _note(
        self, aim: str, number: signal.Signals, victim: Victim, at: str, seen: Scene, paused_s: float | None
    ) -> None:
        paused = None if paused_s is None else round(paused_s, 2)
        self.shots.append(
            Shot(self.next, self.start_number, self.command, at, aim, number.name, victim.role, victim.pid,
                 seen.launch, seen.phase, paused)
        )  # fmt: skip
        self.next += 1


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
