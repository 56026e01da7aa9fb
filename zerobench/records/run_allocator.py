"""Columns of a run on memory as allocators, the system and CUDA tell it, beside the ledger and in no sum with it."""

from __future__ import annotations

from dataclasses import dataclass

from .run_memory import RunMemory


@dataclass
class RunAllocator(RunMemory):
    """Totals that know no categories. Those of CUDA are of the timed pass, or of the accounted one where there is no
    timed pass.
    """

    resident_bytes: int | None = None
    """Peak resident set of a rank in the measured steps of the timed pass, as the system counts it."""
    allocated_bytes: int | None = None
    """CUDA: peak of what the allocator has handed out in the measured steps."""
    reserved_bytes: int | None = None
    """CUDA: peak of what the allocator holds from the device."""
    fragmentation_bytes: int | None = None
    """CUDA: reserved_bytes less allocated_bytes of the same rank: held from the device beyond the most that was in use.
    It is what lay idle at the allocated peak, or more where the allocator gave segments back or took some after it."""
    largest_free_block_bytes: int | None = None
    """CUDA: the largest unused piece of a segment at the end: the most to be had without asking the device."""
    split_bytes: int | None = None
    """CUDA: the most that lay free between live pieces of the allocator's segments."""
    alloc_retries: int | None = None
    """CUDA: how often the allocator gave cached segments back to find room, since the process began."""
    device_used_bytes: int | None = None
    """CUDA: in use on the device at the end of the pass, with the context, NCCL and every process on it."""
    pinned_requested_bytes: int | None = None
    """CUDA: peak of pinned host memory in the hands of callers, or freed with the device not done with it. The
    allocator counts its blocks, each a power of two as a rule; of its sizes' own peaks this is the sum."""
    pinned_bytes: int | None = None
    """CUDA: peak of pinned host memory that the allocator held, handed out or kept for later."""
    allocator_peak_bytes: int | None = None
    """The allocator's own total at its peak in the measured steps of the accounted pass, on the rank where it is
    largest: the figure to compare with other systems by. Of a CPU's allocator with what the host tier holds."""
    timed_allocator_peak_bytes: int | None = None
    """allocator_peak_bytes of the timed pass, in which nothing delays what other threads free."""
    allocator_witness: str | None = None
    """Source of the allocator's total: hook, profiler, cuda or none."""
    kept_bytes: int | None = None
    """Bytes on the device that lived through a whole measured step though they are called activations or temporary."""
    heap_bytes: int | None = None
    """Memory that is not torch's: what malloc has handed out beyond torch's allocator at the end of a measured step of
    the accounted pass, less the same before the model was built. numpy's arrays, C libraries'; some KiB of Python's.
    Without the buffers that MKL keeps for its matrix products, and without memory that is not malloc's: files and
    anonymous memory of mmap, shared memory."""
    outside_ledger_bytes: int | None = None
    """The allocator's peak in a step of the accounted pass less the ledger's in the same memory: what kernels,
    libraries and their threads take, on CUDA the allocator's rounding. Of several ranks the one furthest from 0; far
    below 0 it cannot be: the ledger has missed that memory was freed."""
