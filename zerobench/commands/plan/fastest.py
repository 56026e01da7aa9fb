"""Goal `fastest`: of what fits, the predicted step on a cluster decides.

micro-batch   each candidate takes the largest power of two that fits, and with a given `batch` as many micro-batches as
              that takes
time          schedules are executed once, and laid out again for every network that is asked about
turn          the network at which another candidate would be ahead, slower or faster than the cluster's
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...config.cell import Cell
from ...fake_execution import Target
from ...results.grid import Grid
from ...sizes import show_bytes
from ...timing.costs import GpuCosts
from ...timing.interval import StepInterval, interval_of
from ...timing.prediction import Reduced, StepSchedule, StepTime, reduced, step_time
from ...timing.schedules import Schedules
from ..predict import show_time
from .search import ExecutedCell, PlanRow

SLOWER = (0.5, 0.25, 0.1, 0.05, 0.02, 0.01)
FASTER = (2.0, 4.0)
"""Factors on the network at which the ranking is asked for again."""

SHOWN = 10


@dataclass(frozen=True)
class Timed:
    """A candidate that fits, with its predicted step at the cluster's network."""

    row: PlanRow
    best: ExecutedCell
    cell: Cell
    reduced: Reduced
    schedule: StepSchedule
    time: StepTime
    interval: StepInterval

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second and GPU."""
        return self.rate(self.time)

    def rate(self, time: StepTime) -> float:
        """Returns the tokens per second and GPU of a step of this cell."""
        config = self.cell.config
        return config.micro_batch * config.accumulation * config.sequence / time.step_s


def batch_of(words: Sequence[str], gpus: int) -> tuple[list[str], int | None]:
    """Takes `batch=` out of a command's words. Raises ValueError if GPUs do not divide it."""
    batches = [word.partition("=")[2] for word in words if word.startswith("batch=")]
    if not batches:
        return list(words), None
    if not batches[-1].isdecimal() or int(batches[-1]) % gpus or not int(batches[-1]):
        raise ValueError(f"batch={batches[-1]}: sequences of a step over all GPUs, a multiple of --gpus {gpus}")
    return [word for word in words if not word.startswith("batch=")], int(batches[-1])


def timed(rows: Sequence[PlanRow], costs: GpuCosts, target: Target, batch: int | None, jobs: int | None) -> list[Timed]:
    """Returns the candidates that fit, the fastest first. Those that cannot be laid out are left out."""
    chosen = [(row, row.best, _with_batch(row.best, batch)) for row in rows if row.best is not None]
    cells = [reduced(cell.config) for _, _, cell in chosen]
    schedules = Schedules(None, jobs)
    schedules.execute("schedules", [(cell, target) for cell in cells])
    found = []
    for (row, best, cell), small in zip(chosen, cells, strict=True):
        schedule = schedules.of(small, target)
        if not schedule.problem:
            time = step_time(schedule, costs)
            found.append(Timed(row, best, cell, small, schedule, time, interval_of(costs, cell.config)))
    return sorted(found, key=lambda one: -one.tokens_per_s)


def _with_batch(best: ExecutedCell, batch: int | None) -> Cell:
    config = best.cell.config
    if batch is None:
        return best.cell
    return best.cell.changed(accumulation=max(1, batch // (config.micro_batch * config.world_size)), batch=batch)


HEADER = ["", "micro-batch", "peak", "step", "90 % interval", "tokens/s/GPU", "exposed", "host", "binds"]


def table_of(found: Sequence[Timed]) -> Grid:
    """Returns the table of the fastest."""
    return Grid(HEADER, [_line(one) for one in found[:SHOWN]], ("", "binds"))


def _line(one: Timed) -> list[str]:
    config, time = one.cell.config, one.time
    batch = f"{config.micro_batch}" + f" × {config.accumulation}" * (config.accumulation > 1)
    low, high = (show_time(time.step_s * factor) for factor in (one.interval.low, one.interval.high))
    return [
        one.row.candidate.name, batch, show_bytes(one.best.used.peak_bytes), show_time(time.step_s),
        f"{low} – {high}", f"{one.tokens_per_s:,.0f}", show_time(time.exposed_s), show_time(time.host_s), time.binds,
    ]  # fmt: skip


def sentence(found: Sequence[Timed], costs: GpuCosts) -> str:
    """Returns the recommendation: why the first wins, whether the interval says so, and where another would."""
    first = found[0]
    said = (
        f"Take {first.row.candidate.name} with micro_batch={first.cell.config.micro_batch}: {first.tokens_per_s:,.0f}"
    )
    said += f" tokens/s per GPU, its step bound by {first.time.binds}"
    if len(found) > 1:
        second = found[1]
        ahead = first.tokens_per_s / second.tokens_per_s - 1
        tie = first.interval.high > 1 + ahead
        said += f"; {second.row.candidate.name} is {ahead:.1%} behind" + ", less than the interval: a tie" * tie
    return f"{said}. {turn(found, costs)} The interval: {first.interval.words}."


def turn(found: Sequence[Timed], costs: GpuCosts) -> str:
    """Returns the sentence on the nearest network at which another candidate is ahead."""
    first, rate = found[0], costs.cluster.node_gbit_s
    if all(one.cell.config.world_size <= costs.cluster.devices_per_node for one in found):
        return "All ranks are on one node, so that the network between nodes does not matter."
    for words, factors in (("slower", SLOWER), ("faster", FASTER)):
        for factor in factors:
            other = GpuCosts(costs.device, replace(costs.cluster, node_gbit_s=rate * factor))
            best = max(found, key=lambda one: one.rate(step_time(one.schedule, other)))
            if best is not first:
                return f"At {rate * factor:g} Gbit/s per node, {words} than here, {best.row.candidate.name} is ahead."
    return f"No network from {rate * SLOWER[-1]:g} to {rate * FASTER[-1]:g} Gbit/s per node changes that."


def as_json(found: Sequence[Timed], costs: GpuCosts) -> dict[str, Any]:
    """Returns the plan as plain values: seconds, bytes, tokens per second and GPU."""
    return {
        "cluster": asdict(costs.cluster),
        "rows": [
            {"name": one.row.candidate.name, "micro_batch": one.cell.config.micro_batch,
             "accumulation": one.cell.config.accumulation, "peak_bytes": one.best.used.peak_bytes,
             "step_s": one.time.step_s, "low_s": one.time.step_s * one.interval.low,
             "high_s": one.time.step_s * one.interval.high, "tokens_per_s_gpu": one.tokens_per_s,
             "exposed_s": one.time.exposed_s, "host_s": one.time.host_s, "binds": one.time.binds}
            for one in found
        ],
        "recommended": found[0].row.candidate.name, "sentence": sentence(found, costs),
    }  # fmt: skip
