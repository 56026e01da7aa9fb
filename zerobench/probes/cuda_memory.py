"""CUDA's memory statistics: the only module in which probes call torch.cuda for them. It allocates nothing on the
device.

A *segment* is memory that torch's caching allocator got from the device, a *block* a piece of one. *allocated*: bytes
in blocks that tensors use, *reserved*: in segments, *split*: in free blocks next to used ones. The *host allocator*
manages pinned memory in the same way. A *peak* is the maximum since peaks were last taken or reset.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

PEAKS = {
    "allocated": "allocated_bytes.all.peak",
    "reserved": "reserved_bytes.all.peak",
    "split": "inactive_split_bytes.all.peak",
}
"""Our name for a peak -> its name in torch.cuda.memory_stats."""

COUNTS_FREED = "2.13"
"""The first release of torch that is known to take freed pinned memory off `active_bytes` (pytorch issues #169561,
#179380)."""


def take_peaks() -> dict[str, int]:
    """Returns the device allocator's peaks, by the names of PEAKS, and resets them."""
    torch.cuda.init()  # without it there are no statistics, and resetting them raises
    stats = torch.cuda.memory_stats()
    torch.cuda.reset_peak_memory_stats()
    return {name: stats.get(key, 0) for name, key in PEAKS.items()}


def take_phase() -> dict[str, int]:
    """Returns `take_peaks`, the host allocator's current bytes, and the device's bytes in use."""
    free, total = torch.cuda.mem_get_info()
    host = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
    return take_peaks() | {"pinned": host.get("allocated_bytes.current", 0), "device_used": total - free}


def reset_peaks() -> None:
    """Resets the peaks of both allocators."""
    take_peaks()
    if hasattr(torch.cuda, "reset_peak_host_memory_stats"):
        torch.cuda.reset_peak_host_memory_stats()


def process_memory(peaks: Mapping[str, int]) -> dict[str, int | None]:
    """Returns the CUDA columns of RunRow for this process. `peaks`: of the measured steps, from `take_peaks`."""
    host = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
    active = host.get("active_bytes.peak") if torch.__version__ >= COUNTS_FREED else None
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated_bytes": peaks["allocated"],
        "reserved_bytes": peaks["reserved"],
        "fragmentation_bytes": peaks["reserved"] - peaks["allocated"],
        "largest_free_block_bytes": largest_free_block(torch.cuda.memory_snapshot(), torch.cuda.current_device()),
        "split_bytes": peaks["split"],
        "alloc_retries": torch.cuda.memory_stats()["num_alloc_retries"],
        "device_used_bytes": total - free,
        "pinned_requested_bytes": active,
        "pinned_bytes": host.get("allocated_bytes.peak"),
    }


def largest_free_block(segments: Iterable[Mapping[str, Any]], device: int) -> int:
    """Returns the largest free block on `device`, or 0. `segments`: from torch.cuda.memory_snapshot."""
    blocks = (block for segment in segments if segment["device"] == device for block in segment["blocks"])
    return max((block["size"] for block in blocks if block["state"] == "inactive"), default=0)
