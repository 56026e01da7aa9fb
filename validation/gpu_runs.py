"""The runs of a GPU suite beside what a machine without a GPU says of them: memory simulated, steps predicted.

The suite's folder has its collected tables, and the predictions of steps that were committed before it ran
(predicted.csv, as `zerobench predict --format csv` writes it). The estimates are written beside them.

    python -m validation gpu-runs results/h100
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pandas as pd

from zerobench.config.cell import CellConfig
from zerobench.config.flat import name_cells
from zerobench.config.schema import Measure
from zerobench.results.tables import load
from zerobench.simulation.execute import CUDA, Limits
from zerobench.sizes import show_count

from .runner import execute_cells
from .store import read, write

ESTIMATED, PREDICTED = "estimated.csv", "predicted.csv"
LIMITS = Limits(memory_bytes=16 * 2**30)


@dataclass(frozen=True)
class GpuRunRow:
    """One run of the suite in bytes: as measured, and as simulated for a GPU. 0: not measured in this run.

    `states`, `peak`: the ledger's; `allocated`, `reserved`: peaks of the caching allocator.
    """

    cell: str
    states: int
    estimated_states: int
    peak: int
    estimated_peak: int
    allocated: int
    estimated_allocated: int
    reserved: int
    estimated_reserved: int


@dataclass(frozen=True)
class GpuStep:
    """A step on one GPU, in seconds: as predicted, with the interval, and as measured."""

    cell: str
    predicted: float
    low: float
    high: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="the tables of a GPU suite")


def run(chosen: argparse.Namespace) -> int:
    """Simulates each cell whose memory was measured, and writes both."""
    rows_here = _with_memory(load(chosen.folder).runs)
    if not rows_here:
        raise ValueError(f"{chosen.folder}: no run there has the memory of a GPU; name the folder of a GPU suite")
    configs = [CellConfig.from_json(row["config"]) for row in rows_here]
    executions = execute_cells("simulated for a GPU", [(config, CUDA) for config in configs], limits=LIMITS)
    names = name_cells(configs)
    rows = []
    for name, row, found in zip(names, rows_here, executions, strict=True):
        if found.problem or found.memory is None:
            raise ValueError(f"{name}: {found.problem or 'no memory of a GPU'}")
        states, peak = (int(row[key]) if pd.notna(row[key]) else 0 for key in ("states_bytes", "peak_bytes"))
        rows.append(GpuRunRow(
            name, states, found.states_bytes, peak, found.peak_bytes, int(row["allocated_bytes"]),
            found.memory.allocated_bytes, int(row["reserved_bytes"]), found.memory.reserved_by_default,
        ))  # fmt: skip
    write(chosen.folder / ESTIMATED, GpuRunRow, rows)
    print(f"{chosen.folder / ESTIMATED}: {show_count(len(rows), 'cell')}")
    return 0


Shape = tuple[Any, ...]
"""Strategy, model, world size, micro-batch and sequence of a step."""


def timed(folder: Path) -> dict[Shape, list[dict[Any, Any]]]:
    """Returns the launches of each step that a prediction is for: in bf16, all states and activations on the device."""
    found: dict[Shape, list[dict[Any, Any]]] = {}
    for row in load(folder).runs.to_dict("records"):
        config = CellConfig.from_json(row["config"])
        saves = config.activation.label or config.offload.label or config.recomputes  # which no prediction here does
        if row["status"] == "ok" and pd.notna(row["step_s"]) and config.precision.name == "bf16" and not saves:
            shape = (config.strategy.name, config.model_name, config.world_size, config.micro_batch, config.sequence)
            found.setdefault(shape, []).append(row)
    return found


def steps(folder: Path) -> list[GpuStep]:
    """The steps that were predicted before they were measured, by the geometric means of their launches."""
    found, measured = [], timed(folder)
    for one in pd.read_csv(folder / PREDICTED).to_dict("records"):
        model = one["name"].partition("model=")[2].partition(" ")[0]
        shape = (one["strategy"], model, one["world_size"], one["micro_batch"], one["sequence"])
        if shape in measured:
            seconds = geometric_mean(row["step_s"] for row in measured[shape])
            found.append(GpuStep(one["name"], one["step_s"], one["low_s"], one["high_s"], seconds))
    return found


def rows_of(folder: Path) -> list[GpuRunRow]:
    return read(folder / ESTIMATED, GpuRunRow)


def _with_memory(runs: pd.DataFrame) -> list[dict[Any, Any]]:
    """The first launch of each cell whose allocator only this rank used; of those with the ledger's figures if any."""
    usable = runs[(runs["status"] == "ok") & runs["allocated_bytes"].notna() & (runs["ranks_per_gpu"] == 1)]
    found: dict[str, dict[Any, Any]] = {}
    for row in sorted(usable.to_dict("records"), key=lambda row: pd.isna(row["states_bytes"])):
        config = replace(CellConfig.from_json(row["config"]), measure=Measure())
        found.setdefault(config.cell_id, row)
    return list(found.values())
