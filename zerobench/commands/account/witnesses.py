"""Lines of a run's account from others than the ledger: the system, the allocators, the wire, and the residuals."""

from __future__ import annotations

from typing import Any

import pandas as pd

from ...sizes import show_bytes

PROCESS = {
    "allocator_peak": "torch's allocator at its peak",
    "timed_allocator_peak": "the same in the timed pass",
    "outside_ledger": "outside the ledger",
    "heap": "the heap beyond torch",
    "kept": "kept from step to step",
    "resident": "resident set",
    "allocated": "allocated on the GPU",
    "reserved": "reserved on the GPU",
    "fragmentation": "reserved beyond allocated",
    "largest_free_block": "largest free block",
    "device_used": "in use on the device",
    "pinned_requested": "pinned host memory in use",
    "pinned": "pinned host memory held",
}
"""Columns of a run, less `_bytes`, in words."""

A_LINE = 3

GPU = {"gpu_temperature_c": "°C", "gpu_power_w": "W"}
"""Columns of a run, and their units."""


def process_lines(row: dict[str, Any]) -> list[str]:
    """Lines on a process's memory from the available sources, the maximum over all ranks."""
    seen = [f"{words} {show_bytes(row[f'{name}_bytes'])}" for name, words in PROCESS.items()
            if pd.notna(row[f"{name}_bytes"])]  # fmt: skip
    if pd.notna(row["alloc_retries"]):
        seen.append(f"retries of the allocator {row['alloc_retries']}")
    if pd.notna(row["allocator_witness"]) and row["allocator_witness"] in ("profiler", "none"):
        seen.append(f"the allocator's witness: {row['allocator_witness']}")
    return ["; ".join(seen[place : place + A_LINE]) for place in range(0, len(seen), A_LINE)]


def wire_lines(row: dict[str, Any]) -> list[str]:
    """Lines on a rank's wire bytes, by the ring optimum, and its control traffic, each against its prediction."""
    lines = [f"a rank sends {show_bytes(row['wire_bytes'])} in the mean{_against(row, 'wire')}"]
    if pd.notna(row["control_bytes"]):
        lines.append(f"control traffic {show_bytes(row['control_bytes'])}{_against(row, 'control')}")
    if pd.notna(row["loopback_bytes"]) and row["wire_bytes"]:
        lines.append(_loopback(row))
    return lines


def _loopback(row: dict[str, Any]) -> str:
    """A line on the bytes over the loopback interface, and the reasons why they exceed the ring optimum."""
    words = f"loopback {show_bytes(row['loopback_bytes'])}, {row['loopback_bytes'] / row['wire_bytes']:.2f} of it"
    sent = row["predicted_loopback_bytes"]
    if pd.notna(sent) and sent > 1.1 * row["wire_bytes"]:
        words += f": gloo carries a reduce-scatter as an all-reduce, {show_bytes(sent)} in all"
    return words


def _against(row: dict[str, Any], name: str) -> str:
    measured, predicted = row[f"{name}_bytes"], row[f"predicted_{name}_bytes"]
    if pd.isna(predicted):
        return ""
    return f", predicted {show_bytes(predicted)}, residual {show_bytes(measured - predicted)}"


def unexplained_lines(row: dict[str, Any]) -> list[str]:
    """Returns the unexplained figures (predict/unexplained.py), one line each; none for a run of an older release."""
    said = row["unexplained"]
    return said.split("; ") if isinstance(said, str) and said else []


def gpu_lines(row: dict[str, Any]) -> list[str]:
    """The GPU as it was before or after the steps, as far as nvidia-smi told."""
    said: list[str] = []
    if pd.notna(row["sm_clock_mhz"]):
        of = "" if pd.isna(row["sm_clock_max_mhz"]) else f" of {row['sm_clock_max_mhz']}"
        said.append(f"SM clock {row['sm_clock_mhz']}{of} MHz")
    said += [f"{row[key]:.0f} {unit}" for key, unit in GPU.items() if pd.notna(row[key])]
    held = "not known" if pd.isna(row["throttle"]) else row["throttle"] or "nothing"
    return [f"{', '.join(said)} before or after the steps; held down by: {held}"] if said else []
