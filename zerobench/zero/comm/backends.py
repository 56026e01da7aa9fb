"""The collectives of comm/base.py on each backend: NCCL, and gloo for tensors on a GPU. gloo on the CPU: comm/gloo.py.

[Note: communication streams]
Each kind of collective (gathers, reductions) has a CUDA stream, so that it overlaps with compute. Its three steps::

    1. launch   the communication stream waits for all work queued so far on the current stream: the data to send has
                then been written, and earlier users of the receive buffer's memory have finished
    2. wait     the current stream waits for the event at the collective's end; the host does not wait
    3. free     send and receive buffers are freed in the current stream's order, after `wait`

Every buffer belongs to the compute stream: allocated there before `launch`, freed there after `wait`. So the caching
allocator can reuse its memory immediately, in stream order, without record_stream, which would keep memory until the
host sees, by polling, that the other stream has finished.

torch runs a synchronous collective on the current stream, here the communication stream, and keeps none of its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .. import labels
from .base import Collective, GroupComm, Handle, Into, Sizes, Waitable, slice_of

# torch 2.13 renames these two; 2.11 knows the old names only.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

HIGH = -1
"""Stream priority: compute waits for collectives, so their few kernels start as soon as the GPU has room for them."""


class CommStream:
    """A CUDA stream for one kind of collective (see the note). `cuda`: torch.cuda, or a test double."""

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._stream = cuda.Stream(priority=HIGH)

    def launch(self, collective: Collective) -> Waitable:
        """Queues `collective` on this stream, behind all work queued so far on the current stream."""
        self._stream.wait_stream(self._cuda.current_stream())  # what is sent must have been written: step 1 of the note
        with self._cuda.stream(self._stream):
            collective(async_op=False)
        return StreamWork(self._cuda, self._stream.record_event())


class StreamWork:
    """A collective on a communication stream. Deleting it waits too: its buffers are still in use."""

    def __init__(self, cuda: Any, end: Any) -> None:
        self._cuda = cuda
        self._end: Any = end

    def wait(self) -> None:
        """Makes the current stream wait for the collective's end, once; the host does not block."""
        end, self._end = self._end, None
        if end is not None:
            self._cuda.current_stream().wait_event(end)

    def __del__(self) -> None:
        self.wait()


def reduce_to_owners(
    into: torch.Tensor, full: torch.Tensor, sizes: Sequence[int], rank: int, group: dist.ProcessGroup, async_op: bool
) -> Handle:
    """Sums each slice of `full` on its owner, this rank's into `into`: one reduction per owner, of unequal size."""
    parts = full.split([*sizes])
    reduce = partial(dist.reduce, group=group, async_op=async_op)
    works = [reduce(part, group_dst=owner) for owner, part in enumerate(parts) if part.numel()]
    is_elsewhere = parts[rank].data_ptr() != into.data_ptr()
    handle = Handle(
        [work for work in works if work is not None], partial(into.copy_, parts[rank]) if is_elsewhere else None
    )
    if not async_op:
        handle.wait()
    return handle


def broadcast_from_owners(full: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup, async_op: bool) -> Handle:
    """Fills each slice of `full` from its owner: one broadcast per owner, of unequal size."""
    broadcast = partial(dist.broadcast, group=group, async_op=async_op)
    works = [broadcast(part, group_src=owner) for owner, part in enumerate(full.split([*sizes])) if part.numel()]
    return Handle([work for work in works if work is not None])


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
