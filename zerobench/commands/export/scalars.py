"""Scalars of a run: what changes from step to step, by tag, and what a run comes to. For programs that draw curves.

tag        PASS/loss (the mean over the ranks), PASS/grad_norm, PASS/loss_scale, PASS/step_s and its phases (the slowest
           rank); of the accounted pass's last step memory/rankR/CATEGORY_bytes
step       number of the step, warm-up included; of memory the number of the event within the step
time       seconds since the epoch: the run's start, and the step's own seconds from there; the time between steps, and
           passes one after the other, are left out
summary    the columns of the run that are numbers, and have a value
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pandas as pd

from ...config.flat import by_key
from ...records import CATEGORIES
from ...results.tables import Results

MEANS, SLOWEST = ("loss",), ("step_s", "forward_s", "backward_s", "update_s")
EQUAL = ("grad_norm", "loss_scale")
"""Columns that are equal on all ranks."""

NOT_MEASURED = ("repeat", "schema_version", "seed")
"""Numbers of a run's row that are no result of it."""


@dataclass(frozen=True)
class Scalar:
    """One value of a curve."""

    tag: str
    step: int
    time: float
    value: float


def scalars_of(results: Results, run: dict[str, Any]) -> Iterator[Scalar]:
    """Yields the curves of a run, a row of `results.runs`, in the order of their steps."""
    began = datetime.fromisoformat(run["started"]).timestamp()
    steps = results.steps[results.steps["run_id"] == run["run_id"]].rename(columns={"seconds": "step_s"})
    for mode, of_pass in steps.groupby("mode", sort=False):
        ranks = of_pass.groupby("step")
        columns = {name: ranks[name].mean() for name in MEANS} | {name: ranks[name].max() for name in SLOWEST}
        curves = pd.DataFrame(columns | {name: ranks[name].first() for name in EQUAL})
        times = began + curves["step_s"].fillna(0.0).cumsum()
        for number, time, row in zip(curves.index, times, curves.to_dict("records"), strict=True):
            for name, value in row.items():
                if math.isfinite(value):
                    yield Scalar(f"{mode}/{name}", int(number), float(time), float(value))
    timeline = results.timeline[results.timeline["run_id"] == run["run_id"]]
    for instant in timeline.to_dict("records"):
        for name in (f"{category}_bytes" for category in CATEGORIES):
            tag = f"memory/rank{instant['rank']}/{name}"
            yield Scalar(tag, int(instant["instant"]), began + float(instant["seconds"]), float(instant[name]))


def summary_of(run: dict[str, Any]) -> dict[str, int | float]:
    """Returns what a run comes to: the numbers of its row that are there."""
    numbers = {name: value for name, value in run.items() if isinstance(value, int | float) and not pd.isna(value)}
    return {name: value for name, value in numbers.items() if not isinstance(value, bool) and name not in NOT_MEASURED}


def choices_of(run: dict[str, Any]) -> dict[str, Any]:
    """Returns a run's config as one level of keys, as on a command line."""
    return by_key(json.loads(run["config"]))


def rows_of(results: Results) -> list[dict[str, Any]]:
    """Returns the rows of the runs that have finished, with None for what is missing."""
    runs = results.runs[results.runs["status"] == "ok"]
    return [
        {str(key): value for key, value in row.items()}
        for row in runs.astype("object").where(runs.notna(), None).to_dict("records")
    ]


def said(results: Results, written: int, what: str) -> str:
    """Returns a sentence on what was written, and on runs that were left out. Raises ValueError where none is ok."""
    left = len(results.runs) - written
    if not written:
        raise ValueError(f"{len(results.runs)} runs, and none of them is ok: there is nothing to write")
    return what + (f"; {left} of {len(results.runs)} runs are not ok, and left out" if left else "")
