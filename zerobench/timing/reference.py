"""A reference model that trains on this machine, and the same steps as the times of their operators lay them out.

alone           as many ranks as are calibrated train side by side, each in a world of its own: no communication.
                What the step takes beyond its layout, divided by its operators on 1 MiB or more, is added to each
communicating   the ranks train in one world, under ZeRO-3 for our collectives (`seam`) and under FSDP2 for torch's.
                What such a step takes beyond its layout, divided by its launches, is the cost of a launch: Python of
                hooks, ranks that wait for one another, and whatever else the layout lacks. A launch is an event of
                the schedule in forward or backward; a reduce-scatter in pieces of two sizes has two

All are launched in turns, so that a drift of the machine affects all. No cell of validation/predicted_here is among
them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from operator import truediv
from pathlib import Path
from statistics import median

import pandas as pd

from ..calibrate.collectives import load_calibration
from ..calibrate.operators import CALLS, IN_STEP, STEP, OperatorTime
from ..config.cell import CellConfig
from ..config.compose import compose_cells
from ..fake_execution.execute import CPU
from ..host.environment import usable_cores
from ..host.temporary import temporary_folder
from ..host.terminal import progress_bar
from ..launch.start_ranks import launch
from ..records import EventRow
from ..worker import RankJob, run_rank
from .costs import CpuCosts, is_called, is_cold
from .prediction import execute_schedules, reduced, step_time

WORDS = (
    "model=gpt_small", "model.layers=3", "micro_batch=4", "sequence=128", "device=cpu", "launch.threads=1",
    "measure.passes=timed", "measure.warmup=2", "measure.steps=8",
)  # fmt: skip
ALONE = "alone"
COMMUNICATING = {"seam": "zero3", "torch": "fsdp2"}
"""What launches a collective -> the strategy whose steps tell its cost."""
ROUNDS = 8


class NotMeasuredError(Exception):
    """A rank failed; the message says why."""


def reference_cell(ranks: int, strategy: str = ALONE) -> CellConfig:
    """Returns the cell of a reference step; alone, a rank is a world of its own."""
    own = ["strategy=ddp", "world_size=1"] if strategy == ALONE else [f"strategy={strategy}", f"world_size={ranks}"]
    (cell,) = compose_cells([*WORDS, *own])
    return cell.config


def reference_step_s(ranks: int, timeout_s: float, strategy: str = ALONE) -> float:
    """Launches a reference step and returns its seconds: the mean over the ranks of their medians.

    Raises NotMeasuredError.
    """
    config = reference_cell(ranks, strategy)
    worlds = [(0, number) for number in range(ranks)] if strategy == ALONE else [(rank, 0) for rank in range(ranks)]
    with temporary_folder() as scratch:
        jobs = [RankJob(config, "timed", rank, f"{scratch}/world-{world}", str(scratch)) for rank, world in worlds]
        outcome = launch(run_rank, jobs, scratch / "logs", timeout_s)
    if outcome.status != "ok":
        raise NotMeasuredError(f"reference step, {strategy}: {outcome.status}: {outcome.reason}")
    steps = [median(step.seconds for step in record.steps if not step.warmup) for record in outcome.results]
    return float(sum(steps) / ranks)


def measure_steps(ranks: int, timeout_s: float) -> dict[str, float]:
    """Returns strategy -> step, seconds: of launches in turns, the median alone, and the median ratio to it in the same
    round. Raises NotMeasuredError.
    """
    found: defaultdict[str, list[float]] = defaultdict(list)
    names = [ALONE, *(COMMUNICATING.values() if ranks > 1 else ())]
    with progress_bar(f"reference steps, N={ranks}", ROUNDS * len(names), "launches") as advance:
        for _ in range(ROUNDS):
            for name in names:
                found[name].append(reference_step_s(ranks, timeout_s, name))
                advance()
    alone = median(found[ALONE])
    ratios = {name: median(map(truediv, seconds, found[ALONE])) for name, seconds in found.items()}
    return {name: ratio * alone for name, ratio in ratios.items()}


def step_rows(
    folder: Path, operators: list[OperatorTime], measured: dict[str, float], ranks: int
) -> list[OperatorTime]:
    """Returns the rows of reference steps for the calibration in `folder`: alone, and costs of operators and launches.

    `measured`: of measure_steps.
    """
    cells = [reduced(reference_cell(ranks, name)) for name in measured]
    schedules = dict(zip(measured, execute_schedules("reference steps", cells, CPU), strict=True))
    calibration, rows = load_calibration(folder), list(operators)

    def laid_out(name: str) -> float:
        costs = CpuCosts(pd.DataFrame([asdict(row) for row in rows]), calibration, usable_cores())
        return step_time(schedules[name], costs).step_s

    def row(name: str, seconds: float) -> OperatorTime:
        return OperatorTime(name, " ".join(WORDS), 0, 0, ranks, seconds)

    def beyond(name: str, counts: Callable[[EventRow], bool]) -> float:
        (events,) = schedules[name].events
        return (measured[name] - laid_out(name)) / sum(map(counts, events))

    rows += [row(STEP, measured[ALONE]), row(IN_STEP, beyond(ALONE, is_cold))]
    spread = COMMUNICATING.items() if ranks > 1 else ()
    calls = [row(CALLS[via], beyond(name, is_called)) for via, name in spread]
    return [*rows[len(operators) :], *calls]
