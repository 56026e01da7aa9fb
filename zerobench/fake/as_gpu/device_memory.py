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

from collections import Counter
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

    def record(self, event: Growth | IntervalMark) -> None:
        """Logs a change or a mark, and the current stream according to torch.cpu's placeholders."""
        self.log.append((event, self._streams.setdefault(torch.cpu.current_stream(), len(self._streams))))

    def memory(self) -> DeviceMemory:
        """Returns the device's memory according to the log."""
        (allocated, default), (_, expandable) = (self._replay(CachingAllocator(expandable=e)) for e in (False, True))
        return DeviceMemory(allocated, default, expandable)

    def _replay(self, allocator: CachingAllocator) -> tuple[int, int]:
        """Replays the log; returns the largest allocated and reserved bytes in measured steps."""
        blocks: dict[int, MemoryBlock] = {}  # by id of a storage, which the log keeps alive
        sizes: Counter[int] = Counter()
        phase, threads_with_workspace = "", set[str]()
        allocated = reserved = 0
        for event, stream in self.log:
            if isinstance(event, Growth):
                if event.stored.tier != labels.DEVICE:
                    continue
                # allocates, resizes or frees a storage; a resize allocates the new block before it frees the old one
                key = id(event.stored)
                before = blocks.pop(key, None)
                sizes[key] += event.grown
                if sizes[key] > 0:
                    blocks[key] = allocator.allocate(sizes[key], stream)
                if before is not None:
                    allocator.free(before)
            elif event.what == "phase":
                phase = event.name
            elif event.what == "matmul":
                thread = "autograd" if phase == "backward" else "script"
                if thread not in threads_with_workspace and self.workspace_bytes:
                    allocator.allocate(self.workspace_bytes, COMPUTE)
                threads_with_workspace.add(thread)
            elif event == IntervalMark("end", "init"):
                allocator.empty_cache()  # as a run on a GPU does when all is built
            elif event.what == "begin":
                allocator.reset_peaks()
            elif event == IntervalMark("end", "step"):
                allocated = max(allocated, allocator.peak_allocated)
                reserved = max(reserved, allocator.peak_reserved)
        return allocated, reserved
