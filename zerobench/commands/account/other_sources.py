"""The part of a run's account that is not from the ledger: the paper's formulas, the system, the allocators, the wire.

A formula has no schedule. The replay's prediction knows the schedule, and is to be met to the byte: what it has beyond
the formula is in flight, and is listed by name.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from ...results.grid import Grid
from ...sizes import show_bytes
from ...theory.closed_forms import Formula, from_json

Row = dict[str, Any]

SYMBOLS = {
    "ψ": "trained parameters",
    "φ": "frozen parameters",
    "N": "ranks that share the states",
    "k": "ranks that share a shard",
    "K": "bytes of the optimizer per parameter, masters included",
    "P": "bytes of parameters",
    "G": "bytes of gradients",
    "O": "bytes of the optimizer",
    "f": "of it leaves the device",
    "r": "reductions of a gradient",
    "m": "micro-batches",
}
"""Symbol of an equation, in words."""

COLUMNS = ["category", "formula", "in bytes", "in flight", "replayed", "measured"]
NONE = "–"


def table_of_formulas(row: Row, memory: pd.DataFrame) -> tuple[Grid | None, list[str]]:
    """The table, and lines below it; no table where theory does not cover the run, or an older zerobench made it."""
    try:
        formulas = formulas_of(row)
    except ValueError as error:
        return None, [str(error)]
    whole = memory[(memory["phase"] == "step") & (memory["tier"] == "device")]
    most = whole.groupby("category")["max_bytes"].max()
    predicted = whole.groupby("category")["predicted_bytes"].max()
    states = {name: formula for name, formula in formulas.items() if name in most}
    if not states:
        return None, []
    rows = [
        [name, one.equation, show_bytes(one.value), _bytes(predicted[name] - one.value), _bytes(predicted[name]),
         show_bytes(int(most[name]))]
        for name, one in states.items()
    ]  # fmt: skip
    lines = [_numbers(states), *(_in_flight(name, one) for name, one in states.items() if name != "states")]
    return Grid(COLUMNS, rows, left=2), [line for line in lines if line]


def volume_lines(row: Row) -> list[str]:
    """The formula of the volume, and what was moved besides, in ψ."""
    try:
        formula = formulas_of(row).get("volume")
    except ValueError:
        return []  # said above, beside the states
    if formula is None or not row["psi"]:
        return []
    terms = [f"{term.name} {term.size / row['psi']:+.3f} ψ" for term in formula.beyond]
    numbers = _numbers({"volume": formula}, without=("ψ", "N"))
    said = f"formula {formula.equation} = {formula.value / row['psi']:.3f} ψ"
    return [said + (f", with {numbers}" if numbers else ""), *([f"besides: {'; '.join(terms)}"] if terms else [])]


def between_nodes_lines(row: Row) -> list[str]:
    """The formula of the bytes that a rank sends to other nodes."""
    try:
        formula = formulas_of(row).get("between nodes")
    except ValueError:
        return []
    return [f"between nodes by formula {formula.equation} = {show_bytes(formula.value)}"] if formula else []


def formulas_of(row: Row) -> dict[str, Formula]:
    """A run's formulas by category; none of a run without a theory or by an older zerobench. Raises ValueError where
    they are damaged.
    """
    text = row["formulas"]
    return from_json(text) if isinstance(text, str) else {}


def _numbers(formulas: dict[str, Formula], without: tuple[str, ...] = ()) -> str:
    numbers = {symbol: value for one in formulas.values() for symbol, value in one.numbers.items()}
    known = [f"{s} = {value:,.10g} {SYMBOLS.get(s, '')}".rstrip() for s, value in numbers.items() if s not in without]
    return ", ".join(known)


def _in_flight(name: str, formula: Formula) -> str:
    terms = [f"{term.name} {show_bytes(term.size)}" for term in formula.beyond]
    return f"in flight, {name}: {', '.join(terms)}" if terms else ""


def _bytes(size: Any) -> str:
    return NONE if pd.isna(size) else show_bytes(int(size))


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
    lines = [f"a rank sends {show_bytes(row['wire_bytes'])} in the mean{_next_to(row, 'wire')}"]
    if pd.notna(row["control_bytes"]):
        lines.append(f"control traffic {show_bytes(row['control_bytes'])}{_next_to(row, 'control')}")
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


def _next_to(row: dict[str, Any], name: str) -> str:
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
