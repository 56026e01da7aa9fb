"""Summarizes the launches of a cell in one row: bytes at their largest, times over the launches.

One launch: medians over its steps, with the interval that it recorded. Several: the geometric mean of their medians,
with a 95 % t-interval of the logarithms over launches, since steps of one process have common effects that two
processes do not have.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import scipy

from ..config.cell import CellConfig
from .tables import latest

TIMES = ("step_s", "forward_s", "backward_s", "update_s")

MEANS = ("mfu", "hfu", "traced_step_s", "communication_s", "exposed_s")
"""Columns that may be 0 or missing, and the shares: arithmetic means over the launches."""

TRAINING = ("training", "training_words", "loss_deviation", "grad_norm_deviation")
"""Columns of the verdict on the training: of a launch that trained differently from DDP, where there is one."""

LEAST_LAUNCHES = 3
"""Two launches have an interval too, but a useless one: its t is 12.7."""

SETTING = ("model", "shape", "world_size", "batch", "sequence", "device", "precision", "optimizer", "data", "seed")
"""Columns of a comparison: cells that agree in these train the same thing and are compared."""

NOT_SHAPE = ("name", "kind", "checkpointing", "tiles")
"""A model's options that change the cost of a step and not its result."""


def summarize(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per cell, of its newest launches: the columns of `runs`, `launches`, the interval of tokens/s, and
    `shape`, the model's options in words, without those that train the same thing. A failed launch fails the cell.
    """
    kept = latest(runs)
    rows = [_summarize_cell(mine) for _, mine in kept.groupby("cell_id", sort=False)]
    frame = pd.DataFrame(rows, columns=[*runs.columns, "launches", "shape", "tokens_per_s_low", "tokens_per_s_high"])
    return frame.astype({**runs.dtypes.to_dict(), "launches": "Int64"})


def _summarize_cell(launches: pd.DataFrame) -> dict[str, Any]:
    failed = launches[launches["status"] != "ok"]
    row: dict[str, Any] = {str(k): v for k, v in (failed if len(failed) else launches).iloc[-1].items()}
    row["launches"], row["shape"] = len(launches), _shape(CellConfig.from_json(row["config"]))
    if not len(failed):
        _merge_launches(row, launches)
    row["tokens_per_s_low"], row["tokens_per_s_high"] = _rates(row)
    return row


def _shape(config: CellConfig) -> str:
    """Formats "layers=5 hidden=128 ...", equal for cells whose models are."""
    options = config.section("model") | config.section("huggingface")
    return " ".join(f"{k}={v}" for k, v in options.items() if k not in NOT_SHAPE)


def _merge_launches(row: dict[str, Any], launches: pd.DataFrame) -> None:
    row["seconds"] = float(launches["seconds"].sum())
    agree = launches["passes_agree"].dropna()
    row["passes_agree"] = bool(agree.all()) if len(agree) else None
    if len(launches) == 1:
        return
    wrong = launches[launches["training"] == "differs"]
    row |= {name: (wrong if len(wrong) else launches).iloc[-1][name] for name in TRAINING}
    fullest = launches.iloc[int(launches["peak_bytes"].astype("float64").fillna(0).argmax())]
    bytes_columns = [str(c) for c in launches if str(c).endswith("_bytes")]
    row |= {c: fullest[c] if c.startswith("peak_") else launches[c].max() for c in bytes_columns}
    row["others_cores"] = launches["others_cores"].max()
    row |= {name: float(np.exp(np.log(launches[name].astype("float64")).mean())) for name in TIMES}
    row |= {name: launches[name].astype("float64").mean() for name in MEANS}
    row["overlap"] = 1 - row["exposed_s"] / row["communication_s"] if row["communication_s"] else np.nan
    few = len(launches) < LEAST_LAUNCHES
    row["step_s_low"], row["step_s_high"] = (np.nan, np.nan) if few else geometric_interval(list(launches["step_s"]))
    row["tokens_per_s"] = float(np.exp(np.log(launches["tokens_per_s"].astype("float64")).mean()))


def geometric_interval(values: list[float], confidence: float = 0.95) -> tuple[float, float]:
    """Returns the t-interval of the geometric mean of at least two positive values."""
    logs = np.log(values)
    reach = float(scipy.stats.sem(logs) * scipy.stats.t.ppf((1 + confidence) / 2, len(logs) - 1))
    return float(np.exp(logs.mean() - reach)), float(np.exp(logs.mean() + reach))


def _rates(row: dict[str, Any]) -> tuple[float, float]:
    """Returns the interval of tokens/s, as wide as that of the step; NaN where there is none."""
    low, high = row["step_s_low"], row["step_s_high"]
    if row["status"] != "ok" or pd.isna(low) or low <= 0:
        return float("nan"), float("nan")
    tokens = row["tokens_per_s"] * row["step_s"]
    return tokens / high, tokens / low
