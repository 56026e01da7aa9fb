"""What `zerobench.watch` and `verify=` cost per step: a plain loop, a watched and a verified one by turns, as ratios.

Steps of one process on the CPU, without what the watch does before the first and after the last. Measure on an idle
machine.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch

import zerobench
from zerobench.config.compose import compose_cells
from zerobench.predict.build import build_model
from zerobench.results.summary import geometric_interval

from .store import Store

SIZES = (("gpt_tiny", 1, 32), ("gpt_tiny", 8, 64), ("gpt_small", 8, 64), ("gpt_small", 8, 256))
"""Models, sequences per step, and their tokens."""

STEPS = 8


@dataclass(frozen=True)
class WatchCostRow:
    """A loop's median step, and its ratio to the plain loop's with a 95 % interval."""

    psi: int
    tokens: int
    loop: str
    step_s: float
    ratio: float
    low: float
    high: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=8, help="runs of each loop (default: %(default)s)")


def run(chosen: argparse.Namespace) -> int:
    watch = partial(zerobench.watch, steps=STEPS)
    loops: dict[str, Any] = {"plain": lambda *_: nullcontext(), "watched": watch}
    loops["verified"] = partial(watch, verify=True)
    store = Store(Path("results/watch_cost.csv"), WatchCostRow, lambda row: (row.psi, row.tokens, row.loop))
    for model, batch, sequence in SIZES:
        config = compose_cells([f"model={model}", f"sequence={sequence}", "device=cpu"])[0].config
        rounds = [{name: _step_s(config, batch, loop) for name, loop in loops.items()} for _ in range(chosen.rounds)]
        psi = sum(parameter.numel() for parameter in build_model(config).parameters())
        for loop in loops:
            ratios = [one[loop] / one["plain"] for one in rounds]
            figures = median(one[loop] for one in rounds), geometric_mean(ratios), *geometric_interval(ratios)
            store.put([WatchCostRow(psi, batch * sequence, loop, *(float(f"{one:.3g}") for one in figures))])
    print(store.path.read_text())
    return 0


def _step_s(config: Any, batch: int, loop: Any) -> float:
    """Returns the median time of a step after the first."""
    torch.manual_seed(0)
    model, times = build_model(config), []
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(256, (batch, config.sequence + 1))
    with loop(model, optimizer):
        for _ in range(STEPS + 1):
            begun = time.perf_counter()
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - begun)
    return median(times[1:])
