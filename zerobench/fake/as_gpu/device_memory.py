"""A GPU's memory under its caching allocator: the allocations of a run, in order, replayed through the allocator.

    allocated   bytes that are given out: each storage rounded up to 512 bytes, one above 1 MiB with up to 1 MiB that
                its block was not split from; and the workspaces of cuBLAS
    reserved    bytes that the allocator has taken from the device and not given back; nvidia-smi shows these, and the
                CUDA context beside them. Between two figures: that of the default allocator, and that with expandable
                segments, whichever is larger

A workspace is allocated per handle and stream, and each thread has a handle: one is the forward's, one the backward's.

Not here: kernels' scratch memory; what NCCL and the CUDA context take from the device past the allocator; memory that
the order of another rank's messages would keep longer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ...zero import labels
from ..caching_allocator import CachingAllocator, MemoryBlock
from ..observers import Growth, IntervalMark

BLAS_WORKSPACE = {"ampere": 2 * 4 * 2**20 + 8 * 16 * 2**10, "hopper": 32 * 2**20}
"""Bytes of a workspace of cuBLAS, and of cuBLASLt, which uses the same one: on GPUs up to Ada, and from Hopper on
(aten/src/ATen/cuda/CublasHandlePool.cpp of torch 2.8 to 2.13; CUBLAS_WORKSPACE_CONFIG changes it)."""

COMPUTE = 0
"""The number of the stream that computes."""


@dataclass(frozen=True)
class DeviceMemory:
    """The most bytes in the measured steps. `reserved_bytes`: the lower and the higher figure."""

    allocated_bytes: int
    reserved_bytes: tuple[int, int]


@dataclass
class Allocations:
    """Writes down what a ledger hears. `workspace_bytes`: of a handle of cuBLAS."""

    workspace_bytes: int
    log: list[tuple[Growth | IntervalMark, int]] = field(default_factory=list)
    """Each with the number of the stream that was the current one."""
    _streams: dict[object, int] = field(default_factory=dict)

    def hear(self, heard: Growth | IntervalMark) -> None:
        """Notes a change or a mark, and the stream, which torch.cpu's placeholders tell."""
        self.log.append((heard, self._streams.setdefault(torch.cpu.current_stream(), len(self._streams))))

    def memory(self) -> DeviceMemory:
        """Returns the device's memory, of all that was noted."""
        default, expandable = (AllocatorReplay(self, CachingAllocator(expandable=way)).run() for way in (False, True))
        reserved = sorted(one.peak_reserved for one in (default, expandable))
        return DeviceMemory(default.peak_allocated, (reserved[0], reserved[1]))


class AllocatorReplay:
    """One pass over a log. `peak_allocated`, `peak_reserved`: the most in measured steps."""

    def __init__(self, allocations: Allocations, allocator: CachingAllocator) -> None:
        self._noted, self._allocator = allocations, allocator
        self._blocks: dict[int, MemoryBlock] = {}
        self._sizes: dict[int, int] = {}
        self._handles = {"forward", "backward"}
        self.peak_allocated = self.peak_reserved = 0

    def run(self) -> AllocatorReplay:
        """Replays it all."""
        for heard, stream in self._noted.log:
            if isinstance(heard, IntervalMark):
                self._mark(heard)
            elif heard.stored.tier == labels.DEVICE:
                self._grow(heard, stream)
        return self

    def _grow(self, growth: Growth, stream: int) -> None:
        """A storage that changes its size is a new block, which its content is copied to, and then an old one less."""
        key = id(growth.stored)  # the log keeps it alive
        before = self._blocks.pop(key, None)
        self._sizes[key] = size = self._sizes.get(key, 0) + growth.grown
        if size > 0:
            self._blocks[key] = self._allocator.allocate(size, stream)
        if before is not None:
            self._allocator.free(before)

    def _mark(self, mark: IntervalMark) -> None:
        allocator = self._allocator
        if mark.what == "phase" and mark.name in self._handles:
            self._handles.discard(mark.name)
            if self._noted.workspace_bytes:
                allocator.allocate(self._noted.workspace_bytes, COMPUTE)
        elif mark == IntervalMark("end", "init"):
            allocator.empty_cache()  # as a run on a GPU does when all is built
        elif mark.what == "begin":
            allocator.reset_peaks()
        elif mark == IntervalMark("end", "step"):
            self.peak_allocated = max(self.peak_allocated, allocator.peak_allocated)
            self.peak_reserved = max(self.peak_reserved, allocator.peak_reserved)
