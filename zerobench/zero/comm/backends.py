"""The collectives of comm/base.py on each backend: gloo, NCCL, and gloo for tensors on a GPU.

gloo on the CPU: comm/gloo.py. Streams on a GPU: comm/streams.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .. import labels
from .base import Comm, Sizes
from .streams import CommStream, Handle, Threads, Waitable

# torch 2.13 renames these two; 2.11 knows the old names only.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


FAKE = "fake"
"""torch's name for a process group that sends nothing (torch-private, tested): a simulated world."""


TREE_FROM = 16
"""Ranks from which on flags are gathered on rank 0 and sent from there: gloo's all-reduce is a ring, 2 (N - 1) messages
that wait for one another, and its broadcast a tree.
"""


class GroupComm(Comm):
    """The part of a backend that is common to all process groups."""

    exchange_into: Callable[..., Any] = staticmethod(dist.all_to_all_single)
    group: dist.ProcessGroup

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = self.ranks = dist.get_world_size(group)
        self._hosts = group  # for flags
        self._reductions: Threads | CommStream = Threads()
        self._gathers: Threads | CommStream = Threads()
        self._sent: torch.Tensor | None = None
        """The last control values, kept so that they are freed at the same point in every run and peaks repeat:
        gloo's thread releases its reference only a moment after it reports completion."""
        if backend_for("cpu", group):
            self.flags_device = torch.device("cpu")

    def all_reduce(self, full: torch.Tensor, unit: str = "") -> Handle:
        with labels.collective("all_reduce", unit) as operation:
            work = self._reductions.launch(partial(dist.all_reduce, full, group=self.group))
        return Handle([work], operation=operation)

    def all_to_all(self, to: torch.Tensor, here: torch.Tensor, name: str, unit: str = "") -> Handle:
        with labels.collective(name, unit) as operation:
            works = self._exchange(to, here, unit)
        return Handle(works, operation=operation)

    def _exchange(self, to: torch.Tensor, here: torch.Tensor, unit: str) -> list[Waitable]:
        return [self._reductions.launch(partial(self.exchange_into, here, to, group=self.group))]

    def broadcast(self, tensor: torch.Tensor) -> None:
        dense = tensor.contiguous()  # gloo sends the memory, whatever the strides say
        with labels.collective("control", labels.BUFFERS):
            dist.broadcast(dense, group_src=0, group=self.group)
        if dense is not tensor:
            tensor.copy_(dense)

    def agree_by(self, hosts: dist.ProcessGroup) -> None:
        """Sends flags over `hosts`, a group of the same ranks with a backend for the CPU."""
        self._hosts, self.flags_device = hosts, torch.device("cpu")

    def maximum(self, flags: torch.Tensor) -> None:
        group = self.group if flags.is_cuda else self._hosts
        with labels.collective("control"):
            if self.size >= TREE_FROM and backend_for(flags.device.type, group) == "gloo":
                rows = flags.new_empty(self.size, *flags.shape)
                dist.gather(flags, list(rows) if self.rank == 0 else None, group_dst=0, group=group)
                if self.rank == 0:
                    torch.amax(rows, 0, out=flags)
                dist.broadcast(flags, group_src=0, group=group)
            else:
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        self._sent = flags

    def sum(self, values: torch.Tensor) -> None:
        with labels.collective("control"):
            dist.all_reduce(values, group=self.group)
        self._sent = values


def slices_of(full: torch.Tensor, ranks: int, sizes: Sizes) -> tuple[torch.Tensor, ...]:
    """Returns each rank's slice of `full`."""
    return full.split(full.numel() // ranks if sizes is None else [*sizes])


def slice_of(full: torch.Tensor, rank: int, ranks: int, sizes: Sizes) -> torch.Tensor:
    """Returns a rank's slice of `full`, without splitting the whole."""
    numel = full.numel() // ranks if sizes is None else sizes[rank]
    return full.narrow(0, rank * numel if sizes is None else sum(sizes[:rank]), numel)


class OwnersWork:
    """One collective per owner, in flight together, or complete if they are not asynchronous. `place`: the destination
    of the sum in `own`.
    """

    def __init__(
        self, works: Iterable[Waitable | None], async_op: bool, own: torch.Tensor | None = None,
        place: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self._works, self._own, self._place = [work for work in works if work is not None], own, place
        if not async_op:
            self.wait()

    def wait(self) -> None:
        """Waits for all collectives."""
        for work in self._works:
            work.wait()
        if self._own is not None and self._place is not None and self._own.data_ptr() != self._place.data_ptr():
            self._place.copy_(self._own)


def reduce_to_owners(
    place: torch.Tensor, full: torch.Tensor, sizes: Sequence[int], rank: int, group: dist.ProcessGroup, async_op: bool
) -> OwnersWork:
    """Sums each slice of `full` on its owner, this rank's into `place`: one reduction per owner, of unequal size."""
    parts = full.split([*sizes])
    reduce = partial(dist.reduce, group=group, async_op=async_op)
    works = [reduce(part, group_dst=owner) for owner, part in enumerate(parts) if part.numel()]
    return OwnersWork(works, async_op, parts[rank], place)


def broadcast_from_owners(
    full: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup, async_op: bool
) -> OwnersWork:
    """Fills each slice of `full` from its owner: one broadcast per owner, of unequal size."""
    broadcast = partial(dist.broadcast, group=group, async_op=async_op)
    parts = enumerate(full.split([*sizes]))
    return OwnersWork([broadcast(part, group_src=owner) for owner, part in parts if part.numel()], async_op)


class StagedComm(GroupComm):
    """The backend's own in-place collectives: gloo's for tensors on a GPU, which it stages through host memory."""

    scatter_into: Callable[..., Any] = staticmethod(scatter_into)
    gather_into: Callable[..., Any] = staticmethod(gather_into)

    def reduce_scatter(
        self, full: torch.Tensor, unit: str = "", into: torch.Tensor | None = None, sizes: Sizes = None
    ) -> Handle:
        place = slice_of(full, self.rank, self.size, sizes) if into is None else into
        carry = partial(self.scatter_into, place, full, group=self.group)
        if sizes is not None:
            carry = partial(reduce_to_owners, place, full, sizes, self.rank, self.group)
        with labels.collective("reduce_scatter", unit) as operation:
            return Handle([self._reductions.launch(carry)], operation=operation)

    def all_gather(self, full: torch.Tensor, unit: str = "", sizes: Sizes = None) -> Handle:
        carry = partial(self.gather_into, full, slice_of(full, self.rank, self.size, sizes), group=self.group)
        if sizes is not None:
            carry = partial(broadcast_from_owners, full, sizes, self.group)
        with labels.collective("all_gather", unit) as operation:
            return Handle([self._gathers.launch(carry)], operation=operation)


class NcclComm(StagedComm):
    """NCCL's collectives: gathers on one stream, reductions on another."""

    on_streams = True

    def __init__(self, group: dist.ProcessGroup, cuda: Any = torch.cuda) -> None:
        super().__init__(group)
        self._reductions, self._gathers = CommStream(cuda), CommStream(cuda)

    def share_streams(self, other: NcclComm) -> None:
        """Queues this group's collectives on the other group's streams, so that a second hop runs after the first."""
        self._reductions, self._gathers = other._reductions, other._gathers


def backend_for(device: str, group: dist.ProcessGroup) -> str:
    """Returns the group's backend for tensors on that kind of device, or "" if it has none."""
    per_device = dict(entry.split(":") for entry in dist.get_backend_config(group).split(",") if ":" in entry)
    return per_device.get(device, "")
