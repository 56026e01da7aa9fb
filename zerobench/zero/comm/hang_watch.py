"""Waits that last are looked into: ranks that wait for one another hear so within seconds, in one sentence.

A wait of less than PATIENCE_S costs a note in memory, no message. One that lasts is published in the process group's
store (comm/positions.py), and compared with those of the other ranks. A rank that is slow is waited for as long as the
group's timeout lets it; ranks that will never go on settle on a sentence, break the connection, and raise it.

A connection that breaks because a rank has ended is told in the same way: which rank, and where the others were.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .. import labels
from .desync import DesyncError
from .positions import Position, circle, named, out_of_step, places

if TYPE_CHECKING:
    from ..strategy import Strategy

PATIENCE_S = 2.0
"""A wait of this length is looked into."""

RANKS_A_SECOND = 32
"""In a large world a wait must last longer: each rank that waits reads the positions of all."""

LOOK_S = 0.5
"""How often the thread looks whether there is one."""

ANSWER_S = 3.0
"""How long the others have to tell where they were, once the connection has broken."""

BREAK_TAG = 0x7FFFFFFF
"""Of a message that nobody sends."""

MOST_PARAMETERS_NAMED = 2
"""Of a unit."""

HERE = str(Path(__file__).parent.parent)
NOT_THE_CALLER = (str(Path(torch.__file__ or "").parent), contextlib.__file__)
"""Where frames between the engine's and its caller's are from."""

T = TypeVar("T")


class Wait(NamedTuple):
    """This rank waits since `since` for collective `number` of `channel`. `words` says for which, to people."""

    channel: str
    number: int
    peers: list[int]
    words: Callable[[], str]
    thread: int
    since: float


class Watch:
    """Of one process group on this rank: what its engines have launched, and what they wait for now.

    `launched`  how many collectives, by channel
    `before`    how many of them before the present step
    `settled`   the sentence that all ranks raise from now on
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.launched: dict[str, int] = {}
        self.before: dict[str, int] = {}
        self.settled: str | None = None
        self.groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self._engines: weakref.WeakSet[Strategy] = weakref.WeakSet()
        self._positions = PositionStore(group, self.rank, self.size)
        self._wait: Wait | None = None
        self._published: Wait | None = None
        stop = threading.Event()
        weakref.finalize(self, stop.set)
        labels.EngineThread(target=_look_on, args=(weakref.ref(self), stop), name="watch", daemon=True).start()

    def launch(self, channel: str) -> int:
        """One more of `channel` is about to be launched: its number. Raises RuntimeError after a fault."""
        if self.settled is not None:
            raise RuntimeError(self.settled)
        number = self.launched[channel] = self.launched.get(channel, 0) + 1
        return number

    def begin_step(self) -> None:
        """What is launched from now on belongs to another step: words count it from 1."""
        self.before = dict(self.launched)

    def wait(self, channel: str, number: int, peers: list[int], words: Callable[[], str], call: Callable[[], T]) -> T:
        """What `call` returns, which may block until all `peers` have launched that collective.

        Raises RuntimeError, with one sentence on all ranks, where they never will.
        """
        self._wait = Wait(channel, number, peers, words, threading.get_ident(), time.monotonic())
        try:
            return call()
        except RuntimeError as error:
            raise RuntimeError(self._explain(error)) from error
        finally:
            self._wait = None

    def differ(self, words: str, launched: dict[str, int]) -> RuntimeError:
        """All ranks have found that they are out of step: the error, which says where each of them is."""
        mine = Position(self.rank, None, 0, words, launched)
        return RuntimeError(self._settle(out_of_step(self._positions.exchange("differs", mine))))

    # -- for words ------------------------------------------------------------------------------------------------

    def serves(self, engine: Strategy) -> None:
        """One of the engines whose collectives these are."""
        self._engines.add(engine)

    def step(self) -> str:
        """Which step of the engine's this is; nothing where there are several engines."""
        return f" in step {engines[0].steps}" if len(engines := list(self._engines)) == 1 else ""

    def parameters(self, unit: str) -> str:
        """The names of parameters in a unit; nothing where there are several engines."""
        engines = list(self._engines)
        found = [one for one in engines[0].units if one.name == unit] if len(engines) == 1 else []
        if not found:
            return ""
        numbers = dict.fromkeys(piece.parameter for piece in found[0].layout.pieces)
        names = [engines[0].names[number] for number in numbers]
        more = ", ..." if len(names) > MOST_PARAMETERS_NAMED else ""
        return f" ({', '.join(names[:MOST_PARAMETERS_NAMED])}{more})"

    # -- in the thread --------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Publishes a wait that lasts, once, and settles a circle that it closes."""
        wait = self._wait
        patience = PATIENCE_S + self.size / RANKS_A_SECOND
        if wait is None or self.settled is not None or time.monotonic() - wait.since < patience:
            return
        if wait is not self._published:
            self._published = wait
            self._positions.publish("waits", self._position(wait))
            if ring := circle(self._positions.read("waits")):
                self._positions.settle(out_of_step(ring))
        self.settled = self._positions.sentence()
        if self.settled is not None:
            self._break()

    # -- helpers --------------------------------------------------------------------------------------------------

    def _position(self, wait: Wait) -> Position:
        words = f"waiting {whereabouts(wait.thread)} for {wait.words()}"
        return Position(self.rank, wait.channel, wait.number, words, dict(self.launched), wait.peers)

    def _explain(self, error: RuntimeError) -> str:
        wait = self._wait
        assert wait is not None
        sentence = self.settled or self._positions.sentence()
        if sentence is None:
            sentence = str(error) if isinstance(error, DesyncError) else self._say_broken(wait, error)
        return self._settle(sentence)

    def _say_broken(self, wait: Wait, error: RuntimeError) -> str:
        there = self._positions.exchange("broken", self._position(wait))
        sentence = self._positions.sentence()
        if sentence is not None:  # settled meanwhile
            return sentence
        gone = sorted(set(range(self.size)) - {one.rank for one in there})
        left = f"{named(gone)} ended, or did not answer, while " if gone else "the connection broke while "
        return f"{left}{places(there)}: {_without_source(error)}"

    def _settle(self, sentence: str) -> str:
        self.settled = self._positions.settle(sentence)
        self._break()
        return self.settled

    def _break(self) -> None:
        """Ends every wait of this rank, and of those that wait for it: the groups are of no more use."""
        for group in list(self.groups):
            break_connections(group)


class PositionStore:
    """What the ranks of a group tell one another through its store, beside all traffic.

    Without a store that answers, as when its owner has ended, a rank has its own position alone.
    """

    _is_open = True

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self._store = dist.PrefixStore("watch", group.get_group_store())
        self._rank, self._size = rank, size

    def publish(self, topic: str, mine: Position) -> None:
        """Shows the others this rank's position."""
        self._try(lambda: self._store.set(f"{topic} {mine.rank}", mine.to_json()))

    def read(self, topic: str) -> list[Position]:
        """The positions that were published."""
        keys = [f"{topic} {rank}" for rank in range(self._size)]
        return self._try(lambda: [Position.from_json(self._store.get(k)) for k in keys if self._store.check([k])]) or []

    def exchange(self, topic: str, mine: Position) -> list[Position]:
        """Everyone's positions, of those that publish theirs within ANSWER_S."""
        self.publish(topic, mine)
        end = time.monotonic() + ANSWER_S
        while len(there := self.read(topic)) < self._size and self._is_open and time.monotonic() < end:
            if self.sentence() is not None:
                break
            time.sleep(0.05)
        return there or [mine]

    def sentence(self) -> str | None:
        """What the ranks have settled on."""
        return self._try(lambda: self._store.get("sentence").decode() if self._store.check(["sentence"]) else None)

    def settle(self, sentence: str) -> str:
        """The first one that a rank has come with: all ranks'."""
        if self._try(lambda: self._store.add("settled", 1)) == 1:
            self._try(lambda: self._store.set("sentence", sentence))
            return sentence
        end = time.monotonic() + ANSWER_S
        while (settled := self.sentence()) is None and self._is_open and time.monotonic() < end:
            time.sleep(0.05)
        return settled or sentence

    def _try(self, call: Callable[[], T]) -> T | None:
        try:
            return call() if self._is_open else None
        except (RuntimeError, OSError):  # the rank that has the store is gone
            self._is_open = False
            return None


def whereabouts(thread: int) -> str:
    """Which of the engine's methods a thread is in, and the line that called it: "in backward at train.py:12"."""
    frame = sys._current_frames().get(thread)
    method, caller = "", None
    while frame is not None:
        if frame.f_code.co_filename.startswith(HERE):
            method, caller = frame.f_code.co_name, None
        elif caller is None and not frame.f_code.co_filename.startswith(NOT_THE_CALLER):
            caller = frame
        frame = frame.f_back
    at = "" if caller is None else f" at {Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
    return f"in {'forward' if method == '__call__' else method}(){at}"


def break_connections(group: dist.ProcessGroup) -> None:
    """Makes everything that travels in `group` raise, here and on its other ranks.

    gloo closes all connections of a context when one wait in it times out; it has no other way to end a wait.
    """
    backends = str(dist.get_backend_config(group))
    if "nccl" in backends:
        group.abort()
    if "gloo" in backends:
        peer = (dist.get_rank(group) + 1) % dist.get_world_size(group)
        with contextlib.suppress(RuntimeError):  # the timeout that is wanted
            group.recv([torch.zeros(1)], peer, BREAK_TAG).wait(timedelta(milliseconds=1))


def _without_source(error: RuntimeError) -> str:
    """gloo's words without the line of its source before them, and its advice behind."""
    return str(error).split("] ", 1)[-1].split(". This is typically")[0]


def _look_on(watch: weakref.ref[Watch], stop: threading.Event) -> None:
    while not stop.wait(LOOK_S):
        living = watch()
        if living is None:
            return
        living.look()
        del living


_watches: WeakKeyDictionary[dist.ProcessGroup, Watch] = WeakKeyDictionary()


def watch_of(group: dist.ProcessGroup) -> Watch:
    """The watch over `group` and those of its parts, one for all engines."""
    if group not in _watches:
        _watches[group] = Watch(group)
    return _watches[group]
