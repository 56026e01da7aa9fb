"""The state of a GPU, from nvidia-smi: clocks, temperature, power, and the reasons for reduced clocks.

nvidia-smi is a separate process, which takes no memory from our device context. If it is missing, late or has no such
GPU (for example a slice of one), the state is None.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from typing import Any

import torch

TIMEOUT_S = 2.0

_late: list[str] = []

FIELDS = ("clocks.sm", "clocks.max.sm", "temperature.gpu", "power.draw")
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The mask of reasons: its name since driver 535, and its older name."""

WORDS = {
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
    """One reading; values that the GPU does not report are None. `throttle`: reasons in words, empty if none."""

    sm_clock_mhz: int | None
    sm_clock_max_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    throttle: tuple[str, ...] | None


def read_state(device: torch.device) -> GpuState | None:
    """Reads the state of the GPU that torch calls `device`; None if that fails."""
    name = name_of(device.index or 0)
    for reasons in REASONS:
        said = ask(name, ",".join((*FIELDS, reasons)))
        if said is not None:
            return parse(said)
    return None


def name_of(index: int) -> str:
    """Returns nvidia-smi's name of torch's device `index`: its UUID, since CUDA_VISIBLE_DEVICES renumbers devices for
    torch but not for nvidia-smi. Without one, the entry of CUDA_VISIBLE_DEVICES, which is an index or a UUID.
    """
    uuid: Any = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    if uuid is not None:
        return f"GPU-{str(uuid).removeprefix('GPU-')}"
    visible = [entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    return visible[index] if index < len(visible) else str(index)


def ask(name: str, fields: str) -> str | None:
    """Returns nvidia-smi's line of CSV on the GPU `name`; None if it is missing, late or has no such GPU. Once it was
    late it is not called again.
    """
    if _late:
        return None
    command = ["nvidia-smi", f"--id={name}", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        _late.append(name)
        return None
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def parse(line: str) -> GpuState | None:
    """Parses a line of nvidia-smi's CSV: FIELDS and the mask. Unsupported fields read [N/A]."""
    values = [value.strip() for value in line.strip().split(",")]
    if len(values) != len(FIELDS) + 1:
        return None
    clock, most, temperature, power = (_number(value) for value in values[:-1])
    mask = _number(values[-1])
    return GpuState(
        None if clock is None else round(clock),
        None if most is None else round(most),
        None if temperature is None else round(temperature),
        power,
        None if mask is None else tuple(words for bit, words in WORDS.items() if int(mask) & bit),
    )


def _number(text: str) -> float | None:
    try:
        return int(text, 16) if text.startswith("0x") else float(text)
    except ValueError:
        return None
