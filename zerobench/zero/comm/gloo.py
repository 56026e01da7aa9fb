"""Reduce-scatter and all-gather on gloo, by pairwise sends and receives.

A full buffer has N slices of `shard_numel` elements; slice j belongs to rank j. Slices are sent and received in pieces,
all asynchronously, so that both directions are busy. gloo pairs the nth send of a tag with the nth receive of that tag.
So each kind of collective, unit and size has its own tag: transfers that do not belong together never match (if their
sizes differed, gloo would abort the process), and comm/out_of_step.py reports the ranks that then wait for each other.

[Note: true reduce-scatter on gloo]
gloo's own reduce-scatter clones its input and runs an all-reduce, which sends twice the necessary bytes and leaves the
order of the sum to the ring. Here the ranks exchange slices and each sums its own: (N-1)/N of the buffer is sent, and

    sum := ((rank 0's + rank 1's) + rank 2's) + ...          the same bits for every stage and every run

The sum is written directly to its destination, this rank's slice or another tensor, so that no copy is needed.

Received pieces wait in at most SLOTS slots of one piece each until they are summed, however large the buffer is. A slot
is reused only after its piece has been summed. A thread sends, receives and sums while backward runs. (Doing this in
`wait` instead costs nothing if the ranks' own cores transfer the bytes, and 8 % of a step on a link of 2 Gbit/s.)
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
import zlib
from collections import deque
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .. import labels
from .base import GroupComm, Handle, Into, Sizes, Waitable, rank_slices

GATHER_PIECE_BYTES = 16 * 2**20
"""Large, because gathers need no memory besides their buffer, and each message costs a wake-up of both ranks."""

REDUCE_PIECE_BYTES = 2**20
SLOTS = 2

EXIT_S = 10.0
"""Longest wait for collectives in flight at the end of a process. A peer that has ended ends it at once."""

MOST_TAGS = 2**16
"""Size of the cache of tags: larger than most models' number of units."""

Pieces = tuple[torch.Tensor, ...]


@lru_cache(MOST_TAGS)
def tag_of(kind: str, unit: str, size_bytes: int) -> int:
    """Returns the tag of a collective's transfers: 31 bits, equal on all ranks."""
    return zlib.crc32(f"{kind} {unit} {size_bytes}".encode()) & 0x7FFFFFFF


def send(piece: torch.Tensor, peer: int, group: dist.ProcessGroup, tag: int) -> Any:
    """Starts sending to a rank of the group, without dist.isend, which has a measurable overhead with small pieces."""
    return group.send([piece], peer, tag)


def receive(piece: torch.Tensor, peer: int, group: dist.ProcessGroup, tag: int) -> Any:
    """Starts receiving from a rank of the group."""
    return group.recv([piece], peer, tag)


class GlooComm(GroupComm):
    """gloo on CPU: slices are exchanged pairwise. [Note: true reduce-scatter on gloo]"""

    pairs_by_unit = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._queue: SimpleQueue[PairwiseReduction | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._others = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        _drain_thread()

    def reduce_scatter(self, full: torch.Tensor, unit: str = "", into: Into = None, sizes: Sizes = None) -> Handle:
        """Queues the reduction; a thread runs one at a time, in launch order."""
        with labels.collective("reduce_scatter", unit) as operation:
            slices = cut_in_pieces(full, self.size, sizes, REDUCE_PIECE_BYTES)
            own = slices[self.rank]
            rounds = range(max(map(len, slices)))
            to_go = [(peer, slices[peer][i]) for i in rounds for peer in self._others if i < len(slices[peer])]
            slots = full.new_empty(min(SLOTS, len(own) * len(self._others)), own[0].numel() if own else 0)
            labels.label(slots, labels.COMMUNICATION, f"{unit} received")
            sums = own if into is None else cut_in_pieces(into, 1, None, REDUCE_PIECE_BYTES)[0]
            reduction = PairwiseReduction(self, to_go, own, sums, slots, tag_of("reduction", unit, full.nbytes))
            if self._thread is None:
                self._thread = labels.EngineThread(
                    target=_run_all, args=(self._queue,), name="reduce-scatter", daemon=True
                )
                self._thread.start()
                _comms.add(self)
                weakref.finalize(self, self._queue.put, None)  # the thread holds only the queue, and ends with None
            self._queue.put(reduction)
            if labels.observed():
                reduction.wait_until(reduction.is_sent)
            return Handle([reduction], operation=operation)

    def all_gather(self, full: torch.Tensor, unit: str = "", sizes: Sizes = None) -> Handle:
        with labels.collective("all_gather", unit) as operation:
            slices = cut_in_pieces(full, self.size, sizes, GATHER_PIECE_BYTES)
            tag = tag_of("gather", unit, full.nbytes)
            # receives first: gloo would buffer and copy a piece that arrives before its receive is posted
            works = [receive(piece, peer, self.group, tag) for peer in self._others for piece in slices[peer]]
            works += [send(piece, peer, self.group, tag) for piece in slices[self.rank] for peer in self._others]
        return Handle([PairwiseWorks(works)], operation=operation)

    def all_reduce(self, full: torch.Tensor, unit: str = "") -> Handle:
        """Runs gloo's all-reduce after a barrier that makes all ranks match: gloo pairs all-reduces by launch order."""
        self.meet(f"all_reduce of {unit}, {full.nbytes} bytes")
        return super().all_reduce(full, unit)

    def meet(self, what: str) -> None:
        tag, nothing = tag_of("meeting", what, self.size), torch.empty(0)  # an empty message from each rank to each
        with labels.collective("control"):
            works = [receive(nothing, peer, self.group, tag) for peer in self._others]
            works += [send(nothing, peer, self.group, tag) for peer in self._others]
            for work in works:
                work.wait()

    def stop(self) -> threading.Thread:
        """Has the thread of the reductions end after those that are queued, and returns it."""
        assert self._thread is not None
        self._queue.put(None)
        return self._thread

    def _exchange(self, to: torch.Tensor, here: torch.Tensor, unit: str) -> list[Waitable]:
        going, coming = (cut_in_pieces(full, self.size, None, REDUCE_PIECE_BYTES) for full in (to, here))
        tag = tag_of("exchange", unit, to.nbytes)
        works = [receive(piece, peer, self.group, tag) for peer in self._others for piece in coming[peer]]
        works += [
            send(going[peer][i], peer, self.group, tag) for i in range(len(going[self.rank])) for peer in self._others
        ]
        return [PairwiseWorks(works)]


class PairwiseWorks:
    """Sends and receives in flight. gloo cancels a receive that is dropped, and then reads nothing more from its peer.
    So a thread waits for what an engine leaves in flight when it is dropped, such as its last gather.
    """

    def __init__(self, works: list[Any]) -> None:
        self._works = works
        _in_flight.add(self)

    def wait(self) -> None:
        """Blocks until all are done."""
        works, self._works = self._works, []
        for work in works:
            work.wait()

    def wait_until(self, end: float) -> None:
        """Blocks until all are done, a peer has ended, or time.monotonic() is `end`."""
        works, self._works = self._works, []
        with suppress(RuntimeError):
            for work in works:
                work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))

    def __del__(self) -> None:
        if self._works:
            _dropped.put(self._works)  # the only call that is safe here: garbage collection may run within any other


_in_flight: weakref.WeakSet[PairwiseWorks] = weakref.WeakSet()
_comms: weakref.WeakSet[GlooComm] = weakref.WeakSet()
_dropped: SimpleQueue[list[Any] | None] = SimpleQueue()


@lru_cache(1)
def _drain_thread() -> threading.Thread:
    """Starts the process's thread that waits for dropped works, and has the end of the process wait for all works."""
    thread = labels.EngineThread(target=_drain, name="dropped works", daemon=True)
    thread.start()
    atexit.register(_finish, os.getpid(), thread)
    return thread


def _drain() -> None:
    while (works := _dropped.get()) is not None:
        for work in works:
            with suppress(RuntimeError):  # a peer has ended
                work.wait()


def _finish(process: int, drain: threading.Thread) -> None:
    """Waits at the end of the process, for at most EXIT_S, for everything in flight: peers may still need what this
    rank sends, and a thread that came back from gloo while the interpreter is finalized would abort the process.
    """
    if process != os.getpid():  # a forked child: the works are its parent's
        return
    end = time.monotonic() + EXIT_S
    for works in list(_in_flight):
        works.wait_until(end)
    _dropped.put(None)
    for thread in [drain, *(comm.stop() for comm in list(_comms))]:
        thread.join(max(0.0, end - time.monotonic()))


class _Arrival(NamedTuple):
    """A piece that is being received into a part of `slot`."""

    work: Any
    piece: torch.Tensor
    slot: torch.Tensor


class PairwiseReduction:
    """One reduce-scatter in flight: `run` sends, receives and sums in a thread; `wait` blocks until it is done.
    `to_go`: (peer, piece) of the other slices. `is_sent`: set once all sends are launched.
    """

    def __init__(
        self, comm: GlooComm, to_go: list[tuple[int, torch.Tensor]], own: Pieces, sums: Pieces, slots: torch.Tensor,
        tag: int,
    ) -> None:  # fmt: skip
        self._group, self._tag = comm.group, tag
        self._lower, self._higher = range(comm.rank), range(comm.rank + 1, comm.size)
        self._own, self._sums = own, sums
        self._to_go, self._sends = to_go, list[Any]()
        self._slots: torch.Tensor | None = slots
        self._free = deque(slots)
        self._arriving: deque[_Arrival] = deque()
        self._to_come = iter([(peer, piece) for piece in self._own for peer in (*self._lower, *self._higher)])
        self._error: BaseException | None = None
        self.is_sent, self._done = threading.Event(), threading.Event()

    def wait_until(self, event: threading.Event) -> None:
        """Blocks until the thread has set `event`."""
        try:
            event.wait()
        except BaseException:  # Ctrl-C: the handler may free the memory that the thread still writes to
            self._done.wait()
            raise

    def wait(self) -> None:
        """Blocks until the sum is complete. Raises the thread's error, if any."""
        self.wait_until(self._done)
        self._slots = None  # freed here, not in the thread, so that the peak is the same in every run
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        """Sends, receives and sums all pieces; releases every tensor but the slots before it reports completion."""
        try:
            self._fill_slots()  # receives first, as in all_gather
            with labels.followed():
                self._sends = [send(piece, peer, self._group, self._tag) for peer, piece in self._to_go]
            self.is_sent.set()
            with torch.no_grad():
                for own, total in zip(self._own, self._sums, strict=True):
                    self._sum(own, total)
            for sent in self._sends:
                sent.wait()
        except BaseException as error:
            self._error = error
        finally:
            self._own, self._sums, self._sends, self._to_come = (), (), [], iter([])
            self._to_go = []
            self._arriving.clear()
            self._free.clear()
            self.is_sent.set()
            self._done.set()

    def _sum(self, own: torch.Tensor, total: torch.Tensor) -> None:
        """total := ((rank 0's + rank 1's) + rank 2's) + ... The lower ranks' sum comes first; adding `own` commutes."""
        so_far = own
        if self._lower:
            lowest = self._take()
            for _ in self._lower[1:]:
                self._add_next(lowest.piece, lowest.piece)
            so_far = torch.add(own, lowest.piece, out=total)
            self._free.append(lowest.slot)
        for _ in self._higher:
            so_far = self._add_next(so_far, total)

    def _add_next(self, so_far: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        arrived = self._take()
        torch.add(so_far, arrived.piece, out=total)
        self._free.append(arrived.slot)
        return total

    def _take(self) -> _Arrival:
        """Launches receives into all free slots, then returns the next piece once it has arrived."""
        self._fill_slots()
        arrived = self._arriving.popleft()
        arrived.work.wait()
        return arrived

    def _fill_slots(self) -> None:
        while self._free and (following := next(self._to_come, None)):
            peer, like = following
            slot = self._free.popleft()
            piece = slot[: like.numel()]
            self._arriving.append(_Arrival(receive(piece, peer, self._group, self._tag), piece, slot))


def cut_in_pieces(full: torch.Tensor, ranks: int, sizes: Sizes, most_bytes: int) -> list[Pieces]:
    """Splits each rank's slice of `full` into pieces of at most `most_bytes`; an empty slice has none."""
    max_numel = max(1, most_bytes // full.element_size())
    return [part.split(max_numel) if part.numel() else () for part in rank_slices(full, ranks, sizes)]


def _run_all(queue: SimpleQueue[PairwiseReduction | None]) -> None:
    while (reduction := queue.get()) is not None:
        reduction.run()
