"""Simulated schedules, kept in a folder, so that a stopped command can resume.

kept   a parquet file per simulated cell, device and code: the events that a timeline lays out
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pandas as pd
import torch

from zerobench.config.cell import CellConfig
from zerobench.ranks import fork_server
from zerobench.records import EventRow
from zerobench.records.long_rows import COMPUTE, LAUNCH, MOVE, ORDER, PHASE, WAIT
from zerobench.results.provenance import source_of
from zerobench.simulation.execute import Execution, Target
from zerobench.simulation.prediction import LIMITS, Reduced, StepSchedule

from .runner import execute_cells

KINDS = (COMPUTE, LAUNCH, MOVE, ORDER, PHASE, WAIT)

COLUMNS = (
    "index", "kind", "phase", "name", "micro_batch", "operation", "bytes", "operator", "collective", "dtype", "tier",
    "group_size", "group", "stride", "unit", "between_bytes", "wire_bytes", "flops", "sizes", "stream", "elements",
    "control",
)  # fmt: skip

NOT_EXECUTED = (
    "simulation/costs.py", "simulation/hardware.py", "simulation/prediction.py", "simulation/timeline.py", "commands",
    "sweep", "watching", "budgets",
)  # fmt: skip
"""Code that no simulated rank runs: a schedule stays valid if it changes."""

TRANSFORMERS = "transformers.models.auto.modeling_auto"

Work = tuple[Reduced, Target]


class Schedules:
    """Schedules by cell and device, kept in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._failed: dict[str, str] = {}
        self._events: dict[str, tuple[EventRow, ...]] = {}
        """Key of a cell that this process has simulated -> its events."""

    def execute(self, what: str, work: Sequence[Work]) -> None:
        """Simulates the cells that are not kept yet, with progress on standard error."""
        wanted = {_key(config, target): (config, target) for cell, target in work for config in cell.configs}
        due = {key: one for key, one in wanted.items() if not self._path(key).is_file()}
        if TRANSFORMERS not in fork_server.PRELOAD and any(config.huggingface for config, _ in due.values()):
            fork_server.PRELOAD.insert(-1, TRANSFORMERS)  # once, and not in each cell's process
        keys = list(due)
        take = lambda number, found: self._keep(keys[number], found)  # noqa: E731
        execute_cells(what, list(due.values()), LIMITS, take, operators=True, settings=())

    def of(self, cell: Reduced, target: Target) -> StepSchedule:
        """Returns the schedule of a cell that was simulated."""
        keys = [_key(config, target) for config in cell.configs]
        if problem := next((self._failed[key] for key in keys if key in self._failed), ""):
            return StepSchedule(cell, (), problem)
        return StepSchedule(cell, tuple(self._events.get(key) or _read(self._path(key)) for key in keys))

    def _keep(self, key: str, found: Execution) -> None:
        if found.problem:
            self._failed[key] = found.problem
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        aside = self._path(key).with_suffix(".partial")
        self._events[key] = events = tuple(event for event in found.result.events if event.kind in KINDS)
        frame = pd.DataFrame({name: [getattr(event, name) for event in events] for name in COLUMNS})
        frame.to_parquet(aside, index=False)
        aside.replace(self._path(key))

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.parquet"


@cache
def _read(path: Path) -> tuple[EventRow, ...]:
    rows = pd.read_parquet(path).astype(object).to_dict("records")
    for row in rows:
        row["operation"] = None if pd.isna(row["operation"]) else int(row["operation"])
    return tuple(EventRow(rank=0, seconds=0.0, **{str(name): one for name, one in row.items()}) for row in rows)


def _key(config: CellConfig, target: Target) -> str:
    code, release = source_of(config, NOT_EXECUTED), torch.__version__
    norms = "-fused" * target.fused_norms
    return f"{config.cell_id}-{target.kind}-{target.attention or 'auto'}{norms}-{code}-{release}"
