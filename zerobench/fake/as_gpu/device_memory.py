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
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...sizes import show_bytes
from ...zero import labels
from ..caching_allocator import CachingAllocator, MemoryBlock
from ..observers import Growth, IntervalMark

BLAS_WORKSPACE = {"ampere": 2 * 4 * 2**20 + 8 * 16 * 2**10, "hopper": 32 * 2**20}
"""Bytes of a workspace, shared by cuBLAS and cuBLASLt, on GPUs up to Ada, and from Hopper on
(aten/src/ATen/cuda/CublasHandlePool.cpp of torch 2.8 to 2.13; CUBLAS_WORKSPACE_CONFIG changes it)."""

COMPUTE = 0
"""The number of the compute stream."""


DEFAULT, EXPANDABLE = "", "expandable_segments:True"
EMPTIED, ONE_STREAM = "empty_cache() after step 1", "one stream"

SETTINGS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    EXPANDABLE: {"expandable": True},
    "max_split_size_mb:128": {"most_split": 128 * 2**20},
    EMPTIED: {},
    ONE_STREAM: {},
}
"""Setting of the allocator, or a change of the loop -> arguments of CachingAllocator."""


@dataclass(frozen=True)
class DeviceMemory:
    """A device's memory under its allocator: at the peak of the measured steps, or at the end of a snapshot."""

    allocated_bytes: int
    """The most bytes that are handed out."""
    causes: dict[str, int]
    """Cause (caching_allocator.CAUSES) -> its part of the default allocator's reserved bytes, at the instant with the
    most reserved bytes, and among such instants the one with the most allocated bytes."""
    grew_last: str
    """Step and phase in which the reserved memory last grew, and the size of the request that no free block fit."""
    by_setting: dict[str, int]
    """Setting (SETTINGS) -> peak of the bytes that the simulated allocator reserves with it."""

    @property
    def reserved_by_default(self) -> int:
        """Bytes that the simulated allocator reserves by default."""
        return self.by_setting[DEFAULT]

    @property
    def reserved_bytes(self) -> tuple[int, int]:
        """Bytes reserved by default and with expandable segments, the smaller figure first."""
        low, high = sorted((self.by_setting[DEFAULT], self.by_setting[EXPANDABLE]))
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

    def memory(self, settings: Collection[str] = SETTINGS.keys()) -> DeviceMemory:
        """Returns the device's memory according to the log, with those `settings`; the first must be DEFAULT."""
        has_streams = any(stream != COMPUTE for _, stream in self.log)
        memories = [self._replay(setting) for setting in settings if setting != ONE_STREAM or has_streams]
        return replace(
            memories[0], by_setting={name: n for memory in memories for name, n in memory.by_setting.items()}
        )

    def _replay(self, setting: str) -> DeviceMemory:
        """Replays the log; the peaks are those of measured steps. Causes are found for the default allocator alone."""
        allocator = CachingAllocator(**SETTINGS[setting])
        blocks: dict[int, MemoryBlock] = {}  # by id of a storage, which the log keeps alive
        sizes: Counter[int] = Counter()
        phase, step, steps, threads_with_workspace = "init", 0, 0, set[str]()
        allocated, grew_last, causes = 0, (0, "init", 0), dict[str, int]()
        peak, fullest = (0, 0), (0, 0)  # reserved and allocated: the most of measured steps, the most of this step
        step_causes, is_new = causes, False  # at `fullest`, unless the memory is there and they are older

        def allocate(size: int, stream: int) -> MemoryBlock:
            nonlocal grew_last, fullest, is_new
            reserved = allocator.reserved
            block = allocator.allocate(size, COMPUTE if setting == ONE_STREAM else stream)
            if allocator.reserved > reserved:
                grew_last = (step, phase, size)
            if (now := (allocator.reserved, allocator.allocated)) > fullest:
                fullest, is_new = now, setting == DEFAULT
            return block

        def find_causes() -> None:
            nonlocal step_causes, is_new
            if is_new:
                step_causes, is_new = allocator.causes(COMPUTE), False

        for event, stream in self.log:
            if isinstance(event, Growth):
                if event.stored.tier != labels.DEVICE:
                    continue
                # allocates, resizes or frees a storage; a resize allocates the new block before it frees the old one
                key = id(event.stored)
                before = blocks.pop(key, None)
                sizes[key] += event.grown
                if sizes[key] > 0:
                    blocks[key] = allocate(sizes[key], stream)
                if before is not None:
                    find_causes()
                    allocator.free(before)
            elif event.what == "phase":
                phase = event.name
            elif event.what == "matmul":
                thread = "autograd" if phase == "backward" else "script"
                if thread not in threads_with_workspace and self.workspace_bytes:
                    allocate(self.workspace_bytes, COMPUTE)
                threads_with_workspace.add(thread)
            elif event == IntervalMark("end", "init"):
                allocator.empty_cache()  # as a run on a GPU does when all is built
            elif event.what == "begin":
                step += 1
                if setting == EMPTIED and step == 2:
                    allocator.empty_cache()
                allocator.reset_peaks()
                fullest, is_new = (allocator.reserved, allocator.allocated), setting == DEFAULT
            elif event == IntervalMark("end", "step"):
                find_causes()
                steps, allocated = step, max(allocated, allocator.peak_allocated)
                if fullest > peak:
                    peak, causes = fullest, step_causes
        where = f"step {grew_last[0]} of {steps}, {grew_last[1]}" if grew_last[0] else grew_last[1]
        return DeviceMemory(allocated, causes, f"{where}, for {show_bytes(grew_last[2])}", {setting: peak[0]})
