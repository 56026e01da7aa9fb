"""The memory of one GPU, and how full an execution makes it.

capacity   bytes of the device, and of host memory and disk behind it, per GPU; None: without a limit
usable     the device less a fraction for what the peak leaves out: CUDA's context, libraries, what the allocator
           reserves beyond what it has given out
load       the largest of the ratios used / usable: 1 is full
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...fake_execution import Execution
from ...records import TensorRow

TIERS = ("device", "host", "nvme")

RESERVE = 0.08
"""Fraction of the device that tensors do not get, where the user says nothing: the GPU suite leaves as much."""


@dataclass(frozen=True)
class Capacity:
    """Bytes for one GPU. `reserve`: fraction of the device that is left free."""

    device_bytes: int
    reserve: float = RESERVE
    host_bytes: int | None = None
    disk_bytes: int | None = None

    @property
    def usable_bytes(self) -> int:
        """Bytes that tensors on the device may take."""
        return int(self.device_bytes * (1 - self.reserve))

    def limit_of(self, tier: str) -> float:
        """Returns the usable bytes of a tier, infinite where there is no limit."""
        limits = {"device": self.usable_bytes, "host": self.host_bytes, "nvme": self.disk_bytes}
        limit = limits[tier]
        return math.inf if limit is None else limit

    def load(self, used: Used) -> float:
        """Returns how full the fullest tier is; above 1 it does not fit."""
        return max(used.bytes_in(tier) / self.limit_of(tier) for tier in TIERS)

    def fits(self, used: Used) -> bool:
        """Returns True where every tier has room."""
        return self.load(used) <= 1

    def fullest(self, used: Used) -> str:
        """Returns the tier that is fullest."""
        return max(TIERS, key=lambda tier: used.bytes_in(tier) / self.limit_of(tier))

    def smallest_device(self, used: Used) -> int:
        """Returns the bytes of the smallest device on which the same would fit."""
        return math.ceil(used.peak_bytes / (1 - self.reserve))


@dataclass(frozen=True)
class Used:
    """Bytes that one executed rank holds at its peak, and sends in a step.

    `peak_bytes`: as the device's allocator counts it, on a GPU in blocks of 512 bytes and with cuBLAS's workspaces.
    `at_peak`: category -> bytes of tensors at the peak instant. `largest`: the largest storage then. `psi`: number of
    trainable parameters. `reserved_bytes`: most that a GPU's caching allocator takes for the step, None for a CPU.
    """

    psi: int
    peak_bytes: int
    host_bytes: int
    file_bytes: int
    at_peak: dict[str, int]
    largest: TensorRow | None
    volume_psi: float
    wire_bytes: float
    reserved_bytes: int | None = None

    def bytes_in(self, tier: str) -> int:
        """Returns the peak of a tier."""
        return {"device": self.peak_bytes, "host": self.host_bytes, "nvme": self.file_bytes}[tier]

    @property
    def binding(self) -> str:
        """The category that takes most of the peak."""
        return max(self.at_peak, key=lambda category: self.at_peak[category])


def used_of(execution: Execution, psi: int) -> Used:
    """Returns what an execution used."""
    record = execution.record
    assert record is not None
    tensors = [row for row in execution.tensors if row.tier == "device"]
    allocated, reserved = execution.allocated_bytes, execution.reserved_bytes
    return Used(
        psi=psi, peak_bytes=allocated or execution.peak_bytes,
        host_bytes=execution.host_bytes, file_bytes=execution.file_bytes,
        at_peak=execution.at_peak, largest=max(tensors, key=lambda row: row.bytes, default=None),
        volume_psi=execution.volume_elements / psi if psi else 0.0, wire_bytes=execution.wire_bytes,
        reserved_bytes=max(reserved) if reserved else None,
    )  # fmt: skip


def name_of(tensor: TensorRow | None) -> str:
    """Names a storage in a few words: its label or the line that made it, and its module."""
    if tensor is None:
        return "–"
    line = tensor.source.replace("zerobench/", "", 1)
    name = tensor.name or line or tensor.module or tensor.category
    return f"{name} in {tensor.module}" if tensor.module and tensor.module not in name else name
