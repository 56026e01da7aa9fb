"""`zerobench predict --published`: the throughput of runs that others published, each on its own hardware."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ..config.cell import CellConfig
from ..fake_execution import Target
from ..host.files import replace_text
from ..host.pipes import print_line
from ..published.cells import RunPlan, plan_of
from ..published.rows import NotGivenError, PublishedRun, read
from ..timing.interval import NOT_VALIDATED, interval
from ..timing.prediction import Reduced, reduced, step_time
from ..timing.published import NEEDED, RunHardware, hardware_of
from ..timing.schedules import Schedules


@dataclass(frozen=True)
class PublishedPrediction:
    """A run's predicted throughput, in tokens per second and GPU, with its 90 % interval. `reason`: why there is none,
    or why the interval is not validated; `assumed`: assumptions for data that the row does not give.
    """

    id: str
    predicted_tokens_s_gpu: float | None = None
    low: float | None = None
    high: float | None = None
    reason: str = ""
    step_s: float | None = None
    exposed_s: float | None = None
    host_s: float | None = None
    binds: str = ""
    assumed: str = ""


@dataclass(frozen=True)
class PlannedRun:
    """A run that can be predicted."""

    run: PublishedRun
    plan: RunPlan
    cell: Reduced
    hardware: RunHardware

    @property
    def config(self) -> CellConfig:
        """The cell that represents the run."""
        return self.plan.config

    @property
    def target(self) -> Target:
        """The device that it is simulated for."""
        return self.plan.target


def predict_published(path: Path, out: Path, jobs: int | None, cache: Path | None) -> int:
    """Predicts the runs of a file and writes a row for each. Returns the exit code."""
    runs = read(path, NEEDED)
    planned = [planned_or_reason(run) for run in runs]
    schedules = Schedules(cache, jobs)
    schedules.execute("published runs", [(one.cell, one.target) for one in planned if isinstance(one, PlannedRun)])
    rows = [
        predicted(one, schedules) if isinstance(one, PlannedRun) else PublishedPrediction(run.id, reason=one)
        for run, one in zip(runs, planned, strict=True)
    ]
    replace_text(out, _as_csv(rows))
    there = sum(row.predicted_tokens_s_gpu is not None for row in rows)
    print_line(f"{out}: {there} of {len(rows)} runs predicted; the others say why not")
    return 0


def planned_or_reason(run: PublishedRun) -> PlannedRun | str:
    """Returns a run's cell and hardware, or the reason why it cannot be predicted."""
    try:
        plan = plan_of(run, flash=True)
        return PlannedRun(run, plan, reduced(plan.config), hardware_of(run))
    except NotGivenError as error:
        return str(error)


def predicted(one: PlannedRun, schedules: Schedules) -> PublishedPrediction:
    """Returns the prediction of a run whose schedule was simulated."""
    schedule = schedules.of(one.cell, one.target)
    if schedule.problem:
        return PublishedPrediction(one.run.id, reason=schedule.problem)
    found = step_time(schedule, one.hardware.costs, one.hardware.declared)
    rate = one.config.micro_batch * one.config.accumulation * one.config.sequence / found.step_s
    range_ = interval(one.hardware.costs, one.hardware.spans_nodes, schedule.without_formula)
    reason = range_.words if range_.words.startswith(NOT_VALIDATED) else ""
    return PublishedPrediction(
        one.run.id, rate, rate / range_.high, rate / range_.low, reason, found.step_s, found.exposed_s, found.host_s,
        found.binds, "; ".join((*one.plan.assumed, *one.hardware.assumed)),
    )  # fmt: skip


def _as_csv(rows: Sequence[PublishedPrediction]) -> str:
    made = io.StringIO()
    writer = csv.writer(made, lineterminator="\n")
    writer.writerow([one.name for one in fields(PublishedPrediction)])
    writer.writerows([_text(value) for value in asdict(row).values()] for row in rows)
    return made.getvalue()


def _text(value: object) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
