"""Deadlock detection: ranks that wait for each other raise one message within seconds, before the group's timeout.

    1. note       each wait is noted in memory; one shorter than PATIENCE_S costs no message
    2. publish    a longer one is published in the process group's store
    3. compare    the thread reads the other ranks' waits; a slow rank is waited for until the group's timeout
    4. settle     in a circle of waits the ranks agree on one message, break the connection, and all raise it

A connection that breaks because a rank has ended is reported in the same way: which rank, and where the others were.

[Note: a circle of waiting ranks]
A rank *lacks* a collective that another rank waits for if it has launched that channel fewer times. A rank that lacks
it while it computes, or writes a file for minutes, is only slow. But if it is itself waiting for a collective that the
other rank lacks, neither can ever proceed. So

    a fault := a set of ranks that all wait, each for a collective that another rank of the set lacks

Counts only grow, and a waiting rank launches nothing. Positions that were published at different times, or are out of
date, therefore show no false circle: for the first rank to leave it, another rank would have had to leave before.

`WatchedComm` registers the waits for one process group's collectives with its watch.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .. import labels
from .backends import FAKE
from .base import Comm, WrappedComm
from .desync import DesyncError
from .streams import Handle

if TYPE_CHECKING:
    from ..strategy import Strategy


RULE = (
    "every rank must make the same calls of the engine, run the same modules in the same order and have as many"
    " gradients of each parameter"
)

MOST_NAMED = 4
"""Maximum number of ranks that a message names, if many are at one position."""


@dataclass(frozen=True)
class Position:
    """A rank's position: the collective that it waits for, and how many collectives it has launched.

    `channel`  the collective that it waits for, with all that must be equal on the ranks; None: it is not waiting
    `number`   its number in that channel, from 1
    `peers`    the ranks that must launch it
    `words`    a description for messages, with the program's line
    `launched` number of collectives that this rank has launched, by channel
    """

    rank: int
    channel: str | None
    number: int = 0
    words: str = ""
    launched: dict[str, int] = field(default_factory=dict)
    peers: list[int] = field(default_factory=list)

    def lacks(self, other: Position) -> bool:
        """Returns True if `other` waits for a collective that this rank has not launched."""
        return (
            other.channel is not None
            and self.rank in other.peers
            and self.launched.get(other.channel, 0) < other.number
        )


def circle(positions: Iterable[Position]) -> list[Position]:
    """Returns the positions of ranks in a deadlock, or an empty list. [Note: a circle of waiting ranks]"""
    waiting = [one for one in positions if one.channel is not None]
    while True:  # drop ranks that can proceed, until the set no longer shrinks: the rest wait for each other
        held_up = [one for one in waiting if any(other.lacks(one) for other in waiting if other is not one)]
        if len(held_up) == len(waiting):
            return held_up
        waiting = held_up


def out_of_step(positions: Sequence[Position]) -> str:
    """Returns an error message for ranks at different positions, or at one position with different counts."""
    counts = "" if len({one.words for one in positions}) > 1 else f", {difference(positions)}"
    return f"the ranks are out of step: {places(positions)}{counts}; {RULE}"


def difference(positions: Sequence[Position]) -> str:
    """Names the first channel whose number of launches differs between the ranks."""
    channels = dict.fromkeys(channel for one in positions for channel in one.launched)
    for channel in channels:
        counts = {one.rank: one.launched.get(channel, 0) for one in positions}
        if len(set(counts.values())) > 1:
            return f"of {channel} " + ", ".join(f"rank {rank} had {count}" for rank, count in counts.items())
    return "with as many of every collective"


def places(positions: Iterable[Position]) -> str:
    """Describes where each rank is; ranks at one position are named together."""
    ranks: dict[str, list[int]] = {}
    for one in sorted(positions, key=lambda one: one.rank):
        ranks.setdefault(one.words, []).append(one.rank)
    return ", ".join(f"{named(at)} {'is' if len(at) == 1 else 'are'} {words}" for words, at in ranks.items())


def named(ranks: Sequence[int]) -> str:
    """Formats a list of rank numbers; names at most the first MOST_NAMED."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > MOST_NAMED:
        return f"ranks {', '.join(map(str, ranks[:MOST_NAMED]))} and {len(ranks) - MOST_NAMED} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


PATIENCE_S = 2.0
"""Duration of a wait, in seconds, after which it is published."""

RANKS_A_SECOND = 32
"""Ranks per additional second of patience: each waiting rank reads all positions, which loads the store."""

LOOK_S = 0.5
"""Interval, in seconds, at which the thread checks for a long wait."""

ANSWER_S = 3.0
"""Time, in seconds, for the other ranks to publish their positions once the connection has broken."""

BREAK_TAG = 0x7FFFFFFF
"""Tag of a message that is never sent."""

MOST_PARAMETERS_NAMED = 2
"""Maximum number of a unit's parameters that a message names."""

HERE = str(Path(__file__).parent.parent)
NOT_THE_CALLER = (str(Path(torch.__file__ or "").parent), contextlib.__file__)
"""Files of the frames between the engine's frames and the caller's."""

T = TypeVar("T")


class Wait(NamedTuple):
    """A wait of this rank, since `since`, for collective `number` of `channel`. `words` describes it for messages."""

    channel: str
    number: int
    peers: list[int]
    words: Callable[[], str]
    thread: int
    since: float


class HangWatch:
    """The launches and the current wait of one process group's engines on this rank.

    `launched`  number of collectives by channel
    `before`    the same, at the start of the current step
    `settled`   the message that all ranks raise from now on
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
        """Counts a collective of `channel` and returns its number, from 1. Raises RuntimeError after a fault."""
        if self.settled is not None:
            raise RuntimeError(self.settled)
        number = self.launched[channel] = self.launched.get(channel, 0) + 1
        return number

    def begin_step(self) -> None:
        """Starts a new step, in which messages count collectives from 1 again."""
        self.before = dict(self.launched)

    def wait(self, channel: str, number: int, peers: list[int], words: Callable[[], str], call: Callable[[], T]) -> T:
        """Runs `call`, which may block until all `peers` have launched that collective, and returns its result.

        Raises RuntimeError, with the same message on all ranks, if they never will.
        """
        self._wait = Wait(channel, number, peers, words, threading.get_ident(), time.monotonic())
        try:
            return call()
        except RuntimeError as error:
            raise RuntimeError(self._explain(error)) from error
        finally:
            self._wait = None

    def differ(self, words: str, launched: dict[str, int]) -> RuntimeError:
        """Returns the error for ranks that have all found a desync; it names each rank's position."""
        mine = Position(self.rank, None, 0, words, launched)
        return RuntimeError(self._settle(out_of_step(self._positions.exchange("differs", mine))))

    # -- for messages ---------------------------------------------------------------------------------------------

    def serves(self, engine: Strategy) -> None:
        """Registers an engine that uses these collectives."""
        self._engines.add(engine)

    def step(self) -> str:
        """Names the engine's step; empty if there are several engines."""
        return f" in step {engines[0].steps}" if len(engines := list(self._engines)) == 1 else ""

    def parameters(self, unit: str) -> str:
        """Names parameters of a unit; empty if there are several engines."""
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
        """Publishes a long wait, once, and settles the message if that wait closes a circle."""
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
        """Ends all waits of this rank and for this rank; the groups are unusable afterwards."""
        for group in list(self.groups):
            break_connections(group)


class PositionStore:
    """Positions of a group's ranks, exchanged through the group's store, not through its collectives.

    If the store does not answer, for example because its owner has ended, a rank knows only its own position.
    """

    _is_open = True

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self._store = dist.PrefixStore("watch", group.get_group_store())
        self._rank, self._size = rank, size

    def publish(self, topic: str, mine: Position) -> None:
        """Publishes this rank's position."""
        self._try(lambda: self._store.set(f"{topic} {mine.rank}", json.dumps(asdict(mine))))

    def read(self, topic: str) -> list[Position]:
        """Returns the published positions."""
        keys = [f"{topic} {rank}" for rank in range(self._size)]
        return (
            self._try(lambda: [Position(**json.loads(self._store.get(k))) for k in keys if self._store.check([k])])
            or []
        )

    def exchange(self, topic: str, mine: Position) -> list[Position]:
        """Publishes this rank's position and returns the positions that all ranks publish within ANSWER_S."""
        self.publish(topic, mine)
        end = time.monotonic() + ANSWER_S
        while len(there := self.read(topic)) < self._size and self._is_open and time.monotonic() < end:
            if self.sentence() is not None:
                break
            time.sleep(0.05)
        return there or [mine]

    def sentence(self) -> str | None:
        """Returns an error message that the ranks have settled on, or None."""
        return self._try(lambda: self._store.get("sentence").decode() if self._store.check(["sentence"]) else None)

    def settle(self, sentence: str) -> str:
        """Returns the message of the first rank that called this method: all ranks raise that message."""
        if self._try(lambda: self._store.add("settled", 1)) == 1:  # atomic: exactly one rank is the first
            self._try(lambda: self._store.set("sentence", sentence))
            return sentence
        end = time.monotonic() + ANSWER_S
        while (settled := self.sentence()) is None and self._is_open and time.monotonic() < end:
            time.sleep(0.05)
        return settled or sentence

    def _try(self, call: Callable[[], T]) -> T | None:
        try:
            return call() if self._is_open else None
        except (RuntimeError, OSError):  # the rank that hosts the store has ended
            self._is_open = False
            return None


def whereabouts(thread: int) -> str:
    """Names the engine's method that a thread is in, and the line that called it: "in backward at train.py:12"."""
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
    """Makes all pending communication of `group` raise, on this rank and on the others.

    gloo closes all connections of a context when one wait in it times out; it has no other way to end a wait.
    """
    backends = str(dist.get_backend_config(group))
    if "nccl" in backends:
        group.abort()
    if "gloo" in backends:
        peer = (dist.get_rank(group) + 1) % dist.get_world_size(group)
        with contextlib.suppress(RuntimeError):  # the timeout, which is what closes the connections
            group.recv([torch.zeros(1)], peer, BREAK_TAG).wait(timedelta(milliseconds=1))


def _without_source(error: RuntimeError) -> str:
    """Strips gloo's source line from the front of its message, and its advice from the end."""
    return str(error).split("] ", 1)[-1].split(". This is typically")[0]


def _look_on(watch: weakref.ref[HangWatch], stop: threading.Event) -> None:
    while not stop.wait(LOOK_S):
        living = watch()
        if living is None:
            return
        living.look()
        del living


_watches: WeakKeyDictionary[dist.ProcessGroup, HangWatch] = WeakKeyDictionary()


def watch_of(group: dist.ProcessGroup) -> HangWatch:
    """Returns the watch over `group` and its subgroups; all engines use the same one."""
    if group not in _watches:
        _watches[group] = HangWatch(group)
    return _watches[group]


AGREEMENT = "agreement"
"""The channel of all small all-reduces: gloo pairs them by launch order."""


class WatchedComm(WrappedComm):
    """A Comm whose waits `watch` observes. `peers`: the group's ranks, in the numbering of `watch`."""

    def __init__(self, below: Comm, watch: HangWatch, peers: list[int]) -> None:
        super().__init__(below)
        self.watch, self._peers = watch, peers
        self._among = "" if len(peers) == watch.size else f" among {named(peers)}"

    def broadcast(self, tensor: torch.Tensor) -> None:
        self.call("broadcast", partial(self._below.broadcast, tensor))

    def maximum(self, flags: torch.Tensor) -> None:
        self.call(AGREEMENT, partial(self._below.maximum, flags))
        if not flags.is_floating_point():  # which parameters have gradients: an update follows
            self.watch.begin_step()

    def sum(self, values: torch.Tensor) -> None:
        self.call(AGREEMENT, partial(self._below.sum, values))

    def meet(self, what: str) -> None:
        self.call(what, partial(self._below.meet, what))

    def call(self, channel: str, run: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
        if group is not None:
            self.watch.groups.add(group)
        where = channel + self._among
        number = self.watch.launch(where)
        return self.watch.wait(where, number, self._peers, lambda: f"the {where}{self.watch.step()}", run)

    def serves(self, engine: Strategy) -> None:
        self.watch.serves(engine)

    def disagreement(self, what: str, asked: dict[str, int]) -> RuntimeError:
        return self.watch.differ(f"calling {what}(){self.watch.step()}", asked)

    def start(self, kind: str, unit: str, sent: torch.Tensor, launch: Callable[[], Handle]) -> Handle:
        """Launches under the watch, since a launch can block too, not only its wait."""
        channel = f"{kind} of {unit}{self._among}, {sent.nbytes} bytes"
        number = self.watch.launch(channel)

        def words() -> str:
            since = number - self.watch.before.get(channel, 0)
            return f"{kind} {since} of {unit}{self.watch.parameters(unit)}{self._among}{self.watch.step()}"

        handle = self.watch.wait(channel, number, self._peers, words, launch)
        return Handle([], lambda: self.watch.wait(channel, number, self._peers, words, handle.wait))


def watched(comm: Comm, whole: dist.ProcessGroup | None = None) -> Comm:
    """Returns `comm` under the watch of `whole`, a process group that contains its ranks; default: its own group.

    Returns `comm` itself in a world of one rank, and in a simulated world, in which no rank can wait.
    """
    group = comm.group
    if group is None or str(dist.get_backend(group)) == FAKE:
        return comm
    watch = watch_of(whole or group)
    watch.groups.add(group)
    peers = range(comm.size) if whole is None else dist.get_process_group_ranks(group)
    return WatchedComm(comm, watch, list(peers))
