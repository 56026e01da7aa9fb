"""Others' measured throughput next to our predictions, with scales that are fitted to other sources than the row's.

scales     by the least mean |log error|, every source with the same weight: compute and attention per type of device
left out   the error of a row under the scales that the rows of all other sources give
naive      one utilization per type of device: the median of the rows of all other sources
interval   of a kind of run the factor that holds 90 % of measured over predicted steps, of rows that were left out.
           covered: the fraction within it when the factor is made from nine tenths of the rows for the rest, in turns

Writes a row per run to results/predicted_runs, and to zerobench/hardware/validated.yaml scales and intervals, for
`zerobench predict`. With --file nothing is fitted: each run of the file is predicted with the committed scales, on its
own hardware.

    python -m validation predicted-runs
    python -m validation predicted-runs --file mine.csv --out predictions.csv
"""

from __future__ import annotations

import argparse
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import yaml
from scipy.optimize import minimize

from zerobench.config.cell import CellConfig
from zerobench.host.files import replace_text
from zerobench.host.terminal import stdout_console
from zerobench.results.grid import Grid
from zerobench.sections import known
from zerobench.simulation.execute import Target
from zerobench.simulation.hardware import Scales, scales_by_type
from zerobench.simulation.prediction import NOT_VALIDATED, Reduced, StepTime, interval_of, kind_of, reduced, step_time
from zerobench.sizes import show_count

from .published_runs.cells import plan_of
from .published_runs.hardware import RunHardware, hardware_of
from .published_runs.rows import SIMULATED, NotGivenError, PublishedRun
from .published_runs.rows import read as read_runs
from .schedules import Schedules
from .store import write

RUNS = (Path("results/published_runs/training.csv"), Path("results/predicted_runs/nanotron.csv"))
ERRORS = Path("results/predicted_runs/errors.csv")
CACHE = Path("results/runs/predicted_runs")

ENOUGH = 20
"""Rows of a kind of run from which it has an interval."""

ROUGH = ("v100",)
"""Types whose only source says that its cluster varied by 40 % with the time of day: nothing is fitted to them."""


@dataclass(frozen=True)
class ErrorRow:
    """A run. Tokens per second and GPU: as published; predicted, with all sources in the scales and with its own left
    out; naive with its own left out. Errors are predicted / published - 1."""

    id: str
    source: str
    system: str
    strategy: str
    model: str
    gpu: str
    gpus: int | None
    published: float | None = None
    predicted: float | None = None
    left_out: float | None = None
    naive: float | None = None
    error: float | None = None
    left_out_error: float | None = None
    naive_error: float | None = None
    exposed: float | None = None
    binds: str = ""
    assumed: str = ""
    reason: str = ""


@dataclass(frozen=True)
class PredictionRow:
    """A run of a file: tokens per second and GPU, with the 90 % interval. `reason`: why there is no prediction, or why
    the interval is not validated; `assumed`: assumptions for data that the row does not give.
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
    """A run that can be predicted. `cell`: of `config`, as simulated for the device `target`."""

    run: PublishedRun
    config: CellConfig
    cell: Reduced
    target: Target
    hardware: RunHardware
    assumed: str

    @property
    def tokens(self) -> int:
        """Tokens of a step on one GPU."""
        return self.config.micro_batch * self.config.accumulation * self.config.sequence

    def step(self, schedules: Schedules, scales: Scales | None = None) -> StepTime:
        """Returns the predicted step; `scales`: in place of the committed ones."""
        costs = self.hardware.costs if scales is None else self.hardware.costs.scaled(scales)
        return step_time(schedules.of(self.cell, self.target), costs, self.hardware.declared)

    @property
    def ideal(self) -> float:
        """Tokens per second and GPU if the model's FLOPs ran at the device's peak."""
        layers, hidden = known(self.run.layers), known(self.run.hidden)
        params = self.run.params or 12 * layers * hidden**2
        peaks = self.hardware.costs.device.peak_tflops
        peak = peaks.get(self.config.precision.name, max(peaks.values())) * 1e12
        return peak / (6.0 * params + 12.0 * layers * hidden * (self.run.seq or 0))


@dataclass(frozen=True)
class Laid:
    """A run with its measured step, and the parts of its predicted one without scales, seconds."""

    one: PlannedRun
    measured_s: float
    products_s: float
    attention_s: float
    rest_s: float

    @property
    def source(self) -> str:
        """The source that is left out whole: all rows of one publisher; of nanotron those of one N."""
        return source_of(self.one.run)

    @property
    def device(self) -> str:
        """The type of device."""
        return self.one.hardware.costs.device.type

    @property
    def kind(self) -> str:
        """The kind of run that has an interval of its own."""
        return kind_of(self.one.hardware.costs.device, self.one.hardware.spans_nodes)

    def step_s(self, scales: Scales) -> float:
        """Returns the step under some scales, as if the exposed time stayed."""
        return scales.compute * (self.products_s + scales.attention * self.attention_s) + self.rest_s


def source_of(run: PublishedRun) -> str:
    """Returns the publisher of a run: a repository or a site; of nanotron's bench with the number of GPUs."""
    words = run.source.replace(",", " ").split()
    name = words[1] if words and words[0] == "github" else (words or ["?"])[0]
    name = "/".join(name.split("/")[:2])
    return f"{name} N={run.gpus}" if "nanotron" in run.id else name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    words = "predict the runs of this file, in the columns of docs/reference/validated.md, and fit nothing"
    parser.add_argument("--file", type=Path, metavar="CSV", help=words)
    parser.add_argument("--out", type=Path, metavar="CSV", help="with --file (default: FILE_predicted.csv)")
    parser.add_argument("--cache", type=Path, default=CACHE, metavar="DIR", help="of schedules: %(default)s")


def run(chosen: argparse.Namespace) -> int:
    """Predicts the runs of a file; or else fits the scales, and writes errors and what was validated."""
    schedules = Schedules(chosen.cache)
    if chosen.file is not None:
        runs = read_runs(chosen.file, SIMULATED)
        planned = _simulated(runs, schedules)
        out = chosen.out or chosen.file.with_name(f"{chosen.file.stem}_predicted.csv")
        write(out, PredictionRow, [_predicted(run, planned[run.id], schedules) for run in runs])
        print(f"{out}: {show_count(len(runs), 'run')}; a run without a prediction has a reason")
        return 0
    runs = [run for path in RUNS for run in read_runs(path, SIMULATED) if run.tokens_s_gpu is not None]
    planned = _simulated(runs, schedules)
    known = {name: _laid(plan, schedules) for name, plan in planned.items() if isinstance(plan, PlannedRun)}
    rows = list(errors_of(runs, planned, known, schedules))
    write(ERRORS, ErrorRow, rows)
    scales, kinds = fitted(list(known.values())), left_out(list(known.values()), rows)
    intervals = {kind: fitted_interval(found) for kind, found in sorted(kinds.items()) if len(found) >= ENOUGH}
    fits = [plan.one.config for plan in known.values() if plan.device not in ROUGH]
    most = {name: max(getattr(config, name) for config in fits) for name in ("world_size", "sequence")}
    write_validated({"compute": scales.compute, "attention": scales.attention, "intervals": intervals, "most": most})
    show(rows)
    return 0


def _simulated(runs: Iterable[PublishedRun], schedules: Schedules) -> dict[str, PlannedRun | str]:
    """Returns each run's plan, whose schedule is simulated; or the reason why it cannot be predicted."""
    planned = {run.id: planned_or_reason(run) for run in runs}
    plans = [plan for plan in planned.values() if isinstance(plan, PlannedRun)]
    schedules.execute("published runs", [(plan.cell, plan.target) for plan in plans])
    problems = {plan.run.id: schedules.of(plan.cell, plan.target).problem for plan in plans}
    return planned | {name: problem for name, problem in problems.items() if problem}


def planned_or_reason(run: PublishedRun) -> PlannedRun | str:
    """Returns a run's cell and hardware, or the reason why it cannot be predicted."""
    try:
        plan = plan_of(run, flash=True)
        cell, hardware = reduced(plan.config), hardware_of(run)
    except NotGivenError as error:
        return str(error)
    return PlannedRun(run, plan.config, cell, plan.target, hardware, "; ".join((*plan.assumed, *hardware.assumed)))


def _predicted(run: PublishedRun, plan: PlannedRun | str, schedules: Schedules) -> PredictionRow:
    """Returns the prediction of a run with the committed scales."""
    if isinstance(plan, str):
        return PredictionRow(run.id, reason=plan)
    step, unknown = plan.step(schedules), schedules.of(plan.cell, plan.target).without_formula
    rate = plan.tokens / step.step_s
    range_ = interval_of(plan.hardware.costs, plan.config, unknown)
    reason = range_.basis if range_.basis.startswith(NOT_VALIDATED) else ""
    return PredictionRow(
        run.id, rate, rate / range_.high, rate / range_.low, reason, step.step_s, step.exposed_s, step.host_s,
        step.binds, plan.assumed,
    )  # fmt: skip


def _laid(plan: PlannedRun, schedules: Schedules) -> Laid:
    assert plan.run.tokens_s_gpu is not None
    plain, twice, heavy = (plan.step(schedules, Scales(*scales)) for scales in ((1, 1), (2, 1), (1, 2)))
    attention = heavy.compute_s - plain.compute_s
    products = twice.compute_s - plain.compute_s - attention
    measured = plan.tokens / plan.run.tokens_s_gpu
    return Laid(plan, measured, products, attention, plain.step_s - products - attention)


# -- what is fitted --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fitted:
    """The scales `compute` and `attention` by type of device."""

    compute: dict[str, float]
    attention: dict[str, float]


def fitted(rows: Sequence[Laid]) -> Fitted:
    """Returns the scales that runs give."""
    devices = sorted({row.device for row in rows if row.device not in ROUGH})
    rows = [row for row in rows if row.device in devices]
    if not rows:
        return Fitted({}, {})
    # every source of a type of device has the same say
    keys = [(row.device, _publisher(row.source)) for row in rows]
    counts = Counter(keys)
    weights = [1 / counts[key] for key in keys]

    def loss(values: np.ndarray) -> float:
        factors = {device: Scales(*pair) for device, *pair in zip(devices, *np.split(np.exp(values), 2), strict=True)}
        steps = [row.step_s(factors[row.device]) / row.measured_s for row in rows]
        return float(np.abs(np.log(steps)) @ weights)

    start = [0.2] * len(devices) + [0.1] * len(devices)
    bounds = [(0.0, math.log(2))] * len(start)  # no kernel is faster than in the tables
    options = {"xatol": 1e-4, "fatol": 1e-6}
    found = minimize(loss, start, method="Nelder-Mead", bounds=bounds, options=options)
    scales = np.split(np.exp(found.x).round(3), 2)
    return Fitted(*(dict(zip(devices, map(float, scale), strict=True)) for scale in scales))


def _publisher(source: str) -> str:
    return source.partition(" N=")[0]


def errors_of(
    runs: Iterable[PublishedRun], planned: dict[str, PlannedRun | str], laid: dict[str, Laid], schedules: Schedules
) -> Iterable[ErrorRow]:
    """Yields a row for each run."""
    all_rows = list(laid.values())
    whole, without = fitted(all_rows), dict[str, Fitted]()
    for run in runs:
        about = ErrorRow(
            run.id, source_of(run), run.system, run.strategy, run.model, run.gpu, run.gpus, run.tokens_s_gpu
        )
        plan = planned[run.id]
        if isinstance(plan, str):
            yield replace(about, reason=plan)
            continue
        source, device, published = laid[run.id].source, laid[run.id].device, known(run.tokens_s_gpu)
        others = [row for row in all_rows if row.source != source]
        if source not in without:
            without[source] = fitted(others)
        scales = (scales_by_type(fit.compute, fit.attention, device) for fit in (whole, without[source]))
        step, left_out = (plan.step(schedules, one) for one in scales)
        rates = [plan.tokens / each.step_s for each in (step, left_out)]
        alike = [known(row.one.run.tokens_s_gpu) / row.one.ideal for row in others if row.device == device]
        naive = median(alike) * plan.ideal if alike else None
        yield replace(
            about, predicted=rates[0], left_out=rates[1], naive=naive, error=rates[0] / published - 1,
            left_out_error=rates[1] / published - 1, naive_error=naive / published - 1 if naive else None,
            exposed=step.exposed_s / step.step_s, binds=step.binds, assumed=plan.assumed,
        )  # fmt: skip


# -- what is written -------------------------------------------------------------------------------


def left_out(known: Sequence[Laid], rows: Sequence[ErrorRow]) -> dict[str, list[float]]:
    """Returns |log error| of the rows that were left out, by kind of run, and of all."""
    errors = {row.id: abs(math.log(1 + row.left_out_error)) for row in rows if row.left_out_error is not None}
    kinds: defaultdict[str, list[float]] = defaultdict(list)
    for row in known:
        if row.device not in ROUGH:
            for kind in (row.kind, "all"):
                kinds[kind].append(errors[row.one.run.id])
    return kinds


VALIDATED = Path("zerobench/hardware/validated.yaml")
COVERED = 0.9
"""Part of the errors that an interval holds."""

VALIDATED_HEADER = "# Written by `make predicted-runs` and `make one-gpu`: validation/ says how.\n"


def write_validated(found: dict[str, Any]) -> None:
    """Writes scales, intervals or rates in place of those of the same name."""
    found = yaml.safe_load(VALIDATED.read_text()) | found
    replace_text(VALIDATED, VALIDATED_HEADER + yaml.safe_dump(found, sort_keys=False))


def fitted_interval(errors: Sequence[float]) -> dict[str, float | int]:
    """Returns the interval of a kind of run: factors on a step, and the fraction of rows that they cover in turns.
    `errors`: |log| of predicted over measured.
    """
    wide = math.exp(float(np.quantile(errors, COVERED)))
    shuffled = np.random.default_rng(0).permutation(np.array(errors))
    inside = 0
    for part in range(10):
        held = shuffled[part::10]
        rest = np.concatenate([shuffled[other::10] for other in range(10) if other != part])
        inside += int((held <= np.quantile(rest, COVERED)).sum())
    return {
        "low": round(1 / wide, 3),
        "high": round(wide, 3),
        "runs": len(errors),
        "covered": round(inside / len(errors), 3),
    }


HEADER = ["source", "runs", "median", "90th", "left out: median", "90th", "naive: median", "90th"]


def table(rows: Sequence[ErrorRow]) -> list[list[str]]:
    """Returns the lines of the table of |error|: all compared rows, then those of each publisher and type of GPU."""
    compared = pd.DataFrame(map(asdict, rows)).dropna(subset=["error"])
    publishers = compared["source"].map(_publisher) + ", " + compared["gpu"]
    lines = []
    for name, group in [("all", compared), *compared.groupby(publishers, sort=False)]:
        errors = group[["error", "left_out_error", "naive_error"]].astype("float64").abs().quantile([0.5, 0.9])
        shown = ["–" if pd.isna(error) else f"{error:.1%}" for column in errors for error in errors[column]]
        lines.append([str(name), str(len(group)), *shown])
    return lines


def show(rows: Sequence[ErrorRow]) -> None:
    """Prints |error| by source, and how many runs have no prediction."""
    console = stdout_console()
    console.print(Grid(HEADER, table(rows), left=1))
    none = sum(row.error is None for row in rows)
    console.print(f"{len(rows) - none} of {len(rows)} runs compared; the others say why not", highlight=False)
