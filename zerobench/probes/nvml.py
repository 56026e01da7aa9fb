"""The state of a GPU from NVML: clocks, temperature, power, the reasons for reduced clocks, and energy.

NVML comes with the driver, and is called through ctypes: no package is needed, and no memory on the device is taken. If
it is missing or has no such GPU (for example a slice of one), there is no state.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import astuple, dataclass
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
    power_mw, mask = read(name, "PowerUsage"), read(name, "CurrentClocksThrottleReasons", kind=ctypes.c_ulonglong)
    state = GpuState(
        read(name, "ClockInfo", SM_CLOCK),
        read(name, "MaxClockInfo", SM_CLOCK),
        read(name, "Temperature", CORE_TEMPERATURE),
        None if power_mw is None else power_mw / 1000,
        None if mask is None else tuple(reason for bit, reason in REASONS.items() if mask & bit),
    )
    return None if set(astuple(state)) == {None} else state


def read_energy_mj(name: str) -> int | None:
    """Returns the millijoules that a GPU has used since its driver was loaded; None if NVML does not report them."""
    return read(name, "TotalEnergyConsumption", kind=ctypes.c_ulonglong)


def name_of(index: int) -> str:
    """Returns NVML's name of torch's device `index`: its UUID, since CUDA_VISIBLE_DEVICES renumbers devices for torch
    but not for NVML. Without one, the entry of CUDA_VISIBLE_DEVICES, which is an index or a UUID.
    """
    uuid: Any = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    if uuid is not None:
        return f"GPU-{str(uuid).removeprefix('GPU-')}"
    visible = [entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    return visible[index] if index < len(visible) else str(index)


def read(
    name: str, figure: str, *arguments: int, kind: type[ctypes.c_uint | ctypes.c_ulonglong] = ctypes.c_uint
) -> int | None:
    """Returns the value of nvmlDeviceGet`figure` for a GPU; None if NVML does not report it.

    `name`: a UUID or an index. `arguments`: those between the GPU and the result. `kind`: the type of the result.
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
