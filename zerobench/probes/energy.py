"""Energy counters of GPUs and CPUs, and the state of a GPU: clocks, temperature, power, reasons for reduced clocks.

GPUs are read from NVML, which comes with the driver and is called through ctypes: no package is needed, and no memory
on the device is taken. If it is missing or has no such GPU (for example a slice of one), there is no state. The energy
of CPU packages and their memory is read from RAPL, on Intel and AMD alike: a folder per domain, which on many systems
only root can read.

Counters include every program that uses the device, so a figure is right only if nothing else runs there. For a run
on GPUs only the GPUs' energy is recorded.
"""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

SM_CLOCK = 1
CORE_TEMPERATURE = 0

REASONS = {
    0x02: "application clocks",
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clocks",
}
"""Bits of the mask, https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html. 0x01 is left out: it
only means that the GPU is idle, as it may be between steps.
"""


@dataclass(frozen=True)
class GpuState:
    """One reading; unreported values are None. `throttle`: reasons for reduced clocks, empty if none."""

    sm_clock_mhz: int | None
    sm_clock_max_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    throttle: tuple[str, ...] | None


def read_state(device: torch.device) -> GpuState | None:
    """Reads the state of the GPU that torch calls `device`; None if NVML reports nothing about it."""
    name = name_of(device.index or 0)
    power_mw = read_figure(name, "PowerUsage")
    mask = read_figure(name, "CurrentClocksThrottleReasons", kind=ctypes.c_ulonglong)
    state = GpuState(
        read_figure(name, "ClockInfo", SM_CLOCK),
        read_figure(name, "MaxClockInfo", SM_CLOCK),
        read_figure(name, "Temperature", CORE_TEMPERATURE),
        None if power_mw is None else power_mw / 1000,
        None if mask is None else tuple(reason for bit, reason in REASONS.items() if mask & bit),
    )
    return None if set(astuple(state)) == {None} else state


def read_energy_mj(name: str) -> int | None:
    """Returns the millijoules that a GPU has used since its driver was loaded; None if NVML does not report them."""
    return read_figure(name, "TotalEnergyConsumption", kind=ctypes.c_ulonglong)


def name_of(index: int) -> str:
    """Returns NVML's name of torch's device `index`: its UUID, since CUDA_VISIBLE_DEVICES renumbers devices for torch
    but not for NVML. Without one, the entry of CUDA_VISIBLE_DEVICES, which is an index or a UUID.
    """
    uuid: Any = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    if uuid is not None:
        return f"GPU-{str(uuid).removeprefix('GPU-')}"
    visible = [entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    return visible[index] if index < len(visible) else str(index)


def read_figure(
    name: str, figure: str, *arguments: int, kind: type[ctypes.c_uint | ctypes.c_ulonglong] = ctypes.c_uint
) -> int | None:
    """Returns the value of nvmlDeviceGet`figure` for a GPU; None if NVML does not report it. `name`: a UUID or an
    index. `arguments`: those between the GPU and the result. `kind`: the type of the result.
    """
    handle, value = ctypes.c_void_p(), kind()
    try:
        library: Any = ctypes.CDLL("libnvidia-ml.so.1")
        failed = library.nvmlInit_v2()
        if name.isdecimal():
            failed = failed or library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
        else:
            failed = failed or library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
        failed = failed or getattr(library, f"nvmlDeviceGet{figure}")(handle, *arguments, ctypes.byref(value))
    except (OSError, AttributeError):  # no driver, or an old one
        return None
    return None if failed else value.value


POWERCAP = Path("/sys/class/powercap")

DOMAINS = ("package", "dram")
"""First words of the names of counted domains. Others are parts of a package (core, uncore) or the machine (psys)."""

SHORTEST_S = {"cuda": 1.0, "cpu": 0.01}
"""Shortest time whose energy is known to a tenth: NVML's counter moves every 20 to 100 ms, RAPL's every millisecond."""

OFTEN_S = 30.0
"""Interval, in seconds, between reads of RAPL's counters, which wrap around after minutes under load."""


@dataclass(frozen=True)
class Reading:
    """A counter in microjoules. `range_uj`: the value at which it wraps around; None if it never does."""

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
        self._last = read_counters(self._device)
        self._used_uj = 0 if self._last else None
        self._began_s = self._read_s = time.perf_counter()

    def follow(self) -> None:
        """Called between steps: reads counters that wrap around, if that is due."""
        if self._used_uj is not None and self._device.type != "cuda" and time.perf_counter() - self._read_s > OFTEN_S:
            self._add()

    def end(self) -> float | None:
        """Returns the joules since `begin`; None without a counter, or if the time was too short for it."""
        if self._used_uj is None or time.perf_counter() - self._began_s < SHORTEST_S[self._device.type]:
            return None
        self._add()
        return None if self._used_uj is None else self._used_uj / 1e6

    def _add(self) -> None:
        now, self._read_s = read_counters(self._device), time.perf_counter()
        grown = [now[name].since(before) if name in now else None for name, before in self._last.items()]
        self._used_uj = None if None in grown else (self._used_uj or 0) + sum(filter(None, grown))
        self._last = now


def read_counters(device: torch.device) -> dict[str, Reading]:
    """Returns the counters of the GPU that torch calls `device`, or of this machine's CPUs; empty if unreadable."""
    if device.type != "cuda":
        return read_packages()
    name = name_of(device.index or 0)
    millijoules = read_energy_mj(name)
    return {} if millijoules is None else {name: Reading(1000 * millijoules)}


def read_packages() -> dict[str, Reading]:
    """Returns the counters of all CPU packages and of their memory; empty if any of them cannot be read."""
    counters = {}
    try:
        for folder in sorted(POWERCAP.glob("intel-rapl:*")):
            if (folder / "name").read_text().startswith(DOMAINS):
                energy, most = ((folder / name).read_text() for name in ("energy_uj", "max_energy_range_uj"))
                counters[folder.name] = Reading(int(energy), int(most))
    except (OSError, ValueError):
        return {}
    return counters
