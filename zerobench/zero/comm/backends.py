"""Process groups as backends of comm/base.py: NCCL, gloo for tensors on a GPU, and what they share with comm/gloo.py.

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
from .base import Comm, Handle, Into, Sizes, Waitable, backend_for, slice_of

# torch 2.13 renames these two; 2.11 knows the old names only.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

TREE_FROM = 16
"""Ranks from which on flags are gathered on rank 0 and sent from there: gloo's all-reduce is a ring, 2 (N - 1) messages
that wait for one another, and its broadcast a tree.
"""

HIGH = -1
"""Stream priority: compute waits for collectives, so their few kernels start as soon as the GPU has room for them."""

Collective = Callable[..., Any]
"""A callable that takes `async_op`, as the collectives of torch.distributed do."""


class Threads:
    """A process group whose own threads transfer the bytes, as in gloo: no stream is needed."""

    def launch(self, collective: Collective) -> Waitable:
        """Starts `collective`."""
        work: Waitable = collective(async_op=True)
        return work


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


class GroupComm(Comm):
    """The part of a backend that is common to all process groups."""

    exchange_into: Callable[..., Any] = staticmethod(dist.all_to_all_single)
    group: dist.ProcessGroup
    cpu_group: dist.ProcessGroup
    """The process group for flags on the host: `group`, if it has a CPU backend, or another one of the same ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = self.cpu_group = group
        self.rank = dist.get_rank(group)
        self.size = self.averaged_ranks = dist.get_world_size(group)
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

    def maximum(self, flags: torch.Tensor) -> None:
        group = self.group if flags.is_cuda else self.cpu_group
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
