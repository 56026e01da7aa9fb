"""nvidia-smi's data on the GPU in use: its link and its clocks; empty where there is none."""

from __future__ import annotations

import csv
from functools import cache
from typing import Any

from ...probes.nvidia_smi import ask, name_of

FIELDS = {
    "name": "name", "driver": "driver_version", "memory_mib": "memory.total", "sm_mhz": "clocks.sm",
    "sm_max_mhz": "clocks.max.sm", "memory_mhz": "clocks.mem", "power_w": "power.draw", "celsius": "temperature.gpu",
    "pcie_gen": "pcie.link.gen.max", "pcie_width": "pcie.link.width.max",
}  # fmt: skip
"""Our key -> nvidia-smi's."""

LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 8e9 / 8 * 128 / 130, 4: 16e9 / 8 * 128 / 130, 5: 32e9 / 8 * 128 / 130,
                    6: 64e9 / 8 * 242 / 256}  # fmt: skip
"""PCIe generation -> a lane's bytes per second in one direction, after its line code (PCI-SIG base specifications)."""


@cache
def card() -> dict[str, str]:
    """Returns FIELDS of torch's first GPU, as nvidia-smi writes them; empty where it is missing, or hangs."""
    return parse(ask(name_of(0), ",".join(FIELDS.values())) or "")


def parse(text: str) -> dict[str, str]:
    """Parses the first line of nvidia-smi's CSV; unknown values ("[N/A]") are left out."""
    lines = list(csv.reader(text.splitlines(), skipinitialspace=True))
    if not lines or len(lines[0]) != len(FIELDS):
        return {}
    return {key: value for key, value in zip(FIELDS, lines[0], strict=True) if not value.startswith("[")}


def link_bytes_per_s(facts: dict[str, Any]) -> float | None:
    """Returns the capacity of the link to the host in one direction, by its generation and width; None if not known."""
    try:
        return LANE_BYTES_PER_S[int(facts["pcie_gen"])] * int(facts["pcie_width"])
    except (KeyError, ValueError):
        return None
