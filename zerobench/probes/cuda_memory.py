"""What CUDA tells of memory: the one place where probes ask torch.cuda for it. Nothing here takes any on the device.

A *segment* is what torch's caching allocator has from the device, a *block* a piece of one. *allocated*: bytes in
blocks that tensors use, *reserved*: in segments, *split*: in blocks that are free beside used ones. The *host
allocator* hands out pinned memory in the same way. A *peak* is the most since peaks were last taken or reset.
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
"""Our name of a peak -> torch.cuda.memory_stats's."""


def take_peaks() -> dict[str, int]:
    """The device allocator's peaks, by the names of PEAKS; from now on they count anew."""
    torch.cuda.init()  # without it there are no statistics, and resetting them raises
    stats = torch.cuda.memory_stats()
    torch.cuda.reset_peak_memory_stats()
    return {name: stats.get(key, 0) for name, key in PEAKS.items()}


def take_phase() -> dict[str, int]:
    """`take_peaks`, and what the host's allocator holds and the device has in use now."""
    free, total = torch.cuda.mem_get_info()
    host = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
    return take_peaks() | {"pinned": host.get("allocated_bytes.current", 0), "device_used": total - free}


def reset_peaks() -> None:
    """The peaks of both allocators count anew."""
    take_peaks()
    if hasattr(torch.cuda, "reset_peak_host_memory_stats"):
        torch.cuda.reset_peak_host_memory_stats()


def max_allocated() -> int:
    """The allocated peak, without starting it anew."""
    return torch.cuda.max_memory_allocated()


def process_memory(peaks: Mapping[str, int]) -> dict[str, int | None]:
    """The columns of RunRow that are CUDA's, of this process, now. `peaks`: of the measured steps, as `take_peaks`."""
    host = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated_bytes": peaks["allocated"],
        "reserved_bytes": peaks["reserved"],
        "fragmentation_bytes": peaks["reserved"] - peaks["allocated"],
        "largest_free_block_bytes": largest_free_block(torch.cuda.memory_snapshot(), torch.cuda.current_device()),
        "split_bytes": peaks["split"],
        "alloc_retries": torch.cuda.memory_stats()["num_alloc_retries"],
        "device_used_bytes": total - free,
        "pinned_requested_bytes": host.get("active_bytes.peak"),
        "pinned_bytes": host.get("allocated_bytes.peak"),
    }


def largest_free_block(segments: Iterable[Mapping[str, Any]], device: int) -> int:
    """The largest block that nobody uses on `device`, or 0. `segments`: as torch.cuda.memory_snapshot has them."""
    mine = (segment for segment in segments if segment["device"] == device)
    return max((b["size"] for segment in mine for b in segment["blocks"] if b["state"] == "inactive"), default=0)
