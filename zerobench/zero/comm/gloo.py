"""Slices travel pairwise: how reduce-scatter and all-gather work on gloo.

A full buffer has N slices of `shard_numel` elements, slice j is rank j's. Slices are sent and received in pieces, all
asynchronously, so that both directions are busy. gloo pairs a send with the receive of the same tag that was launched
in the same place, so a tag stands for one kind of collective, of one unit, of one size: transfers that do not belong
together never meet (where their sizes differed gloo would end the process), and hang_watch.py finds who waits for them.

[Note: true reduce-scatter on gloo]
gloo's own reduce-scatter clones its input and runs an all-reduce, which sends twice what is needed and leaves the order
of the sum to the ring. Here the ranks exchange slices and each sums its own: (N-1)/N of the buffer on the wire, and

    sum := ((rank 0's + rank 1's) + rank 2's) + ...          the same bits for every stage and every run

The sum goes where it is wanted, into the own slice or elsewhere, so that nothing need be copied.

What arrives lies in at most SLOTS slots of one piece each until it is summed, however large the buffer. A slot can be
received into again only once what is in it has been summed, so a thread does this while backward goes on. (To do it in
`wait` instead costs nothing where the ranks' own cores carry the bytes, and 8 % of a step on a link of 2 Gbit/s.)
"""

from __future__ import annotations

import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .. import labels

GATHER_PIECE_BYTES = 2**20
REDUCE_PIECE_BYTES = 2**20
SLOTS = 2

MOST_TAGS = 2**16
"""Tags that are remembered: more than the units of most models."""

Pieces = tuple[torch.Tensor, ...]

CheckRow = Callable[[int, torch.Tensor], None]
"""Called with a peer's rank and the end of what it sent: raises where that is not what this rank is at."""


@lru_cache(MOST_TAGS)
def tag_of(kind: str, unit: str, size_bytes: int) -> int:
    """Of a collective's transfers: 31 bits, equal on all ranks."""
    return zlib.crc32(f"{kind} {unit} {size_bytes}".encode()) & 0x7FFFFFFF


def send(piece: torch.Tensor, peer: int, group: dist.ProcessGroup, tag: int) -> Any:
    """Starts sending to a rank of the group. Without what dist.isend adds, which is felt with many small pieces."""
    return group.send([piece], peer, tag)


def receive(place: torch.Tensor, peer: int, group: dist.ProcessGroup, tag: int) -> Any:
    """Starts receiving from a rank of the group."""
    return group.recv([place], peer, tag)


def gather_slices(full: torch.Tensor, rank: int, size: int, group: dist.ProcessGroup, unit: str = "") -> list[Any]:
    """Launches the all-gather of `full`, (N · shard_numel,), in place: no buffer beside it. Returns the works."""
    slices = [pieces_of(part, GATHER_PIECE_BYTES) for part in full.view(size, -1)]
    others = [(rank + distance) % size for distance in range(1, size)]
    to_come = [(peer, piece) for peer in others for piece in slices[peer]]
    to_go = [(peer, piece) for piece in slices[rank] for peer in others]
    tag = tag_of("gather", unit, full.nbytes)
    receives = [receive(piece, peer, group, tag) for peer, piece in to_come]
    return receives + [send(piece, peer, group, tag) for peer, piece in to_go]


def exchange_slices(
    to: torch.Tensor, here: torch.Tensor, rank: int, size: int, group: dist.ProcessGroup, unit: str = ""
) -> list[Any]:
    """Launches the all-to-all of `to` into `here`, (N · m,) each, the own slices apart. Returns the works."""
    going, coming = ([pieces_of(part, REDUCE_PIECE_BYTES) for part in full.view(size, -1)] for full in (to, here))
    others = [(rank + distance) % size for distance in range(1, size)]
    tag = tag_of("exchange", unit, to.nbytes)
    receives = [receive(piece, peer, group, tag) for peer in others for piece in coming[peer]]
    places = range(len(going[rank]))
    return receives + [send(going[peer][place], peer, group, tag) for place in places for peer in others]


def meet(what: str, rank: int, size: int, group: dist.ProcessGroup) -> None:
    """Returns when all ranks are here, for the same thing: an empty message from each to each."""
    tag, nothing = tag_of("meeting", what, size), torch.empty(0)
    others = [peer for peer in range(size) if peer != rank]
    works = [receive(nothing, peer, group, tag) for peer in others]
    works += [send(nothing, peer, group, tag) for peer in others]
    for work in works:
        work.wait()


class Reducer:
    """Runs reduce-scatters one after another, each in the order of its launch."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup) -> None:
        self.rank, self.size, self.group = rank, size, group
        self._queue: SimpleQueue[PairwiseReduction | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def launch(
        self, full: torch.Tensor, unit: str, check: CheckRow | None, into: torch.Tensor | None = None
    ) -> PairwiseReduction:
        """Sends the others their slices of `full`, (N · shard_numel,), and has the own one summed, `into` a place."""
        slices = [pieces_of(part, REDUCE_PIECE_BYTES) for part in full.view(self.size, -1)]
        own = slices[self.rank]
        others = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        to_go = [(peer, slices[peer][place]) for place in range(len(own)) for peer in others]
        slots = full.new_empty(min(SLOTS, len(to_go)), own[0].numel())
        labels.label(slots, labels.COMMUNICATION, f"{unit} received")
        tag = tag_of("reduction", unit, full.nbytes)
        sends = [send(piece, peer, self.group, tag) for peer, piece in to_go]
        sums = own if into is None else pieces_of(into, REDUCE_PIECE_BYTES)
        reduction = PairwiseReduction(self, own, sums, slots, sends, check, tag)
        if self._thread is None:
            self._thread = labels.EngineThread(target=_run_all, args=(self._queue,), name="reduce-scatter", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._queue.put, None)
        self._queue.put(reduction)
        return reduction


class _Arrival(NamedTuple):
    """A piece on its way from `peer`: `place` is the part of `slot` that it fills."""

    peer: int
    work: Any
    place: torch.Tensor
    slot: torch.Tensor


class PairwiseReduction:
    """One reduce-scatter in flight: `run` receives and sums, in the thread; `wait` blocks until that is done."""

    def __init__(
        self, reducer: Reducer, own: Pieces, sums: Pieces, slots: torch.Tensor, sends: list[Any],
        check: CheckRow | None, tag: int,
    ) -> None:  # fmt: skip
        self._group, self._tag = reducer.group, tag
        self._lower, self._higher = range(reducer.rank), range(reducer.rank + 1, reducer.size)
        self._own, self._sums = own, sums
        self._sends = sends
        self._check = check
        self._slots: torch.Tensor | None = slots
        self._free = deque(slots)
        self._arriving: deque[_Arrival] = deque()
        self._to_come = iter([(peer, piece) for piece in self._own for peer in (*self._lower, *self._higher)])
        self._error: BaseException | None = None
        self._done = threading.Event()

    def wait(self) -> None:
        """Raises here what has gone wrong in the thread."""
        try:
            self._done.wait()
        except BaseException:  # Ctrl-C: who catches it may give back the memory that the thread writes to
            self._done.wait()
            raise
        self._slots = None  # here, not in the thread: what is alive when is then the same in every run
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        """Lets go of every tensor but the slots before it says that it is done."""
        try:
            self._receive_all()
        except BaseException as error:
            self._error = error
        finally:
            self._own, self._sums, self._sends, self._to_come, self._check = (), (), [], iter([]), None
            self._arriving.clear()
            self._free.clear()
            self._done.set()

    def _receive_all(self) -> None:
        with torch.no_grad():
            for own, total in zip(self._own, self._sums, strict=True):
                self._sum(own, total, is_last=own is self._own[-1])
        for sent in self._sends:
            sent.wait()

    def _sum(self, own: torch.Tensor, total: torch.Tensor, is_last: bool) -> None:
        """total := ((rank 0's + rank 1's) + rank 2's) + ... The lower ranks' sum comes first; adding `own` commutes."""
        so_far = own
        if self._lower:
            lowest = self._take(is_last)
            for _ in self._lower[1:]:
                self._add_next(lowest.place, lowest.place, is_last)
            so_far = torch.add(own, lowest.place, out=total)
            self._free.append(lowest.slot)
        for _ in self._higher:
            so_far = self._add_next(so_far, total, is_last)

    def _add_next(self, so_far: torch.Tensor, total: torch.Tensor, is_last: bool) -> torch.Tensor:
        arrived = self._take(is_last)
        torch.add(so_far, arrived.place, out=total)
        self._free.append(arrived.slot)
        return total

    def _take(self, is_last: bool) -> _Arrival:
        """The next piece, once it is there; receives are launched into all slots that are free."""
        while self._free and (following := next(self._to_come, None)):
            self._receive(*following)
        arrived = self._arriving.popleft()
        arrived.work.wait()
        if is_last and self._check is not None:
            try:
                self._check(arrived.peer, arrived.place)
            except RuntimeError as error:  # told at the end: the others' transfers must not be left hanging
                self._error = self._error or error
        return arrived

    def _receive(self, peer: int, like: torch.Tensor) -> None:
        slot = self._free.popleft()
        place = slot[: like.numel()]
        work = receive(place, peer, self._group, self._tag)
        self._arriving.append(_Arrival(peer, work, place, slot))


def pieces_of(part: torch.Tensor, most_bytes: int) -> Pieces:
    """A slice as it is sent: in parts of at most so many bytes."""
    return part.split(max(1, most_bytes // part.element_size()))


def _run_all(queue: SimpleQueue[PairwiseReduction | None]) -> None:
    while (reduction := queue.get()) is not None:
        reduction.run()
