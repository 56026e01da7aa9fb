"""Rates of a rank without others, fitted to the steps of a GPU suite, for `zerobench predict` with world_size=1.

parts.csv        the suite's bf16 steps by phase, and the parts of their schedules, simulated once, with the engine that
                 ran (3937cc23); while the file is there, only the fit is made again
validated.yaml   one_gpu: rates of the GPU by least squares over the phases of the steps that it binds, of the host by
                 the least mean |log error| of all other steps. No product is faster than the table's, which is of
                 products alone on a GPU, and none with an unaligned side is faster than others
next.csv         steps of the present code on machines that have not run it, with its kernel and in tiles, in seconds:
                 commit it before they do. `update`, `device`: of the GPU; the slower of device and host is the step

    python -m validation one-gpu results/h100
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import minimize, nnls

from zerobench.commands.predict import costs_of
from zerobench.config.cell import CellConfig
from zerobench.config.compose import compose_cells
from zerobench.host.files import replace_text
from zerobench.results.tables import load
from zerobench.simulation import hardware
from zerobench.simulation.costs import MOST_BLOCKS
from zerobench.simulation.execute import CUDA, execute_all
from zerobench.simulation.hardware import US
from zerobench.simulation.prediction import PHASES, StepSchedule, interval, reduced, schedule_of, step_time

from .gpu_runs import timed
from .predicted_runs import write_validated

PARTS, NEXT = "parts.csv", "next.csv"
CLUSTERS = ("h100-3200", "h200-3200")
"""The first is the one that was measured."""

STEADY = 0.01
"""A step is bound by its GPU if its median is within this of its fastest: a host's time differs from step to step."""

UPDATES = {"one kernel": (), "tiles of 10 MiB": ("precision.tile_bytes=10485760",)}
"""Name of an update -> options."""
PEER, PEERS = "fsdp2", "torch"
"""A strategy with an update of its own, and the update's name."""

GPU_PARTS = ["memory_s", "launches", "products_s", "unaligned_s"]
HOST_PARTS = ["operators", "orders", "steps"]
RATES = ("memory_efficiency", "launch_us", "products", "unaligned", "operator_us", "order_us", "loop_us")
PLAIN = dict.fromkeys(RATES, 0.0) | dict.fromkeys(("memory_efficiency", "products", "unaligned"), 1.0)

ATTENTION = 1.147
"""Scale of attention in parts.csv, as it was when that was made: a part of `rest_s`."""

Rates = dict[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="the tables of a GPU suite")


def run(chosen: argparse.Namespace) -> int:
    """Fits the rates, and predicts the steps of the present code on other machines."""
    path = chosen.folder / PARTS
    if not path.is_file():
        _write(path, measured(chosen.folder))
    parts = pd.read_csv(path)
    rates = fitted(parts)
    write_validated({"one_gpu": rates})
    _write(chosen.folder / NEXT, pd.concat([_next(rates, name) for name in UPDATES]))
    return 0


ASKED = (
    "strategy=ddp,zero1,zero2,zero3,fsdp2", "model=gpt2_124m,gpt2_1_5b", "sequence=1024", "micro_batch=8",
    "precision=bf16", "world_size=1", "data=synthetic", "device=cuda",
)  # fmt: skip


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
    return pd.DataFrame(found).merge(parts_of(configs, schedules(configs)))


def _name(config: CellConfig) -> str:
    return f"{config.strategy.name} {config.model_name} b={config.micro_batch}"


def schedules(configs: Sequence[CellConfig]) -> list[StepSchedule]:
    cells = [reduced(config) for config in configs]
    executed = iter(execute_all([config for cell in cells for config in cell.configs], CUDA, operators=True))
    return [schedule_of(cell, [next(executed) for _ in cell.configs]) for cell in cells]


def parts_of(configs: Sequence[CellConfig], steps: Sequence[StepSchedule]) -> pd.DataFrame:
    """Returns the parts of simulated steps, a row per cell and phase. `memory_s`, `launches`: of kernels that compute
    little, the seconds at the memory's peak; `products_s`, `unaligned_s`: of matrix products by the device's table, the
    second if a side is unaligned. `operators`, `orders`: of the host.
    """
    work = zip(configs, map(_work, steps), strict=True)
    return pd.DataFrame({"cell": _name(config), "phase": phase, **parts}
                        for config, found in work for phase, parts in found.items())  # fmt: skip


def _work(schedule: StepSchedule) -> dict[str, dict[str, float]]:
    """Returns phase -> parts: each is how much longer the phase is with twice the part's rate. The host's are the
    step's, in its last phase.
    """
    costs = costs_of(CLUSTERS[0], None)

    def laid(**rates: float) -> Any:
        return step_time(schedule, costs.alone(PLAIN | {"attention": ATTENTION} | rates))

    second = 1 / US  # as long as no device takes, so that the step is the number of operators
    changes = {"memory_efficiency": 0.5}, {"launch_us": second}, {"products": 2.0}, {"unaligned": 2.0}
    plain, changed, found = laid(), [laid(**one) for one in changes], {}
    for phase in PHASES:
        seconds = plain.phases[phase].total_s
        parts = {name: one.phases[phase].total_s - seconds for name, one in zip(GPU_PARTS, changed, strict=True)}
        rest = seconds - sum(size for name, size in parts.items() if name != "launches")
        found[phase] = parts | {"rest_s": rest} | dict.fromkeys(HOST_PARTS, 0.0)
    operators, orders = (round(laid(**{name: second}).step_s) for name in RATES[4:6])
    found[phase] |= {"operators": operators, "orders": orders, "steps": 1.0}
    return found


# -- the fit ---------------------------------------------------------------------------------------


def fitted(parts: pd.DataFrame) -> Rates:
    """Returns the rates that measured steps give."""
    bound, free = parts[parts["unsteady"] < STEADY], parts[parts["unsteady"] >= STEADY]
    shares = bound[[*GPU_PARTS, "rest_s"]].div(bound["measured_s"], axis=0)
    columns = shares[GPU_PARTS].to_numpy()
    columns[:, 1] *= US
    columns[:, 2] += columns[:, 3]  # so that the last is how much slower than the others unaligned products are
    least = np.array([1.0, 0.0, 1.0, 0.0])
    memory, launch, products, slower = least + nnls(columns, 1 - shares["rest_s"].to_numpy() - columns @ least)[0]
    counts = free.groupby("cell")[HOST_PARTS].sum().to_numpy()
    seconds = free.groupby("cell")["step_s"].first().to_numpy()

    def loss(rates: np.ndarray[Any, Any]) -> float:
        return float(np.abs(np.log(counts @ np.abs(rates) * US / seconds)).mean())

    host = np.abs(minimize(loss, [40.0, 100.0, 5000.0], method="Nelder-Mead", options={"maxiter": 10**4}).x)
    values = (1 / memory, launch, products, products + slower, *host)
    return {name: float(f"{value:.4g}") for name, value in zip(RATES, values, strict=True)} | {"attention": ATTENTION}


def predicted(parts: pd.DataFrame, rates: Rates) -> pd.DataFrame:
    """Returns a row per cell, in seconds: the step, the slower of device and host, with its interval."""
    slower = [1 / rates["memory_efficiency"], rates["launch_us"] * US, rates["products"], rates["unaligned"], 1.0]
    parts = parts.assign(device=parts[[*GPU_PARTS, "rest_s"]].to_numpy() @ np.array(slower), host=_host_s(parts, rates))
    return _with_step(parts.groupby("cell", sort=False)[["device", "host"]].sum(), CLUSTERS[0])


def _next(rates: Rates, update: str) -> pd.DataFrame:
    """Returns the steps of the present code with an update, by cluster and limit of launches; peers have their own."""
    configs = [cell.config for cell in compose_cells(["-m", *ASKED, *UPDATES[update]])]
    configs = [config for config in configs if config.strategy.name != PEER or not UPDATES[update]]
    steps, cells = schedules(configs), [_name(config) for config in configs]
    parts = parts_of(configs, steps)
    host = _host_s(parts, rates).groupby(parts["cell"], sort=False).sum()[cells]
    found = []
    for cluster, (torch, most) in product(CLUSTERS, MOST_BLOCKS.items()):
        costs = costs_of(cluster, None).alone(rates)
        costs.most_blocks = most
        phases = [step_time(step, costs).phases for step in steps]
        rows = pd.DataFrame({"cluster": cluster, "torch": torch, "updated_by": update, "cell": cells})
        rows.loc[[config.strategy.name == PEER for config in configs], "updated_by"] = PEERS
        rows["update"] = np.array([by_phase["update"].total_s for by_phase in phases])
        rows["device"] = np.array([sum(one.total_s for one in by_phase.values()) for by_phase in phases])
        found.append(_with_step(rows.assign(host=host.to_numpy()), cluster))
    return pd.concat(found)


def _host_s(parts: pd.DataFrame, rates: Rates) -> pd.Series:
    seconds = parts[HOST_PARTS].to_numpy() @ np.array([rates[name] for name in RATES[4:]]) * US
    return pd.Series(seconds, parts.index)


def _with_step(rows: pd.DataFrame, cluster: str) -> pd.DataFrame:
    costs, step = costs_of(cluster, None), rows[["device", "host"]].max(axis=1)
    wide = interval(costs, f"{costs.device.type}, one GPU")
    return rows.assign(predicted=step, low=step * wide.low, high=step * wide.high)


@cache
def refitted(folder: Path, alike: Callable[[str, str], bool] = str.__eq__) -> pd.DataFrame:
    """Returns the ten steps as predicted, with `measured`, and with `left_out`: predicted by rates that were fitted
    without all cells that are `alike`. The table is shared: not to be changed.
    """
    parts, rates = pd.read_csv(folder / PARTS), hardware.validated()["one_gpu"]
    found = predicted(parts, rates).assign(measured=parts.groupby("cell")["step_s"].first())
    found = found[found.index.str.contains("gpt2.*b=8$")]  # those that were predicted before the suite ran
    for cell in found.index:
        others = fitted(parts[[not alike(cell, other) for other in parts["cell"]]])
        found.loc[cell, "left_out"] = predicted(parts, others).loc[cell, "predicted"]
    return found.reset_index()
