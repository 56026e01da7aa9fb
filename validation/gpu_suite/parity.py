"""Section 2: our training and FSDP2's against DDP's. Losses of every step and rank, on as many ranks.

A sweep's own check judges (sweep/parity.py). Two ranks share a GPU if there is only one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from zerobench import strategies
from zerobench.config.cell import Cell
from zerobench.results.tables import load
from zerobench.sweep.parity import DIFFERS, UNCHECKED, compare

from .section import NONE, SuiteLaunch, SuiteSection, SuiteSetup, SuiteTable, padded, shorter

ALL = "ddp,zero1,zero2,zero3,megatron,fsdp2"


@dataclass(frozen=True)
class ParityWorld:
    """Ranks that all strategies are run on."""

    ranks: int
    precision: str
    strategies: str


BELOW_FP32 = "ddp,zero1,zero2,zero3,fsdp2"

WORLDS = (
    ParityWorld(1, "fp32", ALL),
    ParityWorld(2, "fp32", ALL),
    ParityWorld(1, "bf16", BELOW_FP32),
    ParityWorld(2, "bf16", BELOW_FP32),
)
SMALL_WORLDS = (ParityWorld(2, "fp32", "ddp,zero3"), ParityWorld(2, "bf16", "ddp,zero2,fsdp2"))

SHAPE = ("model=gpt_tiny", "sequence=128", "micro_batch=4", "measure.steps=4", "measure.warmup=2",
         "deterministic=true")  # fmt: skip
SMALL_SHAPE = (
    "model=gpt", "model.layers=1", "model.hidden=16", "model.heads=2", "sequence=16", "micro_batch=2",
    "measure.steps=2", "measure.warmup=2", "launch.threads=1", "deterministic=true",
)  # fmt: skip


def _cells(setup: SuiteSetup) -> list[Cell]:
    found = []
    for world in SMALL_WORLDS if setup.small else WORLDS:
        alone = setup.device == "cuda" and world.ranks == 1
        ranks = (f"world_size={world.ranks}", f"backend={'nccl' if alone else 'gloo'}", "measure.passes=timed")
        what = (f"strategy={world.strategies}", f"precision={world.precision}")
        found += setup.cells("parity", *what, *ranks, *(SMALL_SHAPE if setup.small else SHAPE))
    return found


def _table(setup: SuiteSetup, done: list[SuiteLaunch]) -> SuiteTable:
    header = ["cell", "backend", "training against DDP's", "largest relative difference of a loss", "last loss"]
    steps = {one.name: _steps(setup.folder("parity") / one.row["run_id"]) for one in done if one.row and one.is_ok}
    (names, notes), rows, differs = shorter(done), [], []
    for one in done:
        config = one.cell
        start = [names[one.name], config.backend + ", sharing a GPU" * (config.ranks_per_gpu > 1)]
        ddp = next((other for other in done if _world(other) == _world(one) and _is_ddp(other)), None)
        if not one.is_ok:
            rows.append(padded(start, one.words, 5))
        elif one is ddp:
            rows.append([*start, "the measure", NONE, _last(steps[one.name])])
        elif ddp is None or not ddp.is_ok:
            rows.append(padded(start, "DDP itself did not run", 5))
        else:
            verdict = compare(config, steps[one.name], ddp.cell, steps[ddp.name])
            off = NONE if verdict.loss is None else f"{verdict.loss:.1e}"
            rows.append([*start, verdict.words, off, _last(steps[one.name])])
            differs += [f"{one.name}: {verdict.words}"] if verdict.kind in (DIFFERS, UNCHECKED) else []
    return SuiteTable(header, rows, notes, differs)


@cache
def _steps(run: Path) -> pd.DataFrame:
    return load(run).steps


def _world(one: SuiteLaunch) -> tuple[Any, ...]:
    return one.cell.world_size, one.cell.precision.name


def _is_ddp(one: SuiteLaunch) -> bool:
    return bool(one.cell.strategy.name == strategies.reference().name)


def _last(steps: pd.DataFrame) -> str:
    return f"{steps.sort_values(['rank', 'step'])['loss'].iloc[-1]:.6f}"


def _may_fail(one: SuiteLaunch) -> bool:
    """Returns True for FSDP2 on ranks that share a GPU, for which it was not made: its failure is a result."""
    return one.config is not None and one.cell.strategy.name == "fsdp2" and one.cell.ranks_per_gpu > 1


PARITY = SuiteSection(
    name="parity",
    title="Parity with DDP",
    asks="Do ours and FSDP2 train what DDP trains, in fp32 and bf16, at N = 1 and with two ranks?",
    seconds=42,
    cells=_cells,
    table=_table,
    may_fail=_may_fail,
    limit_s=40.0,
)
