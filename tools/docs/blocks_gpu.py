"""Blocks of the page on one GPU: a suite's runs beside the estimates and predictions that were made without it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tools.docs.blocks_predicted import table
from validation.gpu_runs import GpuRunRow, rows_of, steps
from zerobench.sizes import show_bytes

SUITE = "h100"


def _folder(root: Path) -> Path:
    return root.parent.parent / SUITE


def _suite(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_folder(root) / "suite.json").read_text())
    return found


def summary(root: Path) -> str:
    """What one GPU has confirmed, in a paragraph (`make gpu-runs`)."""
    rows, about = rows_of(_folder(root)), _suite(root)["about"]
    states, errors = _compared(rows)["states"], _errors(_compared(rows)["allocated"])
    exact = sum(estimate == measured for measured, estimate in states)
    reserved_errors = _errors(_compared(rows)["reserved"])
    predicted = steps(_folder(root))
    missed = [abs(one.error) for one in predicted if not one.low <= one.measured <= one.high]
    others = f"; the others were {min(missed):.0%} to {max(missed):.0%} off" if missed else ""
    words = (
        f"**One GPU so far.** On one {about['device_class']} (torch {about['torch']}) states took the bytes that are"
        f" simulated without a GPU in {exact} of {len(states)} cells, most of them one rank of a simulated world. The"
        f" peaks of torch's allocator in {len(errors)} cells are {median(errors):.2%} off the simulated ones in the"
        f" median, {max(errors):.1%} at most; the bytes that it reserves are up to {max(reserved_errors):.0%} off. Of"
        f" {len(predicted)} steps that were predicted beforehand, {len(predicted) - len(missed)} took a time within"
        f" their 90% intervals{others}."
    )
    return textwrap.fill(words, 130)


def memory(root: Path) -> str:
    """|error| of the estimates by quantity (`make gpu-runs`)."""
    lines = []
    for name, pairs in _compared(rows_of(_folder(root))).items():
        errors = sorted(_errors(pairs))
        exact = sum(estimate == measured for measured, estimate in pairs)
        lines.append([
            NAMES[name], str(len(pairs)), str(exact),
            *(f"{one:.2%}" for one in (median(errors), errors[int(0.9 * len(errors))], errors[-1])),
        ])  # fmt: skip
    return table(["", "cells", "equal to the byte", "error: median", "90th percentile", "largest"], 1, lines)


NAMES = {
    "states": "states of a rank", "peak": "peak of the ledger", "allocated": "peak of the allocator",
    "reserved": "reserved by the allocator",
}  # fmt: skip


def _compared(rows: Sequence[GpuRunRow]) -> dict[str, list[tuple[int, int]]]:
    """Quantity -> pairs of measured and estimated bytes."""
    return {
        "states": [(row.states, row.estimated_states) for row in rows if row.states],
        "peak": [(row.peak, row.estimated_peak) for row in rows if row.peak],
        "allocated": [(row.allocated, row.estimated_allocated) for row in rows],
        "reserved": [(row.reserved, row.estimated_reserved) for row in rows],
    }


def _errors(pairs: Sequence[tuple[int, int]]) -> list[float]:
    return [abs(estimate / measured - 1) for measured, estimate in pairs]


def reserved(root: Path) -> str:
    """The cells whose reserved bytes are estimated worst."""
    worst = sorted(rows_of(_folder(root)), key=lambda row: -abs(row.estimated_reserved / row.reserved - 1))
    return table(["cell", "allocated", "estimated", "reserved", "estimated", "error"], 1, [
        [f"`{row.cell}`", *(show_bytes(size) for size in (
            row.allocated, row.estimated_allocated, row.reserved, row.estimated_reserved,
        )), f"{row.estimated_reserved / row.reserved - 1:+.1%}"]
        for row in worst[:WORST]
    ])  # fmt: skip


WORST = 8


def predicted_steps(root: Path) -> str:
    """Steps that were predicted and committed before they were measured."""
    return table(["cell", "predicted", "90 % interval", "measured", "error"], 1, [
        [f"`{one.cell.partition(' layers=')[0]}`", f"{1000 * one.predicted:.1f} ms",
         f"{1000 * one.low:.0f} – {1000 * one.high:.0f} ms", f"{1000 * one.measured:.1f} ms", f"{one.error:+.1%}"]
        for one in sorted(steps(_folder(root)), key=lambda one: one.measured)
    ])  # fmt: skip


def section(name: str, columns: Sequence[str]) -> Callable[[Path], str]:
    """Returns a block that is a section of the suite's summary, reduced to `columns`."""

    def made(root: Path) -> str:
        told = _suite(root)["sections"][name]["table"]
        places = [told["header"].index(column) for column in columns]
        return table(columns, 1, [[row[place] for place in places] for row in told["rows"]])

    made.__doc__ = f"The section {name} of the suite."
    return made


BLOCKS: dict[str, Callable[[Path], str]] = {
    "gpu_summary": summary, "gpu_memory": memory, "gpu_reserved": reserved, "gpu_steps": predicted_steps,
    "gpu_largest": section("largest", ("cell", "layers × hidden", "ψ", "predicted need", "peak", "allocated")),
    "gpu_speed": section("speed", ("cell", "step ms", "over DDP", "tokens/s", "MFU", "allocated", "last loss")),
    "gpu_tiers": section("tiers", ("what", "kept", "paper", "step ms", "allocated", "pinned")),
    "gpu_bus": section("bus", ("size", "up GB/s", "down GB/s", "both GB/s", "best of the raw rate")),
}  # fmt: skip
