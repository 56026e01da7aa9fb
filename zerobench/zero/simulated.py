"""A simulated world: one process is one rank of N, over torch's fake process group, which moves nothing.

The engine runs as it does in a real world: the same layouts, buffers and operations, so memory and traffic are those of
this rank. What the other ranks would have sent is zero, so that numbers stay finite and runs are alike:

    reduce_scatter              own slice := this rank's own part of the mean
    all_gather                  the others' slices := 0
    all_to_all                  what the others send is 0
    all_reduce and all else     as if nobody else were there

Losses, weights and times mean nothing. Nothing is stamped: nobody is there to be at another place.
The fake group is torch's own, and private; a test holds a simulated run to real ones.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .backends import GlooComm, GroupComm, NcclComm
from .comm import Comm, Handle
from .stamp import Stamp


class Unstamped(Comm):
    """Before a backend: collectives bear no stamps."""

    def reduce_scatter(
        self, full: torch.Tensor, unit: str = "", stamp: Stamp | None = None, into: torch.Tensor | None = None
    ) -> Handle:
        return super().reduce_scatter(full, unit, None, into)

    def all_gather(self, full: torch.Tensor, unit: str = "", stamp: Stamp | None = None) -> Handle:
        return super().all_gather(full, unit, None)

    def all_reduce(self, full: torch.Tensor, unit: str = "", stamp: Stamp | None = None) -> Handle:
        return super().all_reduce(full, unit, None)

    def all_to_all(
        self, to: torch.Tensor, here: torch.Tensor, name: str, unit: str = "", stamp: Stamp | None = None
    ) -> Handle:
        return super().all_to_all(to, here, name, unit, None)


class SilentGroup:
    """What exchange.py uses of a process group: `send` to nobody, `recv` of zeros."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.send = group.send

    def recv(self, places: list[torch.Tensor], peer: int, tag: int) -> Any:
        """Fills `places` with zeros."""
        for place in places:
            place.zero_()
        return self._group.recv(places, peer, tag)


class SimulatedGloo(Unstamped, GlooComm):
    """Slices go pairwise, through the slots that they would be received into."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group, wires=SilentGroup(group))


def _scatter_alone(place: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> Any:
    work = NcclComm.scatter_into(place, full, group=group, async_op=async_op)
    own = full.numel() // dist.get_world_size(group)
    place.copy_(full.narrow(0, dist.get_rank(group) * own, own))
    return work


def _gather_alone(full: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> Any:
    work = NcclComm.gather_into(full, own, group=group, async_op=async_op)
    first = dist.get_rank(group) * own.numel()
    full[:first].zero_()
    full[first + own.numel() :].zero_()
    return work


def _exchange_alone(here: torch.Tensor, to: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> Any:
    work = NcclComm.exchange_into(here, to, group=group, async_op=async_op)
    here.zero_()
    return work


class SimulatedNccl(Unstamped, NcclComm):
    """NCCL's collectives, in lanes. What the fake group leaves in their outputs differs between versions of torch."""

    scatter_into = staticmethod(_scatter_alone)
    gather_into = staticmethod(_gather_alone)
    exchange_into = staticmethod(_exchange_alone)


KINDS: dict[str, type[GroupComm]] = {"cpu": SimulatedGloo, "cuda": SimulatedNccl}
"""By device."""
