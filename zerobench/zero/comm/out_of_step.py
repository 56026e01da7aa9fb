"""Finds ranks that are out of step: all raise one message within seconds, before the group's timeout.

    1. count      each rank counts its launches and notes its current wait, in memory
    2. agree      the agreement before an update compares a checksum of the launches, at no cost in bytes
    3. publish    a wait longer than PATIENCE_S is published in the process group's store, as a Position
    4. compare    a thread reads the other ranks' positions; a slow rank is waited for until the group's timeout
    5. break      in a cycle of waits the ranks agree on one message, break the connection, and all raise it

A connection that breaks because a rank has ended is reported in the same way: which rank, and where the others were.

[Note: wait cycles]
A rank *lacks* a collective that another rank waits for if it has launched that channel fewer times. A rank that lacks
it while it computes, or writes a file for minutes, is only slow. But if it is itself waiting for a collective that the
other rank lacks, neither can ever proceed. So

    a fault := a set of ranks that all wait, each for a collective that another rank of the set lacks

Counts only grow, and a waiting rank launches nothing. Positions that were published at different times, or are out of
date, therefore show no false cycle: for the first rank to leave it, another rank would have had to leave before.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .. import labels
from .base import FAKE, FAULT, Comm, Handle, Into, Launches, NamedEngine, Sizes, WrappedComm

RULE = (
    "every rank must make the same calls of the engine, run the same modules in the same order and have as many"
    " gradients of each parameter"
)

MOST_NAMED = 4
"""Maximum number of ranks that a message names, if many are at one position."""

MOST_PARAMETERS_NAMED = 2
"""Maximum number of a unit's parameters that a message names."""

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

HERE = str(Path(__file__).parent.parent)
TORCH = str(Path(torch.__file__ or "").parent)
NOT_THE_CALLER = (TORCH, contextlib.__file__)
"""Files of the frames between the engine's frames and the caller's."""

T = TypeVar("T")


@dataclass(frozen=True)
class Position:
    """A rank's position: the collective that it waits for, and how many collectives it has launched.

    `description`  for messages, with the program's line
    `launched` number of collectives that this rank has launched, by channel
    `channel`  the collective that it waits for, with all that must be equal on the ranks
    `number`   its number in that channel, from 1; 0: the rank is not waiting
    `peers`    the ranks that must launch it
    """

    rank: int
    description: str
    launched: dict[str, int]
    channel: str = ""
    number: int = 0
    peers: list[int] = field(default_factory=list)

    def lacks(self, other: Position) -> bool:
        """Returns True if `other` waits for a collective that this rank has not launched."""
        return self.rank in other.peers and self.launched.get(other.channel, 0) < other.number


def wait_cycle(positions: Iterable[Position]) -> list[Position]:
    """Returns the positions of ranks in a deadlock, or an empty list. [Note: wait cycles]"""
    waiting = [position for position in positions if position.number]
    while True:  # drop ranks that can proceed, until the set no longer shrinks: the rest wait for each other
        held_up = [position for position in waiting if any(other.lacks(position) for other in waiting)]
        if len(held_up) == len(waiting):
            return held_up
        waiting = held_up


def out_of_step(positions: Sequence[Position]) -> str:
    """Returns an error message for ranks at different positions, or at one position with different counts."""
    counts = "" if len({position.description for position in positions}) > 1 else f", {difference(positions)}"
    return f"the ranks are out of step: {describe(positions)}{counts}; {RULE}"


def difference(positions: Sequence[Position]) -> str:
    """Names the first channel whose number of launches differs between the ranks."""
    for channel in dict.fromkeys(channel for position in positions for channel in position.launched):
        counts = {position.rank: position.launched.get(channel, 0) for position in positions}
        if len(set(counts.values())) > 1:
            return f"of {channel} " + ", ".join(f"rank {rank} had {count}" for rank, count in counts.items())
    return "with as many of every collective, in another order"


def describe(positions: Iterable[Position]) -> str:
    """Describes where each rank is; ranks at one position are named together."""
    ranks: dict[str, list[int]] = {}
    for position in sorted(positions, key=lambda position: position.rank):
        ranks.setdefault(position.description, []).append(position.rank)
    return ", ".join(
        f"{named(at)} {'is' if len(at) == 1 else 'are'} {description}" for description, at in ranks.items()
    )


def named(ranks: Sequence[int]) -> str:
    """Formats a list of rank numbers; names at most the first MOST_NAMED."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > MOST_NAMED:
        return f"ranks {', '.join(map(str, ranks[:MOST_NAMED]))} and {len(ranks) - MOST_NAMED} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


class HangWatch:
    """The launches and the current wait of one process group's engines on this rank.

    `launched`  number of collectives by channel
    `before`    the same, at the start of the current step
    `verdict`   the message that all ranks raise from now on

    Positions go through the group's store, not through its collectives. If the store does not answer, for example
    because its owner has ended, a rank knows only its own position.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.launched: dict[str, int] = {}
        self.before: dict[str, int] = {}
        self.verdict: str | None = None
        self.groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self.engines: weakref.WeakSet[NamedEngine] = weakref.WeakSet()
        self._store: dist.Store | None = dist.PrefixStore("watch", group.get_group_store())
        self.wait: tuple[float, Wait] | None = None  # its start, and for what
        self._published: tuple[float, Wait] | None = None
        stop = threading.Event()
        weakref.finalize(self, stop.set)
        labels.EngineThread(target=_look_on, args=(weakref.ref(self), stop), name="watch", daemon=True).start()

    def end(self, own: Position, error: RuntimeError) -> RuntimeError:
        """Returns the error to raise for a wait that `error` has ended, with the same message on all ranks."""
        message = self.verdict or self._message()
        if message is None:  # the connection broke
            positions = self._exchange("broken", own)
            gone = sorted(set(range(self.size)) - {position.rank for position in positions})
            left = f"{named(gone)} ended, or did not answer, while " if gone else "the connection broke while "
            # gloo's message without the source line at its front and the advice at its end
            reason = str(error).split("] ", 1)[-1].split(". This is typically")[0]
            # another rank may have set it meanwhile
            message = self._message() or f"{left}{describe(positions)}: {reason}"
        return RuntimeError(self._agree_and_break(message))

    def differ(self, what: str, launched: dict[str, int]) -> RuntimeError:
        """Returns the error for ranks whose checksums differ; it names each rank's position."""
        own = Position(self.rank, f"calling {what}(){self.step()}", launched)
        return RuntimeError(self._agree_and_break(out_of_step(self._exchange("differs", own))))

    def step(self) -> str:
        """Names the engine's step; empty if there are several engines."""
        return f" in step {engines[0].steps}" if len(engines := list(self.engines)) == 1 else ""

    def parameters(self, unit: str) -> str:
        """Names parameters of a unit; empty if there are several engines."""
        names = engines[0].names_in(unit) if len(engines := list(self.engines)) == 1 else []
        more = ", ..." if len(names) > MOST_PARAMETERS_NAMED else ""
        return f" ({', '.join(names[:MOST_PARAMETERS_NAMED])}{more})" if names else ""

    def look(self) -> None:
        """Publishes a long wait, once, and breaks the connections if that wait closes a cycle; runs in the thread."""
        wait = self.wait
        patience = PATIENCE_S + self.size / RANKS_A_SECOND
        if wait is None or self.verdict is not None or time.monotonic() - wait[0] < patience:
            return
        if wait is not self._published:
            self._published = wait
            self._publish("waits", wait[1].position())
            if cycle := wait_cycle(self._read("waits")):
                self._agree_and_break(out_of_step(cycle))
                return
        if (message := self._message()) is not None:
            self._agree_and_break(message)

    # -- positions and the message, in the store ------------------------------------------------------------------

    def _publish(self, topic: str, own: Position) -> None:
        self._ask(lambda store: store.set(f"{topic} {own.rank}", json.dumps(asdict(own))))

    def _read(self, topic: str) -> list[Position]:
        keys = [f"{topic} {rank}" for rank in range(self.size)]
        return self._ask(lambda s: [Position(**json.loads(s.get(key))) for key in keys if s.check([key])]) or []

    def _exchange(self, topic: str, own: Position) -> list[Position]:
        """Publishes this rank's position and returns the positions that all ranks publish within ANSWER_S."""
        self._publish(topic, own)
        end = time.monotonic() + ANSWER_S
        while len(positions := self._read(topic)) < self.size and self._store is not None and time.monotonic() < end:
            if self._message() is not None:
                break
            time.sleep(0.05)
        return positions or [own]

    def _message(self) -> str | None:
        return self._ask(lambda store: store.get("message").decode() if store.check(["message"]) else None)

    def _agree_and_break(self, message: str) -> str:
        """Ends this rank's waits, and others' waits for it. Returns the message of the first rank that called this."""
        self.verdict = self._ask(lambda store: store.compare_set("message", "", message).decode()) or message
        for group in list(self.groups):
            break_connections(group)
        return self.verdict

    def _ask(self, request: Callable[[dist.Store], T]) -> T | None:
        try:
            return None if self._store is None else request(self._store)
        except (RuntimeError, OSError):  # the rank that hosts the store has ended
            self._store = None
            return None


def whereabouts(thread: int) -> str:
    """Names the engine's method that a thread is in, and the line that called it: "in backward at train.py:12"."""
    frame = sys._current_frames().get(thread)
    method, caller = "", None
    while frame is not None:
        if frame.f_code.co_filename.startswith(HERE):
            method, caller = frame.f_code.co_name, None
        elif method and frame.f_code.co_filename.startswith(TORCH) and frame.f_code.co_name == "backward":
            method = "backward"  # the program's own, whose hooks came to the engine
        elif caller is None and not frame.f_code.co_filename.startswith(NOT_THE_CALLER):
            caller = frame
        frame = frame.f_back
    at = "" if caller is None else f" at {Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
    return f"in {'forward' if method == '__call__' else method}(){at}"


def break_connections(group: dist.ProcessGroup) -> None:
    """Makes all pending communication of `group` raise, on this rank and on the others. gloo closes all connections of
    a context when one wait in it times out; it has no other way to end a wait.
    """
    backends = str(dist.get_backend_config(group))
    if "nccl" in backends:
        group.abort()
    if "gloo" in backends:
        peer = (dist.get_rank(group) + 1) % dist.get_world_size(group)
        with contextlib.suppress(RuntimeError):  # the timeout, which is what closes the connections
            group.recv([torch.zeros(1)], peer, BREAK_TAG).wait(timedelta(milliseconds=1))


def _look_on(watch: weakref.ref[HangWatch], stop: threading.Event) -> None:
    while not stop.wait(LOOK_S):
        living = watch()
        if living is None:
            return
        living.look()
        del living


_watches: WeakKeyDictionary[dist.ProcessGroup, HangWatch] = WeakKeyDictionary()


def hang_watch(group: dist.ProcessGroup) -> HangWatch:
    """Returns the watch over `group` and its subgroups; all engines use the same one."""
    if group not in _watches:
        _watches[group] = HangWatch(group)
    return _watches[group]


AGREEMENT = "agreement"
"""The channel of all small all-reduces: gloo pairs them by launch order."""


class Wait:
    """Counts one launch of a collective, and is the context manager around each call that may block on it: entered once
    for the launch, and again by `Handle.wait`, if there is a handle. If `peers` will never launch it too, leaving the
    context raises RuntimeError, with the same message on all ranks.

    `channel`: all that must be equal on the ranks. `describe`: takes its number in the step, for messages.
    """

    def __init__(self, watch: HangWatch, channel: str, describe: Callable[[int], str], peers: list[int]) -> None:
        self._watch, self._channel, self._describe, self._peers = watch, channel, describe, peers
        if watch.verdict is not None:
            raise RuntimeError(watch.verdict)
        self._number = watch.launched[channel] = watch.launched.get(channel, 0) + 1

    def __enter__(self) -> Wait:
        self._thread = threading.get_ident()
        self._watch.wait = time.monotonic(), self
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        try:
            if isinstance(error, RuntimeError):
                raise self._watch.end(self.position(), error) from error
        finally:
            self._watch.wait = None

    def position(self) -> Position:
        """Returns this rank's position while it waits; from any thread."""
        watch = self._watch
        awaited = self._describe(self._number - watch.before.get(self._channel, 0))
        message = f"waiting {whereabouts(self._thread)} for {awaited}{watch.step()}"
        return Position(watch.rank, message, dict(watch.launched), self._channel, self._number, self._peers)


class WatchedComm(WrappedComm):
    """A Comm whose waits `watch` observes. `peers`: the group's ranks, in the numbering of `watch`."""

    def __init__(self, below: Comm, watch: HangWatch, peers: list[int]) -> None:
        super().__init__(below)
        self.watch, self._peers = watch, peers
        self._among = "" if len(peers) == watch.size else f" among {named(peers)}"

    # a launch can block too, not only its wait

    def reduce_scatter(self, full: torch.Tensor, unit: str = "", into: Into = None, sizes: Sizes = None) -> Handle:
        with self._wait("reduction", unit, full) as wait:
            handle = self._below.reduce_scatter(full, unit, into, sizes)
        handle.watch = wait
        return handle

    def all_gather(self, full: torch.Tensor, unit: str = "", sizes: Sizes = None) -> Handle:
        with self._wait("gather", unit, full) as wait:
            handle = self._below.all_gather(full, unit, sizes)
        handle.watch = wait
        return handle

    def all_reduce(self, full: torch.Tensor, unit: str = "") -> Handle:
        with self._wait("reduction", unit, full) as wait:
            handle = self._below.all_reduce(full, unit)
        handle.watch = wait
        return handle

    def all_to_all(self, to: torch.Tensor, here: torch.Tensor, name: str, unit: str = "") -> Handle:
        with self._wait("exchange", unit, to) as wait:
            handle = self._below.all_to_all(to, here, name, unit)
        handle.watch = wait
        return handle

    def _wait(self, kind: str, unit: str, sent: torch.Tensor) -> Wait:
        return Wait(
            self.watch,
            f"{kind} of {unit}{self._among}, {sent.nbytes} bytes",
            lambda number: f"{kind} {number} of {unit}{self.watch.parameters(unit)}{self._among}",
            self._peers,
        )

    def broadcast(self, tensor: torch.Tensor) -> None:
        with self._wait_for("broadcast"):
            self._below.broadcast(tensor)

    def maximum(self, flags: torch.Tensor) -> None:
        with self._wait_for(AGREEMENT):
            self._below.maximum(flags)

    def sum(self, values: torch.Tensor) -> None:
        with self._wait_for(AGREEMENT):
            self._below.sum(values)

    def meet(self, what: str) -> None:
        with self._wait_for(what):
            self._below.meet(what)

    def call(self, channel: str, run: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
        if group is not None:
            self.watch.groups.add(group)
        with self._wait_for(channel):
            return run()

    def _wait_for(self, control: str) -> Wait:
        channel = control + self._among
        return Wait(self.watch, channel, lambda _: f"the {channel}", self._peers)


def watched(comm: Comm, whole: dist.ProcessGroup | None = None) -> Comm:
    """Returns `comm` under the watch of `whole`, a process group that contains its ranks; default: its own group.
    Returns `comm` itself in a world of one rank, and in a simulated world, in which no rank can wait.
    """
    group = comm.group
    if group is None or str(dist.get_backend(group)) == FAKE:
        return comm
    watch = hang_watch(whole or group)
    watch.groups.add(group)
    peers = range(comm.size) if whole is None else dist.get_process_group_ranks(group)
    return WatchedComm(comm, watch, list(peers))


MASK = 2**29 - 1
"""The bits of a checksum: it shares an int32 with a flag, which is bit 0."""


class ComparedLaunches(Launches):
    """Compares, in each agreement, the collectives that the ranks launched since the last one.

    So collectives of equal size that belong to different units on different ranks never lead to an update, on any
    backend; and a rank that clips while another one steps gets an error immediately.

    `by_unit`  True if slices of different units never pair. Then ranks may launch in different orders, since the graphs
               of their forwards may differ
    `counts`   "kind of unit" -> number launched
    `orders`   kind -> checksum of its units in launch order
    """

    def __init__(self, watch: HangWatch, by_unit: bool) -> None:
        self._watch, self._by_unit = watch, by_unit
        self.counts: dict[str, int] = {}
        self.orders: dict[str, int] = {}

    def register(self, engine: NamedEngine) -> None:
        self._watch.engines.add(engine)

    def add(self, kind: str, unit: str) -> None:
        key = f"{kind} of {unit}"
        self.counts[key] = self.counts.get(key, 0) + 1
        self.orders[kind] = zlib.crc32(f"{unit};".encode(), self.orders.get(kind, 0))

    def agree(self, comm: Comm, flags: torch.Tensor, sent: torch.Tensor, what: str) -> list[int]:
        # needs two flags: the code goes into the first, its complement into the last; with a single flag the launches
        # are not compared
        if len(flags) > 1:
            # The agreement is a maximum: over the code and over its complement it gives the largest and the smallest
            # code of all ranks, which are equal only if all codes are. Bit 0 stays the flag's own.
            launches = sorted((self.counts if self._by_unit else self.orders).items())
            code = zlib.crc32(f"{what} after {launches}".encode()) & MASK
            if flags[0] < FAULT:
                flags[0] += code << 1
            flags[-1] += (code ^ MASK) << 1
        agreed = super().agree(comm, flags, sent, what)
        self._watch.before = dict(self._watch.launched)  # a new step: messages count collectives from 1 again
        counts, self.counts, self.orders = self.counts, {}, {}
        if agreed and agreed[0] >= FAULT:
            return agreed
        if len(agreed) > 1 and agreed[0] >> 1 != (agreed[-1] >> 1) ^ MASK:  # max(code) and min(code)
            raise self._watch.differ(what, counts)
        return [flag & 1 for flag in agreed]


def compared_launches(comm: Comm) -> Launches:
    """Returns the launches of an engine over `comm`."""
    if comm.group is None or str(dist.get_backend(comm.group)) == FAKE:
        return Launches()
    return ComparedLaunches(hang_watch(comm.group), comm.pairs_by_unit)
