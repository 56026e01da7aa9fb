"""Summarizes the launches of a cell in one row: for bytes the maximum, for times a mean over the launches.

One launch: medians over its steps, with the interval that it recorded. Several: the geometric mean of their medians,
with a 95 % t-interval of the logarithms over launches, since steps of one process share effects that differ between
processes. Times of cells that ran on a machine kept busy by other processes are shown, but none is marked as best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import scipy

from ..config.cell import CellConfig
from .options import dollars_per_million
from .selection import latest

TIMES = ("step_s", "forward_s", "backward_s", "update_s")

SAVES = ("save_s", "save_done_s", "save_step_s")

MEANS = ("mfu", "hfu", "energy_j", "tokens_per_j", *SAVES, "traced_step_s", "communication_s", "exposed_s")
"""Columns that may be 0 or missing, and shares: arithmetic means over the launches."""

TRAINING = ("training", "training_words", "loss_deviation", "grad_norm_deviation")
"""Columns of the verdict on the training: taken from a launch that trained differently from DDP, if there is one."""

LEAST_LAUNCHES = 3
"""Two launches have an interval too, but a useless one: its t is 12.7."""

SETTING = ("model", "shape", "world_size", "batch", "sequence", "device", "precision", "optimizer", "data", "seed")
"""Cells that agree in these columns train the same thing and are compared."""

NOT_SHAPE = ("name", "kind", "checkpointing", "tiles", "loss_chunks", "mlp_chunks", "separate_experts")
"""A model's options that change the cost of a step but not its result."""


def summarize(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per cell, from its newest launches: the columns of `runs`, `launches`, the interval of tokens/s,
    and `shape`, the model's options as text without those that do not affect the training. A failed launch fails the
    cell.
    """
    launches: dict[str, list[dict[str, Any]]] = {}
    for row in latest(runs).to_dict("records"):
        launches.setdefault(row["cell_id"], []).append({str(key): value for key, value in row.items()})
    rows = [_summarize_cell(cell) for cell in launches.values()]
    frame = pd.DataFrame(rows, columns=[*runs.columns, "launches", "shape", "tokens_per_s_low", "tokens_per_s_high"])
    return frame.astype({**runs.dtypes.to_dict(), "launches": "Int64"})


def _summarize_cell(launches: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarizes the rows of launches; for thousands of cells, building a frame for each would take half a minute."""
    failed = [row for row in launches if row["status"] != "ok"]
    accounted = [row for row in launches if not pd.isna(row["peak_bytes"])]
    row = dict((failed or accounted or launches)[-1])
    written = CellConfig.from_json(row["config"]).as_dict()
    options = written["model"] | written.get("huggingface", {})
    row["launches"] = len(launches)
    # "layers=5 hidden=128 ...", which is equal for cells with equal models
    row["shape"] = " ".join(f"{k}={v}" for k, v in options.items() if k not in NOT_SHAPE)
    if not failed:
        agree = _known(launches, "passes_agree")
        row["passes_agree"] = all(agree) if agree else None
    if not failed and len(launches) > 1:
        row["seconds"] = float(np.sum(_known(launches, "seconds")))
        wrong = [launch for launch in launches if launch["training"] == "differs"]
        row |= {name: (wrong or launches)[-1][name] for name in TRAINING}
        fullest = max(launches, key=lambda launch: 0 if pd.isna(launch["peak_bytes"]) else launch["peak_bytes"])
        for name in (name for name in launches[0] if name.endswith("_bytes")):
            row[name] = fullest[name] if name.startswith("peak_") else max(_known(launches, name), default=None)
        row["others_cores"] = max(_known(launches, "others_cores"), default=None)
        row |= {name: _mean(np.log(_known(launches, name)), np.exp) for name in (*TIMES, "tokens_per_s")}
        row |= {name: _mean(np.array(_known(launches, name))) for name in MEANS}
        row["overlap"] = 1 - row["exposed_s"] / row["communication_s"] if row["communication_s"] else np.nan
        times = [launch["step_s"] for launch in launches]
        interval = (np.nan, np.nan) if len(launches) < LEAST_LAUNCHES else geometric_interval(times)
        row["step_s_low"], row["step_s_high"] = interval
    row["tokens_per_s_low"] = row["tokens_per_s_high"] = np.nan
    low, high = row["step_s_low"], row["step_s_high"]
    if row["status"] == "ok" and not pd.isna(low) and low > 0:
        tokens = row["tokens_per_s"] * row["step_s"]
        row["tokens_per_s_low"], row["tokens_per_s_high"] = tokens / high, tokens / low
    return row


def _known(launches: list[dict[str, Any]], name: str) -> list[Any]:
    """Returns the values of a column that are not missing."""
    return [row[name] for row in launches if not pd.isna(row[name])]


def _mean(values: Any, then: Any = float) -> float:
    return float(then(np.mean(values))) if len(values) else float("nan")


def geometric_interval(values: list[float]) -> tuple[float, float]:
    """Returns the 95 % t-interval of the geometric mean of at least two positive values."""
    logs = np.log(values)
    reach = float(scipy.stats.sem(logs) * scipy.stats.t.ppf((1 + 0.95) / 2, len(logs) - 1))
    return float(np.exp(logs.mean() - reach)), float(np.exp(logs.mean() + reach))


def price_columns(runs: Any, price: float) -> dict[str, Any]:
    """Returns the columns PRICED of a frame of runs, or of one row: the price of a million tokens in dollars, with the
    interval that the step's time has. `price`: of a GPU hour, or of an hour of a rank without one.
    """
    ends = (runs[f"step_s_{end}"] / runs["step_s"] for end in ("low", "high"))
    return dollars_per_million(price, runs["tokens_per_s"] / runs["world_size"], *ends)


SLACK = 0.5
"""Cores that a quiet machine's own services may use, and the error of the readings."""


def is_busy(row: Mapping[str, Any]) -> bool:
    """Returns True if other processes used cores that the ranks needed."""
    others = row.get("others_cores")
    if others is None or pd.isna(others):
        return False
    left = row["cores"] - row["world_size"] * row["threads"]
    return bool(others > max(0, left) + SLACK)


def busy_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a note on the cells that ran on a busy machine; empty if there are none."""
    busy = [row for row in rows if is_busy(row)]
    if not busy:
        return ""
    worst = max(busy, key=lambda row: row["others_cores"])
    took = f"other processes took up to {worst['others_cores']:.1f} of its {worst['cores']} cores"
    which = "all cells ran" if len(busy) == len(rows) else f"{len(busy)} of {len(rows)} cells ran"
    return f"the machine was busy while {which}: {took}; no time is marked as the best, measure again when it is quiet"
