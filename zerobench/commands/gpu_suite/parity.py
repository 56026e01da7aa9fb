"""Section 2: the training of ours and FSDP2 against DDP's. Losses of every step and rank, on as many ranks.

At N = 1 and 2 a sum has one order, so fp32 is expected to be bit-equal. Two ranks share a GPU if there is only one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ... import strategies
from ...config.cell import Cell
from ...results.tables import load
from .section import NONE, Done, Section, Setup, Table, padded, shorter

ALL = "ddp,zero1,zero2,zero3,megatron,fsdp2"

Losses = dict[tuple[int, int], float]
"""(rank, step) -> loss."""


@dataclass(frozen=True)
class World:
    """Ranks that all strategies are run on."""

    ranks: int
    precision: str
    strategies: str


BELOW_FP32 = "ddp,zero1,zero2,zero3,fsdp2"

WORLDS = (World(1, "fp32", ALL), World(2, "fp32", ALL), World(1, "bf16", BELOW_FP32), World(2, "bf16", BELOW_FP32))
SMALL_WORLDS = (World(2, "fp32", "ddp,zero3"), World(2, "bf16", "ddp,zero2,fsdp2"))

ALLOWED = {"fp32": 1e-5, "bf16": 2e-2}
"""Largest relative difference of a loss that is not called a failure: kernels are deterministic, but which is chosen
may follow from where a tensor lies; and FSDP2 casts in other places than we do in bf16."""

SHAPE = ("model=gpt_tiny", "sequence=128", "micro_batch=4", "measure.steps=4", "measure.warmup=2",
         "deterministic=true")  # fmt: skip
SMALL_SHAPE = (
    "model=gpt", "model.layers=1", "model.hidden=16", "model.heads=2", "sequence=16", "micro_batch=2",
    "measure.steps=2", "measure.warmup=2", "launch.threads=1", "deterministic=true",
)  # fmt: skip


def _cells(setup: Setup) -> list[Cell]:
    found = []
    for world in SMALL_WORLDS if setup.small else WORLDS:
        alone = setup.device == "cuda" and world.ranks == 1
        ranks = (f"world_size={world.ranks}", f"backend={'nccl' if alone else 'gloo'}", "measure.passes=timed")
        what = (f"strategy={world.strategies}", f"precision={world.precision}")
        found += setup.cells("parity", *what, *ranks, *(SMALL_SHAPE if setup.small else SHAPE))
    return found


def _table(setup: Setup, done: list[Done]) -> Table:
    header = ["cell", "backend", "losses against DDP's", "worst relative difference", "last loss"]
    losses = {one.name: _losses(setup.folder("parity") / one.row["run_id"]) for one in done if one.row and one.is_ok}
    (names, notes), rows, differs = shorter(done), [], []
    for one in done:
        config = one.cell
        start = [names[one.name], config.backend + ", sharing a GPU" * (config.ranks_per_gpu > 1)]
        ddp = next((other for other in done if _world(other) == _world(one) and _is_ddp(other)), None)
        if not one.is_ok:
            rows.append(padded(start, one.words, 5))
        elif one is ddp:
            rows.append([*start, "the measure", NONE, _last(losses[one.name])])
        elif ddp is None or not ddp.is_ok:
            rows.append(padded(start, "DDP itself did not run", 5))
        else:
            words, worst, sentence = compare(losses[ddp.name], losses[one.name], config.precision.name)
            rows.append([*start, words, worst, _last(losses[one.name])])
            differs += [f"{one.name}: {sentence}"] if sentence else []
    return Table(header, rows, notes, differs)


def compare(ddp: Losses, mine: Losses, precision: str) -> tuple[str, str, str]:
    """Compares losses with DDP's: how they differ, by how much, and a sentence where that is more than ALLOWED."""
    if ddp.keys() != mine.keys():
        return "other steps", NONE, f"it has {len(mine)} losses and DDP {len(ddp)}"
    if ddp == mine:
        return f"equal to the bit, {len(ddp)} of {len(ddp)}", "0", ""
    differing = {key: abs(mine[key] - loss) / abs(loss) for key, loss in ddp.items() if mine[key] != loss}
    rank, step = max(differing, key=lambda key: math.inf if math.isnan(differing[key]) else differing[key])
    worst = differing[rank, step]
    words = f"{len(differing)} of {len(ddp)} differ"
    if worst <= ALLOWED[precision]:
        return words, f"{worst:.1e}", ""
    where = f"losses differ by up to {worst:.1e} (rank {rank}, step {step})"
    return words, f"{worst:.1e}", f"{where}; at most {ALLOWED[precision]:g} is allowed in {precision}"


@cache
def _losses(run: Path) -> Losses:
    steps = load(run).steps
    return {(int(rank), int(step)): loss for rank, step, loss in steps[["rank", "step", "loss"]].to_numpy()}


def _world(one: Done) -> tuple[Any, ...]:
    return one.cell.world_size, one.cell.precision.name


def _is_ddp(one: Done) -> bool:
    return bool(one.cell.strategy.name == strategies.reference().name)


def _last(losses: Losses) -> str:
    return f"{losses[max(losses)]:.6f}"


def _may_fail(one: Done) -> bool:
    """Returns True for FSDP2 on ranks that share a GPU, for which it was not made: its failure is a result."""
    return one.config is not None and one.cell.strategy.name == "fsdp2" and one.cell.ranks_per_gpu > 1


PARITY = Section(
    name="parity",
    title="Parity with DDP",
    asks="Do ours and FSDP2 train what DDP trains, in fp32 and bf16, at N = 1 and with two ranks?",
    seconds=95,
    cells=_cells,
    table=_table,
    may_fail=_may_fail,
    limit_s=40.0,
)
