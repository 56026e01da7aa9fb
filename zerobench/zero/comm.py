"""Every byte between ranks passes here. The stages ask for a collective; how it travels is the backend's.

A full buffer has `N · shard_numel` elements; slice j belongs to rank j. Both collectives work in place:

    reduce_scatter(full)   own slice := sum over ranks of that slice      (other slices: left as they were)
    all_gather(full)       slice j := rank j's slice j, for every j       (own slice: must be filled before)

[Note: true reduce-scatter on gloo]
gloo's own reduce-scatter clones its input and runs an all-reduce, which sends twice what is needed and
leaves the order of the sum to the ring. Here the ranks exchange slices pairwise and each sums its own, in
the order of the ranks: (N-1)/N of the buffer on the wire, and the same bits for every stage. The price
is a receive side of (N-1)/N of the buffer. Gathers are broadcasts of slices, in place: no hidden buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from . import labels

PIECE_BYTES = 4 * 2**20
"""A large transfer runs about half duplex in one piece; pieces of this size overlap both directions."""

# torch 2.13 renames these two; 2.11 knows the old names only.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Handle:
    """A collective in flight. `wait` completes it and drops every tensor that it kept alive."""

    def __init__(self, works: list[Any], finish: Callable[[], None] | None = None) -> None:
        self._works = works
        self._finish = finish

    def wait(self) -> None:
        """Blocks (on CUDA: the current stream) until the collective is done. A second call does nothing."""
        works, finish = self._works, self._finish
        self._works, self._finish = [], None
        for work in works:
            work.wait()
        if finish is not None:
            finish()


class Comm:
    """A world of one rank: nothing travels. The base of the backends below."""

    rank = 0
    size = 1

    def reduce_scatter(self, full: torch.Tensor, unit: str = "") -> Handle:
        """Sums `full` over the ranks into the own slice. `full`: (N · shard_numel,)."""
        return Handle([])

    def all_gather(self, full: torch.Tensor, unit: str = "") -> Handle:
        """Fills every slice of `full` from its owner. `full`: (N · shard_numel,)."""
        return Handle([])

    def all_reduce(self, full: torch.Tensor, unit: str = "") -> Handle:
        """Sums `full` over the ranks, everywhere: twice what a reduce-scatter sends."""
        return Handle([])

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copies rank 0's `tensor` to every rank; outside the volume (start-up, buffers)."""

    def maximum(self, flags: torch.Tensor) -> None:
        """Elementwise maximum over the ranks, in place; outside the volume."""

    def sum(self, values: torch.Tensor) -> None:
        """Elementwise sum over the ranks, in place; outside the volume."""


class GroupComm(Comm):
    """What all process groups share."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_reduce(self, full: torch.Tensor, unit: str = "") -> Handle:
        with labels.collective("all_reduce", unit):
            return Handle([dist.all_reduce(full, group=self.group, async_op=True)])

    def broadcast(self, tensor: torch.Tensor) -> None:
        dense = tensor.contiguous()  # gloo sends the memory, whatever the strides say
        with labels.collective("control"):
            dist.broadcast(dense, group_src=0, group=self.group)
        if dense is not tensor:
            tensor.copy_(dense)

    def maximum(self, flags: torch.Tensor) -> None:
        with labels.collective("control"):
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)

    def sum(self, values: torch.Tensor) -> None:
        with labels.collective("control"):
            dist.all_reduce(values, group=self.group)


class NcclComm(GroupComm):
    """NCCL's own collectives, in place."""

    def reduce_scatter(self, full: torch.Tensor, unit: str = "") -> Handle:
        own = full.chunk(self.size)[self.rank]
        with labels.collective("reduce_scatter", unit):
            return Handle([_scatter_into(own, full, group=self.group, async_op=True)])

    def all_gather(self, full: torch.Tensor, unit: str = "") -> Handle:
        own = full.chunk(self.size)[self.rank]
        with labels.collective("all_gather", unit):
            return Handle([_gather_into(full, own, group=self.group, async_op=True)])


class GlooComm(GroupComm):
    """[Note: true reduce-scatter on gloo]"""

    def reduce_scatter(self, full: torch.Tensor, unit: str = "") -> Handle:
        slices = full.view(self.size, -1)
        received = full.new_empty(self.size - 1, slices.size(1))
        labels.label(received, labels.COMMUNICATION, f"{unit} received")
        others = [rank for rank in range(self.size) if rank != self.rank]
        works = []
        with labels.collective("reduce_scatter", unit):
            for row, peer in zip(received, others, strict=True):
                works += [dist.irecv(p, group_src=peer, group=self.group) for p in _pieces(row)]
            for peer in others:
                works += [dist.isend(p, group_dst=peer, group=self.group) for p in _pieces(slices[peer])]
        return Handle(works, lambda: _sum_in_rank_order(slices[self.rank], received, self.rank))

    def all_gather(self, full: torch.Tensor, unit: str = "") -> Handle:
        works = []
        with labels.collective("all_gather", unit):
            for owner, part in enumerate(full.view(self.size, -1)):
                for piece in _pieces(part):
                    works.append(dist.broadcast(piece, group_src=owner, group=self.group, async_op=True))
        return Handle(works)


def _pieces(part: torch.Tensor) -> Iterator[torch.Tensor]:
    return iter(part.split(max(1, PIECE_BYTES // part.element_size())))


def _sum_in_rank_order(own: torch.Tensor, received: torch.Tensor, rank: int) -> None:
    """own := ((slice of rank 0 + of rank 1) + of rank 2) + ... with no buffer beside `received`.

    The lower ranks' rows are summed in the first of them; adding that to `own` commutes to the bit.
    """
    lower, higher = received[:rank], received[rank:]
    for row in lower[1:]:
        lower[0].add_(row)
    if rank > 0:
        own.add_(lower[0])
    for row in higher:
        own.add_(row)


_BACKENDS = {"gloo": GlooComm, "nccl": NcclComm}


def connect(group: dist.ProcessGroup | None, device: torch.device) -> Comm:
    """The seam for `group`, by default torch's default group; without one, a world of one rank.

    Raises ValueError for a backend that the engine does not know.
    """
    if group is None:
        if not dist.is_initialized():
            return Comm()
        group = dist.group.WORLD
    assert group is not None
    if dist.get_rank(group) < 0:
        raise ValueError("group: this rank is not a member of the process group that it was given")
    if dist.get_world_size(group) == 1:
        return Comm()
    per_device = dict(entry.split(":") for entry in dist.get_backend_config(group).split(",") if ":" in entry)
    backend = per_device.get(device.type, str(dist.get_backend(group)))
    if backend not in _BACKENDS:
        raise ValueError(f"group: backend {backend!r} is not supported; use one of {', '.join(_BACKENDS)}")
    return _BACKENDS[backend](group)
