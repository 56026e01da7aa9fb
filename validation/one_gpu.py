"""Rates of a rank without others, fitted to the steps of a GPU suite, for `zerobench predict` with world_size=1.

parts.csv        the suite's bf16 steps by phase, and the parts of their schedules, simulated once, with the code that
                 ran; while the file is there, only the fit is made again
validated.yaml   one_gpu: rates of the GPU by least squares over the phases of the steps that it binds, of the host by
                 the least mean |log error| of all other steps
next.csv         steps of the present code on machines that have not run it: commit it before they do

    python -m validation one-gpu results/h100
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import minimize, nnls

from zerobench.commands.predict import costs_of
from zerobench.config.cell import CellConfig
from zerobench.config.compose import compose_cells
from zerobench.fake_execution import CUDA, execute_all
from zerobench.host.files import replace_text
from zerobench.results.tables import load
from zerobench.timing import hardware
from zerobench.timing.hardware import US
from zerobench.timing.interval import StepInterval, interval_of
from zerobench.timing.prediction import PHASES, StepSchedule, reduced, schedule_of, step_time

from .gpu_runs import timed
from .predicted_runs import write_validated

PARTS, NEXT = "parts.csv", "next.csv"
CLUSTERS = ("h100-3200", "h200-3200")
"""The first is the one that was measured."""

STEADY = 0.01
"""A step is bound by its GPU if its median is within this of its fastest: a host's time differs from step to step."""

MOVED = 32.0
"""Bytes per parameter that an update of the present code moves at most; other reads find a GPU's cache."""

GPU_PARTS, HOST_PARTS = ["memory_s", "products_s", "unaligned_s"], ["operators", "orders", "steps"]
RATES = ("memory_efficiency", "products", "unaligned", "operator_us", "order_us", "loop_us")
PLAIN = dict.fromkeys(RATES[:3], 1.0) | dict.fromkeys(RATES[3:], 0.0)

Rates = dict[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("folder", type=Path, help="the tables of a GPU suite")


def run(chosen: argparse.Namespace) -> int:
    """Fits the rates, and predicts the steps of the present code on other machines."""
    path = chosen.folder / PARTS
    if not path.is_file():
        _write(path, measured(chosen.folder))
    parts = pd.read_csv(path)
    rates = fitted(parts)
    write_validated({"one_gpu": rates})
    present = simulated([cell.config for cell in compose_cells(["-m", *ASKED])])
    present = present.merge(parts[["cell", "phase", "psi"]])
    most = MOVED * present["psi"] / _bytes_per_s(CLUSTERS[0])
    is_update = present["phase"] == "update"
    present["memory_s"] = present["memory_s"].where(~is_update, np.minimum(present["memory_s"], most))
    found = [predicted(present, rates, cluster).assign(cluster=cluster) for cluster in CLUSTERS]
    _write(chosen.folder / NEXT, pd.concat(found).reset_index())
    return 0


ASKED = (
    "strategy=ddp,zero1,zero2,zero3,fsdp2", "model=gpt2_124m,gpt2_1_5b", "sequence=1024", "micro_batch=8",
    "precision=bf16", "world_size=1", "data=synthetic", "device=cuda",
)  # fmt: skip


def is_asked(cell: str) -> bool:
    """True for the ten cells that were predicted before the suite ran."""
    return "gpt2" in cell and cell.endswith("b=8")


def _write(path: Path, frame: pd.DataFrame) -> None:
    replace_text(path, frame.to_csv(index=False, float_format="%.6g"))


# -- the parts of a step ---------------------------------------------------------------------------


def measured(folder: Path) -> pd.DataFrame:
    """Returns the steps of a suite by phase, in seconds, beside the parts of their schedules. `unsteady`: the median of
    the step over its fastest, minus 1.
    """
    launches, steps = timed(folder), load(folder).steps
    warm = steps[~steps["warmup"].astype(bool)].groupby("run_id")["seconds"]
    unsteady = warm.median() / warm.min() - 1
    configs = [CellConfig.from_json(rows[0]["config"]) for rows in launches.values()]
    found = []
    for config, rows in zip(configs, launches.values(), strict=True):
        step = geometric_mean(row["step_s"] for row in rows)
        late = max(unsteady[row["run_id"]] for row in rows)
        for phase in PHASES:
            seconds = geometric_mean(row[f"{phase}_s"] for row in rows)
            found.append({"cell": _name(config), "phase": phase, "psi": rows[0]["psi"], "measured_s": seconds,
                          "step_s": step, "unsteady": late})  # fmt: skip
    return pd.DataFrame(found).merge(simulated(configs))


def _name(config: CellConfig) -> str:
    return f"{config.strategy.name} {config.model_name} b={config.micro_batch}"


def simulated(configs: Sequence[CellConfig]) -> pd.DataFrame:
    """Returns the parts of simulated steps, a row per cell and phase. `memory_s`: of kernels that compute little, at
    the memory's peak; `products_s`, `unaligned_s`: of matrix products by the device's table, the second if a side is
    unaligned. `operators`, `orders`: of the host.
    """
    cells = [reduced(config) for config in configs]
    executed = iter(execute_all([config for cell in cells for config in cell.configs], CUDA, operators=True))
    schedules = [schedule_of(cell, [next(executed) for _ in cell.configs]) for cell in cells]
    work = zip(configs, map(_work, schedules), strict=True)
    return pd.DataFrame({"cell": _name(config), "phase": phase, **parts}
                        for config, found in work for phase, parts in found.items())  # fmt: skip


def _work(schedule: StepSchedule) -> dict[str, dict[str, float]]:
    """Returns phase -> parts: each is how much longer the phase is with twice the part's rate. The host's are the
    step's, in its last phase.
    """
    costs = costs_of(CLUSTERS[0], None)

    def laid(**changed: float) -> Any:
        return step_time(schedule, costs.alone(PLAIN | changed))

    plain, twice = laid(), [laid(memory_efficiency=0.5), laid(products=2.0), laid(unaligned=2.0)]
    found = {}
    for phase in PHASES:
        seconds = plain.phases[phase].total_s
        parts = {name: one.phases[phase].total_s - seconds for name, one in zip(GPU_PARTS, twice, strict=True)}
        found[phase] = parts | {"rest_s": seconds - sum(parts.values())} | dict.fromkeys(HOST_PARTS, 0.0)
    second = 1 / US  # as long as no device takes, so that the step is the number of operators
    operators, orders = (round(laid(**{name: second}).step_s) for name in RATES[3:5])
    found[phase] |= {"operators": operators, "orders": orders, "steps": 1.0}
    return found


def _bytes_per_s(cluster: str) -> float:
    return costs_of(cluster, None).device.memory_gb_s * hardware.GB_S


# -- the fit ---------------------------------------------------------------------------------------


def fitted(parts: pd.DataFrame) -> Rates:
    """Returns the rates that measured steps give."""
    bound, free = parts[parts["unsteady"] < STEADY], parts[parts["unsteady"] >= STEADY]
    shares = bound[[*GPU_PARTS, "rest_s"]].div(bound["measured_s"], axis=0)
    memory, products, unaligned = nnls(shares[GPU_PARTS].to_numpy(), 1 - shares["rest_s"].to_numpy())[0]
    counts = free.groupby("cell")[HOST_PARTS].sum().to_numpy()
    seconds = free.groupby("cell")["step_s"].first().to_numpy()

    def loss(rates: np.ndarray[Any, Any]) -> float:
        return float(np.abs(np.log(counts @ np.abs(rates) * US / seconds)).mean())

    host = np.abs(minimize(loss, [40.0, 100.0, 5000.0], method="Nelder-Mead", options={"maxiter": 10**4}).x)
    values = (1 / memory, products, unaligned, *host)
    return {name: float(f"{value:.4g}") for name, value in zip(RATES, values, strict=True)}


def predicted(parts: pd.DataFrame, rates: Rates, cluster: str = CLUSTERS[0]) -> pd.DataFrame:
    """Returns a row per cell, in seconds: the step with its interval, and of it the device, the device's update and the
    host. The slower of device and host is the step.
    """
    memory = _bytes_per_s(CLUSTERS[0]) / _bytes_per_s(cluster) / rates["memory_efficiency"]
    slower = np.array([memory, rates["products"], rates["unaligned"], 1.0])
    parts = parts.assign(device=parts[[*GPU_PARTS, "rest_s"]].to_numpy() @ slower)
    parts["host"] = parts[HOST_PARTS].to_numpy() @ np.array([rates[name] for name in RATES[3:]]) * US
    parts["update"] = parts["device"].where(parts["phase"] == "update", 0.0)
    found = parts.groupby("cell", sort=False)[["device", "update", "host"]].sum()
    found.insert(0, "predicted", found[["device", "host"]].max(axis=1))
    wide = _interval(cluster)
    return found.assign(low=found["predicted"] * wide.low, high=found["predicted"] * wide.high)


@cache
def _interval(cluster: str) -> StepInterval:
    (alone,) = compose_cells(["strategy=ddp", "world_size=1"])
    return interval_of(costs_of(cluster, None), alone.config)


@cache
def refitted(folder: Path, alike: Callable[[str, str], bool] = str.__eq__) -> pd.DataFrame:
    """Returns the ten steps as predicted, with `measured`, and with `left_out`: predicted by rates that were fitted
    without all cells that are `alike`. The table is shared: not to be changed.
    """
    parts, rates = pd.read_csv(folder / PARTS), hardware.validated()["one_gpu"]
    found = predicted(parts, rates).assign(measured=parts.groupby("cell")["step_s"].first())
    found = found[found.index.map(is_asked)]
    for cell in found.index:
        others = fitted(parts[[not alike(cell, other) for other in parts["cell"]]])
        found.loc[cell, "left_out"] = predicted(parts, others).loc[cell, "predicted"]
    return found.reset_index()
