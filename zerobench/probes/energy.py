"""Energy counters: of a GPU from NVML, of a machine's CPU packages and their memory from RAPL.

Both count for every program that uses the device, so a figure is right if nothing else runs there. A run on GPUs has
the energy of its GPUs alone.

RAPL is a folder per domain, on Intel and AMD alike, which many systems let root alone read.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from .nvml import name_of, read_energy_mj

POWERCAP = Path("/sys/class/powercap")

DOMAINS = ("package", "dram")
"""First words of the names of counted domains. Others are parts of a package (core, uncore) or the machine (psys)."""

SHORTEST_S = {"cuda": 1.0, "cpu": 0.01}
"""Shortest time whose energy is known to a tenth: NVML's counter moves every 20 to 100 ms, RAPL's every millisecond."""

OFTEN_S = 30.0
"""A counter of RAPL begins again after minutes under load, so that it is read this often."""


@dataclass(frozen=True)
class Reading:
    """A counter in microjoules. `range_uj`: its value after which it begins again; None if it never does."""

    energy_uj: int
    range_uj: int | None = None

    def since(self, before: Reading) -> int | None:
        """Returns the energy from an earlier reading to this one; None of a counter that was reset."""
        grown = self.energy_uj - before.energy_uj
        if grown >= 0:
            return grown
        return None if self.range_uj is None else grown + self.range_uj


class EnergyMeter:
    """The energy between `begin` and `end`; the device must have no work in flight at either."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: dict[str, Reading] = {}
        self._used_uj: int | None = None
        self._began_s = self._read_s = 0.0

    def begin(self) -> None:
        """Reads the counters, if there are any."""
        self._last = read(self._device)
        self._used_uj = 0 if self._last else None
        self._began_s = self._read_s = time.perf_counter()

    def follow(self) -> None:
        """Called between steps: reads counters that begin again, if that is due."""
        if self._used_uj is not None and self._device.type != "cuda" and time.perf_counter() - self._read_s > OFTEN_S:
            self._add()

    def end(self) -> float | None:
        """Returns the joules since `begin`; None without a counter, or if the time was too short for it."""
        if self._used_uj is None or time.perf_counter() - self._began_s < SHORTEST_S[self._device.type]:
            return None
        self._add()
        return None if self._used_uj is None else self._used_uj / 1e6

    def _add(self) -> None:
        now, self._read_s = read(self._device), time.perf_counter()
        grown = [now[name].since(before) if name in now else None for name, before in self._last.items()]
        known = [energy for energy in grown if energy is not None]
        self._used_uj = (self._used_uj or 0) + sum(known) if len(known) == len(grown) else None
        self._last = now


def read(device: torch.device) -> dict[str, Reading]:
    """Returns the counters of the GPU that torch calls `device`, or of this machine's CPUs; empty if unreadable."""
    if device.type != "cuda":
        return read_packages()
    name = name_of(device.index or 0)
    millijoules = read_energy_mj(name)
    return {} if millijoules is None else {name: Reading(1000 * millijoules)}


def read_packages() -> dict[str, Reading]:
    """Returns the counters of all CPU packages and of their memory; empty if any of them cannot be read."""
    found = {}
    try:
        for folder in sorted(POWERCAP.glob("intel-rapl:*")):
            if (folder / "name").read_text().startswith(DOMAINS):
                energy, most = ((folder / name).read_text() for name in ("energy_uj", "max_energy_range_uj"))
                found[folder.name] = Reading(int(energy), int(most))
    except (OSError, ValueError):
        return {}
    return found
