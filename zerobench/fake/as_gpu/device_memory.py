"""A GPU's memory under its caching allocator: replays a run's allocations, in order, through the allocator.

    allocated   bytes handed out: each storage rounded up to 512 bytes, a storage above 1 MiB with up to 1 MiB that was
                not split off its block; and the workspaces of cuBLAS
    reserved    bytes that the allocator has taken from the device and not returned; nvidia-smi shows these plus the
                CUDA context. A range between two figures, for the default allocator and with expandable segments,
                smaller first

A workspace is allocated per handle and stream, at the first product of matrices, after the product's result. Each
thread has a handle: autograd's for backward, the script's for all else.

Not modeled: kernels' scratch memory; device memory that NCCL and the CUDA context take outside the allocator; memory
that would be kept longer because of the order of another rank's messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ...zero import labels
from ..caching_allocator import CachingAllocator, MemoryBlock
from ..observers import Growth, IntervalMark

BLAS_WORKSPACE = {"ampere": 2 * 4 * 2**20 + 8 * 16 * 2**10, "hopper": 32 * 2**20}
"""Bytes of a workspace, shared by cuBLAS and cuBLASLt, on GPUs up to Ada, and from Hopper on
(aten/src/ATen/cuda/CublasHandlePool.cpp of torch 2.8 to 2.13; CUBLAS_WORKSPACE_CONFIG changes it)."""

COMPUTE = 0
"""The number of the compute stream."""


@dataclass(frozen=True)
class DeviceMemory:
    """Peak bytes in the measured steps: allocated, reserved by default, and reserved with expandable segments."""

    allocated_bytes: int
    reserved_by_default: int
    reserved_expandable: int

    @property
    def reserved_bytes(self) -> tuple[int, int]:
        """What is reserved, the lower figure and the higher."""
        low, high = sorted((self.reserved_by_default, self.reserved_expandable))
        return low, high


@dataclass
class Allocations:
    """Logs the events of a ledger. `workspace_bytes`: of a cuBLAS handle."""

    workspace_bytes: int
    log: list[tuple[Growth | IntervalMark, int]] = field(default_factory=list)
    """Events, each with the number of the current stream."""
    _streams: dict[object, int] = field(default_factory=dict)

    def hear(self, heard: Growth | IntervalMark) -> None:
        """Logs a change or a mark, and the current stream according to torch.cpu's placeholders."""
        self.log.append((heard, self._streams.setdefault(torch.cpu.current_stream(), len(self._streams))))

    def memory(self) -> DeviceMemory:
        """Returns the device's memory according to the log."""
        default, expandable = (AllocatorReplay(self, CachingAllocator(expandable=way)).run() for way in (False, True))
        return DeviceMemory(default.peak_allocated, default.peak_reserved, expandable.peak_reserved)


class AllocatorReplay:
    """One pass over a log. `peak_allocated`, `peak_reserved`: maxima in measured steps."""

    def __init__(self, allocations: Allocations, allocator: CachingAllocator) -> None:
        self._noted, self._allocator = allocations, allocator
        self._blocks: dict[int, MemoryBlock] = {}
        self._sizes: dict[int, int] = {}
        self._phase, self._handles = "", set[bool]()
        self.peak_allocated = self.peak_reserved = 0

    def run(self) -> AllocatorReplay:
        """Replays the whole log."""
        for heard, stream in self._noted.log:
            if isinstance(heard, IntervalMark):
                self._mark(heard)
            elif heard.stored.tier == labels.DEVICE:
                self._grow(heard, stream)
        return self

    def _grow(self, growth: Growth, stream: int) -> None:
        """Allocates, resizes or frees a storage; a resize allocates the new block before it frees the old one."""
        key = id(growth.stored)  # the log keeps it alive
        before = self._blocks.pop(key, None)
        self._sizes[key] = size = self._sizes.get(key, 0) + growth.grown
        if size > 0:
            self._blocks[key] = self._allocator.allocate(size, stream)
        if before is not None:
            self._allocator.free(before)

    def _mark(self, mark: IntervalMark) -> None:
        allocator = self._allocator
        if mark.what == "phase":
            self._phase = mark.name
        elif mark.what == "matmul":
            if (in_backward := self._phase == "backward") not in self._handles and self._noted.workspace_bytes:
                allocator.allocate(self._noted.workspace_bytes, COMPUTE)
            self._handles.add(in_backward)
        elif mark == IntervalMark("end", "init"):
            allocator.empty_cache()  # as a run on a GPU does when all is built
        elif mark.what == "begin":
            allocator.reset_peaks()
        elif mark == IntervalMark("end", "step"):
            self.peak_allocated = max(self.peak_allocated, allocator.peak_allocated)
            self.peak_reserved = max(self.peak_reserved, allocator.peak_reserved)
