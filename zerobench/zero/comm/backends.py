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
from .base import GroupComm, Handle, Into, Sizes, slice_of
from .streams import CommStream, Waitable

# torch 2.13 renames these two; 2.11 knows the old names only.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class OwnersWork:
    """One collective per owner. `own`: this rank's slice, whose sum is copied to `into`."""

    def __init__(
        self, works: Iterable[Waitable | None], async_op: bool, own: torch.Tensor | None = None,
        into: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self._works, self._own, self._into = [work for work in works if work is not None], own, into
        if not async_op:
            self.wait()

    def wait(self) -> None:
        """Waits for all collectives."""
        for work in self._works:
            work.wait()
        if self._own is not None and self._into is not None and self._own.data_ptr() != self._into.data_ptr():
            self._into.copy_(self._own)


def reduce_to_owners(
    into: torch.Tensor, full: torch.Tensor, sizes: Sequence[int], rank: int, group: dist.ProcessGroup, async_op: bool
) -> OwnersWork:
    """Sums each slice of `full` on its owner, this rank's into `into`: one reduction per owner, of unequal size."""
    parts = full.split([*sizes])
    reduce = partial(dist.reduce, group=group, async_op=async_op)
    works = [reduce(part, group_dst=owner) for owner, part in enumerate(parts) if part.numel()]
    return OwnersWork(works, async_op, parts[rank], into)


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

    def reduce_scatter(self, full: torch.Tensor, unit: str = "", into: Into = None, sizes: Sizes = None) -> Handle:
        into = slice_of(full, self.rank, self.size, sizes) if into is None else into
        carry = partial(self.scatter_into, into, full, group=self.group)
        if sizes is not None:
            carry = partial(reduce_to_owners, into, full, sizes, self.rank, self.group)
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
