"""Curves of runs in the files of Weights & Biases, which are written without its package.

tag        PASS/loss (the mean over the ranks), PASS/grad_norm, PASS/loss_scale, PASS/step_s and its phases (the slowest
           rank)
step       number of the step, warm-up included
time       seconds since the epoch: the run's start plus the durations of the pass's steps; the time between steps is
           left out, and every pass begins at the run's start
summary    the numeric columns of the run that have a value

A run has a folder, and every file in it is written atomically:

wandb-history.jsonl    a JSON object per step: `_step`, `_timestamp`, `_runtime` (seconds), and the values by tag
wandb-summary.json     the numbers of the run's row
config.yaml            key: {value: ...}
wandb-metadata.json    start, command, commit
"""

from __future__ import annotations

import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from ...config.flat import by_key
from ...host.files import replace_text
from ...results.tables import Results

MEANS, SLOWEST = ("loss",), ("step_s", "forward_s", "backward_s", "update_s")
EQUAL = ("grad_norm", "loss_scale")
"""Columns that are equal on all ranks."""

NOT_MEASURED = ("repeat", "schema_version", "seed")
"""Numbers of a run's row that are not results."""


def summary_of(run: dict[str, Any]) -> dict[str, int | float]:
    """Returns the summary of a run: the numbers in its row that have a value."""
    numbers = {name: value for name, value in run.items() if isinstance(value, int | float) and not pd.isna(value)}
    return {name: value for name, value in numbers.items() if not isinstance(value, bool) and name not in NOT_MEASURED}


def rows_of(results: Results) -> list[dict[str, Any]]:
    """Returns the rows of the finished runs, with None for missing values."""
    runs = results.runs[results.runs["status"] == "ok"]
    return [
        {str(key): value for key, value in row.items()}
        for row in runs.astype("object").where(runs.notna(), None).to_dict("records")
    ]


def said(results: Results, written: int, what: str) -> str:
    """Returns a message on the written runs and on runs that were left out. Raises ValueError if none is ok."""
    left = len(results.runs) - written
    if not written:
        raise ValueError(f"{len(results.runs)} runs, none of them ok: nothing to write")
    return what + (f"; {left} of {len(results.runs)} runs are not ok, and left out" if left else "")


HISTORY, SUMMARY, CONFIG, METADATA = "wandb-history.jsonl", "wandb-summary.json", "config.yaml", "wandb-metadata.json"


def write_wandb(results: Results, out: Path) -> str:
    """Writes the ok runs below the folder `out`. Raises ValueError if there are none."""
    rows = rows_of(results)
    words = said(results, len(rows), f"{len(rows)} runs in {out}, each with {HISTORY}, {SUMMARY} and {CONFIG}")
    for run in rows:
        folder = out / run["run_id"]
        folder.mkdir(parents=True, exist_ok=True)
        lines = history_of(results, run)
        last = {key: lines[-1][key] for key in ("_step", "_timestamp", "_runtime")} if lines else {}
        choices = {key: {"desc": None, "value": value} for key, value in by_key(json.loads(run["config"])).items()}
        metadata = {"startedAt": run["started"], "args": run["command"], "git": {"commit": run["commit"]}}
        texts = {
            HISTORY: "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines),
            SUMMARY: json.dumps(summary_of(run) | last, indent=1, allow_nan=False),
            CONFIG: yaml.safe_dump({"wandb_version": 1, **choices}, sort_keys=False),
            METADATA: json.dumps(metadata, indent=1),
        }
        for name, text in texts.items():
            replace_text(folder / name, text)
    return words


def history_of(results: Results, run: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a line per step of a run (a row of `results.runs`), timed by its last value."""
    began = datetime.fromisoformat(run["started"]).timestamp()
    steps = results.steps[results.steps["run_id"] == run["run_id"]].rename(columns={"seconds": "step_s"})
    lines: dict[int, dict[str, Any]] = {}
    first = math.inf
    for mode, of_pass in steps.groupby("mode", sort=False):
        ranks = of_pass.groupby("step")
        columns = {name: ranks[name].mean() for name in MEANS} | {name: ranks[name].max() for name in SLOWEST}
        curves = pd.DataFrame(columns | {name: ranks[name].first() for name in EQUAL})
        times = began + curves["step_s"].fillna(0.0).cumsum()
        for number, time, row in zip(curves.index, map(float, times), curves.to_dict("records"), strict=True):
            if values := {f"{mode}/{name}": float(value) for name, value in row.items() if math.isfinite(value)}:
                line = lines.setdefault(int(number), {"_step": int(number), "_timestamp": time})
                line |= values | {"_timestamp": max(time, line["_timestamp"])}
                first = min(first, time)
    return [lines[number] | {"_runtime": lines[number]["_timestamp"] - first} for number in sorted(lines)]
