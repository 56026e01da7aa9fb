"""Memory traffic of an update on a GPU, counted without one: one rank's, bf16 with AdamW; and its time on an H100.

python -m validation update-traffic
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from tests.cached_memory import NEWER, OLDER, counted
from zerobench.commands.predict import costs_of
from zerobench.config.compose import compose_cells
from zerobench.simulation.execute import CUDA, execute

from .one_gpu import CLUSTERS, PEER, PEERS, UPDATES
from .store import write

MODELS = {"10M": "gpt_small", "124M": "gpt2_124m"}
STRATEGIES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
COMMON = ("world_size=1", "device=cpu", "precision=bf16", "sequence=256", "micro_batch=1", "data=synthetic")
OUT = Path("results/update_traffic.csv")


@dataclass(frozen=True)
class TrafficRow:
    """An update by one kernel, or as UPDATES names it, with clipping or without. Bytes per parameter: without a cache,
    and that move to or from memory with half of an H100's. Kernels, by torch's limits of a launch. `h100_ms`: the time
    that the older limits and no cache give.
    """

    updated_by: str
    model: str
    strategy: str
    clip: str
    no_cache: float
    half_cache: float
    kernels_2_11: int
    kernels_2_13: int
    waits: int
    h100_ms: float


def run(chosen: argparse.Namespace) -> int:
    """Counts the last update of each cell, and writes all rows again."""
    rows, costs = [], costs_of(CLUSTERS[0], None).alone()
    for (updated_by, options), (key, model), strategy, clip in product(
        UPDATES.items(), MODELS.items(), STRATEGIES, ("no", "yes")
    ):
        if strategy == PEER and options:
            continue
        with counted() as updates:
            words = [f"strategy={strategy}", f"model={model}", *COMMON, *["clip=1.0"] * (clip == "yes"), *options]
            cell = compose_cells(words, target="cuda")[0]
            shapes = execute(cell.config, target=CUDA, operators=True).result.schedule.shapes
        psi, last = sum(shape.numel for shape in shapes), updates[-1]
        older, newer = (sum(one.kernels[version] for one in last.operators) for version in (OLDER, NEWER))
        touched, moved = (round(size / psi, 1) for size in (last.touched, last.moved))
        milliseconds = round(1000 * sum(one.seconds(costs, OLDER) for one in last.operators), 2)
        name = PEERS if strategy == PEER else updated_by
        rows.append(TrafficRow(name, key, strategy, clip, touched, moved, older, newer, last.waits, milliseconds))
    write(OUT, TrafficRow, rows)
    print(OUT.read_text())
    return 0
