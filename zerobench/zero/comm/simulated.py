"""A simulated world: one process runs one rank of N over torch's fake process group, which sends nothing.

The engine runs as in a real world, with the same layouts, buffers and operations, so memory and traffic equal a real
rank's. Data from the other ranks is zero, so that numbers stay finite and runs repeat:

    reduce_scatter              this rank's slice := its own part of the mean
    all_gather                  the others' slices := 0
    all_to_all                  the others' slices := 0
    all_reduce and the rest     as in a world of one rank

Losses, weights and times mean nothing.
The fake group is private to torch; a test compares a simulated run with real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist

from .. import labels
from .backends import NcclComm
from .base import GroupComm, Handle, Into, Sizes, Waitable, rank_slices, slice_of
from .gloo import GATHER_PIECE_BYTES, REDUCE_PIECE_BYTES, SLOTS, GlooComm

TAG = 7000
"""An arbitrary tag: the fake group does not match sends with receives."""


class SimulatedGloo(GlooComm):
    """The pairwise exchange of gloo at constant cost: one of several equal pieces is sent, and accounted once per piece
    and other rank. Nothing is received or summed, so that a world of 1,024 ranks costs no more than one of 8, and a
    shard of 1 GB no more than one of 1 MB.
    """

    def reduce_scatter(self, full: torch.Tensor, unit: str = "", into: Into = None, sizes: Sizes = None) -> Handle:
        own = slice_of(full, self.rank, self.size, sizes)
        pieces = Pieces.of(own, REDUCE_PIECE_BYTES)
        slots = full.new_empty(min(SLOTS, len(pieces) * (self.size - 1)), pieces.largest)
        labels.label(slots, labels.COMMUNICATION, f"{unit} received")
        with labels.collective("reduce_scatter", unit) as operation:
            if sizes is None:
                self._send_to_all(pieces)
            for peer, part in enumerate(() if sizes is None else rank_slices(full, self.size, sizes)):
                self._send(Pieces.of(part, REDUCE_PIECE_BYTES), [peer] * (peer != self.rank))
        if into is not None:
            with torch.no_grad():
                into.copy_(own)
        held = [slots]  # the receive slots stay allocated until the wait, like a real reduction's
        return Handle([], held.clear, operation)

    def all_gather(self, full: torch.Tensor, unit: str = "", sizes: Sizes = None) -> Handle:
        with labels.collective("all_gather", unit) as operation:
            own = slice_of(full, self.rank, self.size, sizes)
            self._send_to_all(Pieces.of(own, GATHER_PIECE_BYTES))
        _zero_others(full, own)
        return Handle([], operation=operation)

    def meet(self, what: str) -> None:
        """Does nothing: there is no other rank."""

    def _exchange(self, to: torch.Tensor, here: torch.Tensor, unit: str) -> list[Waitable]:
        _zero_others(here, slice_of(here, self.rank, self.size, None))
        peer = (self.rank + 1) % self.size
        self.group.recv([here.view(self.size, -1)[peer]], peer, TAG)
        self._send_to_all(Pieces.of(slice_of(to, self.rank, self.size, None), REDUCE_PIECE_BYTES))
        return []

    def _send_to_all(self, pieces: Pieces) -> None:
        self._send(pieces, [peer % self.size for peer in range(self.rank + 1, self.rank + self.size)])

    def _send(self, pieces: Pieces, others: list[int]) -> None:
        for piece, times in pieces.different() if others else ():
            with labels.standing_for(others, times):
                self.group.send([piece], (self.rank + 1) % self.size, TAG)


@dataclass(frozen=True)
class Pieces:
    """The parts in which gloo's ranks exchange a slice: `count` pieces of `largest` elements, and one with the rest."""

    slice: torch.Tensor
    largest: int
    count: int

    @classmethod
    def of(cls, part: torch.Tensor, most_bytes: int) -> Self:
        """Splits `part`, (numel,), into pieces of at most `most_bytes` each."""
        largest = max(1, min(part.numel(), most_bytes // part.element_size()))
        return cls(part, largest, part.numel() // largest)

    def __len__(self) -> int:
        return self.count + (self.count * self.largest < self.slice.numel())

    def different(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yields a piece of each size, and the number of such pieces."""
        if self.count:
            yield self.slice[: self.largest], self.count
        if len(self) > self.count:
            yield self.slice[self.count * self.largest :], 1


def _zero_others(full: torch.Tensor, own: torch.Tensor) -> None:
    """Zeroes `full` outside of its view `own`."""
    first = own.storage_offset() - full.storage_offset()
    with torch.no_grad():
        full[:first].zero_()
        full[first + own.numel() :].zero_()


def _scatter_alone(into: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> Any:
    work = NcclComm.scatter_into(into, full, group=group, async_op=async_op)
    own = full.numel() // dist.get_world_size(group)
    into.copy_(full.narrow(0, dist.get_rank(group) * own, own))
    return work


def _gather_alone(full: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> Any:
    work = NcclComm.gather_into(full, own, group=group, async_op=async_op)
    _zero_others(full, own)
    return work


def _exchange_alone(here: torch.Tensor, to: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> Any:
    work = NcclComm.exchange_into(here, to, group=group, async_op=async_op)
    here.zero_()
    return work


class SimulatedNccl(NcclComm):
    """NCCL's collectives, on streams. Outputs are overwritten: the fake group's depend on torch's version."""

    scatter_into = staticmethod(_scatter_alone)
    gather_into = staticmethod(_gather_alone)
    exchange_into = staticmethod(_exchange_alone)


KINDS: dict[str, type[GroupComm]] = {"cpu": SimulatedGloo, "cuda": SimulatedNccl}
"""Device type -> class."""
