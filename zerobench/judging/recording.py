"""Recording: measured values become limits, and each limit that changes is explained.

baseline   the launches of a cell, all by the same code, from which its limits are taken
noisy      an exact metric in which the launches of a baseline differ: no limit would hold
change     a limit before and now, with the category and the line of code that changed it
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from ..config.cell import WATCHED, CellConfig
from ..host.terminal import print_on, stdout_console
from ..results.grid import Grid
from ..results.provenance import commit_of
from ..results.summary import LEAST_LAUNCHES
from . import judge
from .budget_file import BudgetFile, CellBudget, Environment
from .lines import lines_behind

HEADER = ["cell", "metric", "before", "now", "difference", "moved most", "line"]


@dataclass(frozen=True)
class LimitChange:
    """One limit, or a new cell, whose `metric` is empty."""

    cell: str
    metric: str
    before: float | None
    """None for a new metric."""
    now: float
    part: str = ""
    line: str = ""
    is_tolerated: bool = False
    """If true, the old limit allows the value."""

    @property
    def row(self) -> list[str]:
        """The change as a table row, under HEADER."""
        if not self.metric:
            return [self.cell, f"{self.now:.0f} limits", "–", "–", "new", "", ""]
        now = judge.show_value(self.metric, self.now)
        if self.before is None:
            return [self.cell, self.metric, "–", now, "new", "", ""]
        by = self.now - self.before
        signed = f"{'+' if by > 0 else '−'}{judge.show_value(self.metric, abs(by))}"
        part = self.part or ("within its tolerance" if self.is_tolerated else "")
        return [self.cell, self.metric, judge.show_value(self.metric, self.before), now, signed, part, self.line]


def changes_of(row: dict[str, Any], before: CellBudget, after: CellBudget) -> list[LimitChange]:
    """Returns the recorded limits of a cell whose values differ; a new cell is one change."""
    name = row["name"]
    if not before.limits:
        return [LimitChange(name, "", None, len(after.limits))]
    changes = []
    for metric, limit in after.limits.items():
        was = before.limits.get(metric)
        if was is None:
            changes.append(LimitChange(name, metric, None, limit.value))
        elif was.value != limit.value:
            by = limit.value - was.value
            lines = lines_behind(metric, by, before.lines, after.lines, most=1)
            part = judge.part_name(judge.most_moved(metric, before.limits, row) or metric)
            category = part or (lines[0].category if lines else "")
            line, is_tolerated = lines[0].sentence if lines else "", was.judge(metric, limit.value) == judge.OK
            changes.append(LimitChange(name, metric, was.value, limit.value, category, line, is_tolerated))
    return changes


def print_changes(changes: list[LimitChange]) -> None:
    """Prints the changes as a table per cell; nothing if there are none."""
    console = stdout_console()
    for cell in dict.fromkeys(change.cell for change in changes):
        of_cell = [change for change in changes if change.cell == cell]
        rows = [change.row[1:] for change in of_cell]
        if not all(change.metric for change in of_cell):
            print_on(console, f"{cell}: new, {rows[0][0]}")
        else:
            print_on(console, cell, "bold")
            console.print(Grid(HEADER[1:], rows, left=("metric", "line")))


PROCESSORS = "; "
"""Separates processors if a file has values from several; kernels' scratch memory is then judged on none of them."""


@dataclass(frozen=True)
class Wanted:
    """What to record for a cell: `metrics`, or the useful ones, and `step_s` if `time`. `tolerances`: fractions."""

    metrics: tuple[str, ...] = ()
    time: bool = False
    tolerances: tuple[tuple[str, float], ...] = ()

    def of(self, row: dict[str, Any]) -> list[str]:
        """Returns the metrics of one cell."""
        own = self.metrics or judge.recorded(CellConfig.from_json(row["config"]))
        return [*own, "step_s"] if self.time and "step_s" not in own else [*own]


def record_cell(
    file: BudgetFile, row: dict[str, Any], wanted: Wanted, taken: set[str]
) -> tuple[list[LimitChange], list[str]]:
    """Replaces a cell's recorded values. Manual ceilings and tolerances stay, as do those of the same work under a name
    that is not `taken` by a row of this recording. Returns the changed limits, and messages on metrics that are too
    noisy.
    """
    if row["status"] != "ok":
        raise judge.UnjudgedError(f"{row['name']}: {row['status']}: {row['reason']}; nothing was recorded")
    environment = file.environments.setdefault(row["environment"], Environment())
    cells = environment.cells.items() if row["work"] else ()
    same_work = [name for name, cell in cells if cell.work == row["work"] and name != row["name"]]
    twins = [environment.cells.pop(name) for name in same_work if name not in taken]
    environment.about |= {
        "recorded": datetime.now(UTC).date().isoformat(),
        "commit": row["commit"] if row["data"] == WATCHED else commit_of(Path.cwd()),  # of the user's code
        "zerobench": row["source_hash"],
        "torch": row["torch_version"],
        "cores": int(row["cores"]),
        "command": [*file.command],
    }
    before = environment.cells.get(row["name"], twins[0] if twins else CellBudget(None, {}))
    limits = _limits(before.limits, row, wanted)
    if not limits:
        raise judge.UnjudgedError(
            f"{row['name']}: it measured none of {', '.join(wanted.of(row))}; nothing was recorded"
        )
    after = CellBudget(row["work"], limits, row.get("lines") or {})
    environment.cells[row["name"]] = after

    # Kernels' scratch memory depends on the processor: earlier processors stay named while one of their values remains.
    processors, named = {row["processor"]}, str(environment.about.get("processor") or "")
    if named and any(
        metric in judge.OF_KERNELS and not limit.bound and (name not in taken or metric not in wanted.of(row))
        for name, cell in environment.cells.items()
        for metric, limit in cell.limits.items()
    ):
        processors |= set(named.split(PROCESSORS))
    environment.about["processor"] = PROCESSORS.join(sorted(processors))
    return changes_of(row, before, after), _noisy(row, limits)


def _limits(before: dict[str, judge.Limit], row: dict[str, Any], wanted: Wanted) -> dict[str, judge.Limit]:
    metrics, tolerances = wanted.of(row), dict(wanted.tolerances)
    limits = {metric: limit for metric, limit in before.items() if limit.bound or metric not in metrics}
    for metric in metrics:
        value = row.get(metric)
        if value is None or pd.isna(value) or metric in limits:
            continue
        tolerance = before[metric].tolerance if metric in before else judge.DEFAULT_TOLERANCE.get(metric, 0.0)
        tolerance = tolerances.get(metric, tolerance)
        if metric == "step_s":
            _guard_time(row, tolerance)
        limits[metric] = judge.Limit(float(value), "", tolerance)
    return {metric: limits[metric] for metric in judge.METRICS if metric in limits}


def _noisy(row: dict[str, Any], limits: dict[str, judge.Limit]) -> list[str]:
    """Returns a message per limit that a launch of its own baseline does not meet; times are checked separately."""
    messages = []
    for metric, limit in limits.items():
        values = row.get("launched", {}).get(metric, [])
        if limit.bound or metric in ("step_s", "tokens_per_s") or all(limit.judge(metric, v) == "ok" for v in values):
            continue
        most = max(abs(value - limit.value) for value in values)
        percent = f"{100 * most / limit.value + 0.05:.1f}" if limit.value else "PERCENT"
        shown = ", ".join(judge.show_value(metric, value) for value in sorted(set(values)))
        messages.append(
            f"{row['name']}: {metric} differs between {len(values)} launches of the same code: {shown}; nothing was"
            " recorded: find out why, choose one launch (--where run_id=...), or allow it:"
            f" --tolerance {metric}={percent}"
        )
    return messages


def _guard_time(row: dict[str, Any], tolerance: float) -> None:
    """Raises UnjudgedError if the machine cannot repeat a time within the tolerance: such a time cannot be a budget."""
    low, high, middle = row["step_s_low"], row["step_s_high"], row["step_s"]
    if row["launches"] < LEAST_LAUNCHES or pd.isna(low):
        raise judge.UnjudgedError(
            f"{row['name']}: step_s needs measure.repeats=3 or more, it has {row['launches']} launches"
        )
    if high - middle > tolerance * middle or middle - low > tolerance * middle:
        raise judge.UnjudgedError(
            f"{row['name']}: step_s varies between {judge.show_value('step_s', low)} and"
            f" {judge.show_value('step_s', high)}, wider than its tolerance of {tolerance:.0%}"
        )
