"""The memory of one GPU that simulated cells must fit into.

capacity   bytes of the device, and of host memory and disk, per GPU; None: unlimited
usable     the device minus a fraction for memory that no allocator of torch's counts: CUDA's context, libraries, NCCL
held       what must fit: the bytes that a GPU's caching allocator reserves, by default or with expandable segments,
           whichever is more; its peak of allocated bytes is less. On a CPU, which has no such allocator, the peak
load       the largest of the ratios held / usable: 1 is full
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

RESERVE = 0.08
"""Fraction of the device that is kept from the allocator by default; the GPU suite leaves as much."""


@dataclass(frozen=True)
class Capacity:
    """Bytes for one GPU. `reserve`: fraction of the device that is left free."""

    device_bytes: int
    reserve: float = RESERVE
    host_bytes: int | None = None
    disk_bytes: int | None = None

    @property
    def usable_bytes(self) -> int:
        """Bytes that the device's allocator may take."""
        return int(self.device_bytes * (1 - self.reserve))

    def fullest(self, held: Mapping[str, int]) -> tuple[str, float]:
        """Returns the fullest tier of those with bytes `held`, and its load; above 1 they do not fit."""
        limits = {"device": self.usable_bytes, "host": self.host_bytes, "nvme": self.disk_bytes}
        loads = {tier: 0.0 if (limit := limits[tier]) is None else size / limit for tier, size in held.items()}
        return max(loads.items(), key=lambda item: item[1], default=("device", 0.0))

    def load(self, held: Mapping[str, int]) -> float:
        """Returns the load of the fullest tier."""
        return self.fullest(held)[1]
