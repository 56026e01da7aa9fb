"""Measured figures in tidy form: a row per figure, with the columns run_id, rank, metric, value and unit.

    of a run     rank is missing; metric is a column of the table of runs, and value is its value
    of a rank    rank is a number; metric is the run's column that is derived from the ranks' figures: for bytes and
                 volumes their maximum, for times the median over the steps of the slowest rank in each

A figure that was not measured has no row, so a failed run has none at all. Values are float64, in which bytes are exact
up to 2**53.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import fields

import pandas as pd

from ..records import CATEGORIES, COLLECTIVES, LINKS
from ..records.describe import columns_of
from ..records.run_row import RunSetting
from .frames import Units

COLUMNS = ("run_id", "rank", "metric", "value", "unit")

_CHOSEN = {field.name for field in fields(RunSetting)}

FIGURES = {
    column.name: column.unit
    for column in columns_of("runs")
    if column.unit and column.name not in _CHOSEN | {"schema_version"}
}
"""Metric -> unit: the measured or predicted numbers in the table of runs, in its order."""

OF_MEMORY: dict[tuple[str, str, str], str] = {
    ("device", "total", "max_bytes"): "peak_bytes",
    ("device", "states", "max_bytes"): "states_bytes",
    **{("device", name, "at_peak_bytes"): f"peak_{name}_bytes" for name in CATEGORIES},
    **{("device", name, "max_bytes"): f"max_{name}_bytes" for name in CATEGORIES},
    ("device", "allocated", "max_bytes"): "allocator_peak_bytes",
    ("device", "outside_ledger", "max_bytes"): "outside_ledger_bytes",
    ("host", "total", "max_bytes"): "host_peak_bytes",
    ("host", "states", "max_bytes"): "host_states_bytes",
    ("nvme", "total", "max_bytes"): "nvme_bytes",
}
"""Tier, category and column of a memory row of a whole step -> the corresponding metric."""

OF_STEPS = {"seconds": "step_s", "forward_s": "forward_s", "backward_s": "backward_s", "update_s": "update_s"}
"""Column of steps -> the metric that is its median over the measured steps of the timed pass."""

RANKS = (
    *OF_MEMORY.values(), *OF_STEPS.values(), "payload_bytes", "volume_psi", *(f"volume_{n}_psi" for n in COLLECTIVES),
)  # fmt: skip
"""Metrics for which ranks have their own figures."""


def long_form(
    runs: pd.DataFrame, memory: pd.DataFrame, steps: pd.DataFrame, traffic: pd.DataFrame,
    metrics: Sequence[str] = (), beside: Sequence[str] = (),
) -> pd.DataFrame:  # fmt: skip
    """Returns the figures of all runs and ranks, or only `metrics`, with the columns `beside` of `runs`.

    `runs`: `Results.sweep()`; the others: its tables of those names. Raises ValueError for a metric or a column that
    does not exist.
    """
    for kind, names, valid in (("metric", metrics, list(FIGURES)), ("column", beside, list(map(str, runs.columns)))):
        for name in names:
            if name not in valid:
                near = difflib.get_close_matches(name, valid, n=3, cutoff=0.5)
                hint = f"do you mean {' or '.join(near)}?" if near else "docs/reference/columns.md lists them"
                raise ValueError(f"long: {name!r} is not a {kind} of the runs; {hint}")
    wanted = list(dict.fromkeys(metrics)) or list(FIGURES)
    wide = (runs[["run_id", *wanted]].assign(rank=None), _of_steps(runs, steps), _of_traffic(runs, traffic))
    columns = ["at_peak_bytes", "max_bytes"]
    step = memory[memory["phase"] == "step"].astype(dict.fromkeys(columns, "float64"))
    figures = step.melt(["run_id", "rank", "tier", "category"], columns, var_name="column")
    keys = zip(figures["tier"], figures["category"], figures["column"], strict=True)
    ids = ["run_id", "rank"]
    parts = [
        frame.astype({name: "float64" for name in frame.columns if name not in ids}).melt(ids, var_name="metric")
        for frame in wide
    ]
    parts = [*parts, figures.assign(metric=[OF_MEMORY.get(key, "") for key in keys])]
    long = pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)
    long = long[long["metric"].isin(wanted)].dropna(subset=["value"])
    long["unit"] = long["metric"].map(FIGURES)
    long["metric"] = long["metric"].astype(pd.CategoricalDtype([n for n in FIGURES if n in wanted], ordered=True))
    long = long.astype({"rank": "Int64", "value": "float64"})[list(COLUMNS)]
    order = {run_id: number for number, run_id in enumerate(runs["run_id"])}
    ordered = long.assign(order=long["run_id"].map(order)).sort_values(["order", "metric", "rank"], na_position="first")
    long = long.loc[ordered.index].reset_index(drop=True)
    long = runs[["run_id", *beside]].merge(long, on="run_id", how="right") if beside else long
    long.attrs = {"units": Units({name: unit for name, unit in runs.attrs["units"].items() if name in beside})}
    return long


def _of_steps(runs: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    steps = steps[(steps["mode"] == "timed") & ~steps["warmup"].fillna(True)]
    timed = set(runs.loc[runs["step_s"].notna(), "run_id"])  # simulated worlds have no times
    medians = steps[steps["run_id"].isin(timed)].groupby(["run_id", "rank"])[list(OF_STEPS)].median()
    return medians.rename(columns=OF_STEPS).reset_index()


def _of_traffic(runs: pd.DataFrame, traffic: pd.DataFrame) -> pd.DataFrame:
    """Sums per step: those of all measured steps divided by their number, as in the run's own figures."""
    runs = runs.set_index("run_id")
    traffic = traffic[~traffic["kind"].isin(LINKS) & ~traffic["control"].fillna(True)]
    steps = traffic["run_id"].map({name: json.loads(text)["measure"]["steps"] for name, text in runs["config"].items()})
    psi = traffic["run_id"].map(runs["psi"].astype("float64"))
    moved = traffic[["run_id", "rank"]].assign(
        payload_bytes=traffic["payload_bytes"] / steps, volume_psi=traffic["volume_elements"] / psi / steps
    )
    for name in COLLECTIVES:
        moved[f"volume_{name}_psi"] = moved["volume_psi"].where(traffic["kind"] == name, 0.0)
    return moved.groupby(["run_id", "rank"]).sum().reset_index()
