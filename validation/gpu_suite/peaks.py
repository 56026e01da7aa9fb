"""Section 5: the cells of the section on speed again, for their bytes: peaks and reserved memory beside estimates, and
what the allocator reserved more memory for, from its own history (measure.snapshot).

A segment that is requested while as many bytes are reserved and free is fragmentation: the free blocks are too small,
or belong to another pool. Its cause is the category of the tensor that it is requested for.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zerobench.config.cell import Cell
from zerobench.fake_execution import CPU, CUDA, Execution
from zerobench.probes.snapshot import written
from zerobench.sizes import show_bytes

from ..gpu_runs import LIMITS
from ..runner import execute_cells
from .suite import NONE, WAITING, SuiteLaunch, SuiteSection, SuiteSetup, SuiteTable
from .training import COUNTED, speed_cells

HEADER = [
    "cell", "peak", "estimated", "allocated", "estimated", "reserved", "estimated", "beside free memory reserved for",
]  # fmt: skip


def _cells(setup: SuiteSetup) -> list[Cell]:
    how = ("measure.passes=accounted", "measure.snapshot=true", "measure.repeats=1")
    return speed_cells(setup, "peaks", *how, *COUNTED)


def _table(setup: SuiteSetup, done: list[SuiteLaunch]) -> SuiteTable:
    ended = not any(one.status == WAITING for one in done)  # all estimates at once, one per core
    executions = dict(zip((one.name for one in done), _estimates(setup, done), strict=True)) if ended else {}
    rows = []
    for one in done:
        if one.is_ok and one.row is not None:
            rows.append([one.name, *_sizes(one.row, executions.get(one.name)), _causes(setup, one.row["run_id"])])
        else:
            rows.append([one.name, one.words])
    return SuiteTable(HEADER, rows)


def _estimates(setup: SuiteSetup, done: list[SuiteLaunch]) -> list[Execution]:
    target = CUDA if setup.device == "cuda" else CPU
    return execute_cells("estimates", [(one.cell, target) for one in done], limits=LIMITS)


def _sizes(row: Mapping[str, Any], found: Execution | None) -> list[str]:
    estimated: list[int | None] = [None] * 3
    if found is not None and not found.problem:
        estimated[0] = found.peak_bytes
        if found.memory:
            estimated[1:] = found.memory.allocated_bytes, found.memory.reserved_by_default
    measured = [row[f"{name}_bytes"] for name in ("peak", "allocated", "reserved")]
    pairs = zip(measured, estimated, strict=True)
    return [NONE if size is None else show_bytes(size) for pair in pairs for size in pair]


def _causes(setup: SuiteSetup, run_id: str) -> str:
    folder = setup.folder("peaks") / run_id
    if setup.device == "cpu" or not written(folder):
        return NONE
    with Path(folder, written(folder)[0]).open("rb") as file:
        traces = [trace for trace in pickle.load(file)["device_traces"] if trace]  # written by this suite
    grown = fragmentation(traces[0] if traces else [])
    return ", ".join(f"{category} {show_bytes(size)}" for category, size in grown.most_common(3)) or "nothing"


def fragmentation(trace: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Returns category -> bytes of segments that were requested while as much was reserved and free. In the allocator's
    trace the entry of a segment is followed by that of the allocation.
    """
    found, reserved, used, requested = Counter[str](), 0, 0, 0
    for entry in trace:
        action, size = entry["action"], entry.get("size", 0)
        if action == "segment_alloc":
            requested = size if reserved - used >= size else 0
            reserved += size
        elif action == "segment_free":
            reserved -= size
        elif action == "alloc":
            found[entry.get("category", "unknown")] += requested
            used, requested = used + size, 0
        elif action == "free_completed":
            used -= size
    return +found


PEAKS = SuiteSection(
    name="peaks",
    title="Peaks and reserved memory at N = 1",
    asks="Are peaks and reserved memory as estimated without a GPU, and what is more memory reserved for?",
    like=(("memory", "(124m|1_5b) N=8 b=32 simulated", 1.25),),
    cells=_cells,
    table=_table,
    answers=("ok", "oom"),
)
