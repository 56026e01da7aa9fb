"""Memory traffic of an update on a GPU, counted without one: one rank's, bf16 with AdamW, through a modeled cache.

python -m validation update-traffic --code NAME
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from tests.cached_memory import counted
from zerobench.config.compose import compose_cells
from zerobench.fake_execution import CUDA, execute

from .store import Store

MODELS = {"10M": "gpt_small", "124M": "gpt2_124m"}
STRATEGIES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
COMMON = ("world_size=1", "device=cpu", "precision=bf16", "sequence=256", "micro_batch=1", "data=synthetic")
OUT = Path("results/update_traffic.csv")


@dataclass(frozen=True)
class TrafficRow:
    """An update by some `code`, with clipping or without. Bytes per parameter: that kernels touch, and that move
    to or from memory through the modeled cache.
    """

    code: str
    model: str
    strategy: str
    clip: str
    touched: float
    moved: float
    kernels: int
    waits: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--code", default="now", help="name of this code in the table (default: %(default)s)")


def run(chosen: argparse.Namespace) -> int:
    """Counts the last update of each cell, and writes the rows in place of those of the same code."""
    store = Store(OUT, TrafficRow, lambda row: (row.code, row.model, row.strategy, row.clip))
    for model, name in MODELS.items():
        for strategy, clip in product(STRATEGIES, ("no", "yes")):
            with counted() as updates:
                words = [f"strategy={strategy}", f"model={name}", *COMMON, *["clip=1.0"] * (clip == "yes")]
                cell = compose_cells(words, target="cuda")[0]
                shapes = execute(cell.config, target=CUDA, operators=True).known.schedule.shapes
            psi, last = sum(shape.numel for shape in shapes), updates[-1]
            touched, moved = (round(size / psi, 1) for size in (last.touched, last.moved))
            store.put([TrafficRow(chosen.code, model, strategy, clip, touched, moved, last.kernels, last.waits)])
    print(OUT.read_text())
    return 0
