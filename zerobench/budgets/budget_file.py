"""Budget files: yaml, committed, written by `zerobench budget record` and by people::

command: [-m, "strategy=zero1,zero2", model=gpt_tiny]     # what makes the cells; budget check runs it
results_dir: runs/budget                                  # optional: where, below the folder of the check
environments:
  cpu, torch 2.13:                                        # device class and torch's minor version; or: any
    cells:
      zero2 gpt_tiny N=2 b=8:
        work: 0123456789ab                                # optional; without it the name is what counts
        limits: {peak_bytes: 12345678, states_bytes: <= 24 GiB, step_s: 0.2 ± 25 %}
        lines:                                            # optional; what lives at the peak, and what grows, by line
          peak:
          - [6553600, 10, activations, blocks.0–4, model.py:40 in Block.forward, '']
          growth: []
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Any

import pandas as pd
import yaml

from ..config.cell import WATCHED, CellConfig
from ..host.files import read_yaml, replace_text
from ..host.terminal import print_on, stdout_console
from ..results.grid import Grid
from ..results.provenance import ask_git, torch_minor
from ..results.summary import LEAST_LAUNCHES
from . import judge
from .judge import METRICS, Limit, parse_limit, show_limit
from .lines import Lines, lines_behind, parse_lines, plain

DEFAULT_FOLDER = Path("results/budgets")

SUFFIX = ".zerobench.yaml"
"""Suffix of a budget file that pytest recorded, next to the test's file."""

REMOVED = ("heap_bytes",)
"""Metrics of older files that are no longer measured: their limits are not checked."""

ANY = "any"
"""An environment whose limits apply everywhere."""


@dataclass
class CellBudget:
    """A cell's budget."""

    work: str | None
    """Identity of the measured work (resolve.work_id); None if only the name was given."""
    limits: dict[str, Limit]
    lines: Lines = field(default_factory=dict)
    """The recorded lines of code; empty in files that are manual or older than this field."""


@dataclass
class Environment:
    """The budgets of one environment. `about`: date, commit and machine of the measurement."""

    about: dict[str, Any] = field(default_factory=dict)
    cells: dict[str, CellBudget] = field(default_factory=dict)


@dataclass
class BudgetFile:
    """A budget file. `command`: the arguments that compose the cells; empty if they were recorded from runs.
    `results_dir`: the results folder of the runs, below the working directory; empty for the default.
    """

    path: Path
    command: list[str] = field(default_factory=list)
    environments: dict[str, Environment] = field(default_factory=dict)
    results_dir: str = ""

    @property
    def overrides(self) -> list[str]:
        """The arguments that compose the cells in their folder."""
        return [*self.command, *([f"results_dir={self.results_dir}"] if self.results_dir else [])]

    def of(self, environment: str) -> list[tuple[str, CellBudget]]:
        """Returns the cells with a budget in this environment, by name. Limits for any environment apply in addition,
        but do not replace this environment's if other environments have their own limits.
        """
        if environment not in self.environments and set(self.environments) != {ANY}:
            return []
        names = [name for name in (ANY, environment) if name in self.environments]
        return [cell for name in names for cell in self.environments[name].cells.items()]


def environment_of(device_class: str, torch_version: str) -> str:
    """Returns the class of machines that agree on bytes: "cpu, torch 2.13"."""
    return f"{device_class}, torch {torch_minor(torch_version)}"


def read_budget(path: Path) -> BudgetFile:
    """Reads and checks a budget file. Raises ValueError or OSError."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such budget file")
    content = read_yaml(path) or {}
    _check_keys(path, "the file", content, ("command", "results_dir", "environments"))
    command, folder = _command(path, content), content.get("results_dir") or ""
    if folder and not (isinstance(folder, str) and folder_below(folder)):
        raise ValueError(
            f"{path}: results_dir is {folder!r:.80}; it is a folder below the working directory, as runs/budget"
        )
    environments = content.get("environments") or {}
    _check_keys(path, "environments", environments, None)
    return BudgetFile(path, command, {str(k): _environment(path, str(k), v) for k, v in environments.items()}, folder)


def folder_below(folder: str) -> str:
    """Returns a folder that a budget file may name, because it is below the working directory; else empty."""
    parts = PurePosixPath(folder).parts
    is_below = re.fullmatch(r"[\w./+-]+", folder) and not folder.startswith("/") and ".." not in parts
    return folder if is_below and all(not part.startswith(".") for part in parts) else ""


def _command(path: Path, content: dict[str, Any]) -> list[str]:
    """Returns the command of the file, or of the `about` of an environment; empty if there is none."""
    command = content.get("command") or []
    if not isinstance(command, list):
        raise ValueError(f"{path}: command is {command!r:.80}; write a list, as in [-m, 'strategy=zero1,zero2']")
    command = [str(part) for part in command]
    try:
        check_command(command)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return command


def _environment(path: Path, name: str, content: Any) -> Environment:
    _check_keys(path, name, content, ("about", "cells"))
    cells = content.get("cells") or {}
    _check_keys(path, f"{name}: cells", cells, None)
    about = content.get("about") or {}
    _check_keys(path, f"{name}: about", about, None)
    about |= {"command": command} if (command := _command(path, about)) else {}
    return Environment(about, {str(k): _cell(path, str(k), v) for k, v in cells.items()})


def _cell(path: Path, name: str, content: Any) -> CellBudget:
    _check_keys(path, name, content, ("work", "limits", "lines"))
    limits = content.get("limits") or {}
    if isinstance(limits, dict):
        limits = {metric: text for metric, text in limits.items() if metric not in REMOVED}
    _check_keys(path, f"{name}: limits", limits, METRICS)
    if not limits:
        raise ValueError(f"{path}: {name} has no limits; give it one, as peak_bytes: <= 24 GiB, or remove it")
    try:
        parsed = {metric: parse_limit(metric, text) for metric, text in limits.items()}
        return CellBudget(content.get("work"), parsed, parse_lines(content.get("lines") or {}))
    except ValueError as error:
        raise ValueError(f"{path}: {name}: {error}") from error


def check_command(command: list[str]) -> None:
    """Raises ValueError for a part of a command that belongs on the command line of the check: a flag or a folder."""
    for part in command:
        is_flag = part.startswith("-") and part not in ("-m", "--multirun")
        if is_flag or part.startswith("results_dir="):
            raise ValueError(f"command has {part!r:.80}; a budget's command is -m and KEY=VALUE, without a folder")


def _check_keys(path: Path, where: str, content: Any, keys: tuple[str, ...] | None) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{path}: {where} is {content!r:.80}; it must be a mapping")
    for key in content:
        if keys is not None and key not in keys:
            near = get_close_matches(str(key), keys, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{path}: {where}: {key} is none of {', '.join(keys)}{hint}")


def write_budget(budget: BudgetFile) -> None:
    """Writes the file atomically."""
    content: dict[str, Any] = {"command": budget.command}
    if budget.results_dir:
        content["results_dir"] = budget.results_dir
    content["environments"] = {}
    for name, environment in budget.environments.items():
        cells: dict[str, Any] = {}
        for cell_name, cell in environment.cells.items():
            shown = cells[cell_name] = {"work": cell.work} if cell.work else {}
            shown["limits"] = {metric: show_limit(metric, limit) for metric, limit in cell.limits.items()}
            if cell.lines:
                shown["lines"] = {at: list(map(_Row, rows)) for at, rows in plain(cell.lines).items()}
        content["environments"][name] = {"about": environment.about, "cells": cells}
    budget.path.parent.mkdir(parents=True, exist_ok=True)
    tools = "`zerobench budget check` holds runs against it, `budget record` writes it again"
    if budget.path.name.endswith(SUFFIX):
        tools = "`pytest` holds tests against it, `pytest --zerobench-record` writes it again"
    head = f"# A budget: {tools}.\n"
    head += "# Limits: a value (exact), `value ± 2 %`, or `<= 24 GiB` by hand, which recording keeps.\n"
    text = yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
    replace_text(budget.path, head + text)


class _Row(list[Any]):
    """A list written on one line of the file, so that a changed one is one line of a diff."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(_Row, lambda dumper, row: dumper.represent_sequence("tag:yaml.org,2002:seq", row, True))


HEADER = ["cell", "metric", "before", "now", "difference", "moved most", "line"]


@dataclass(frozen=True)
class LimitChange:
    """One limit, or a new cell, whose `metric` is empty."""

    cell: str
    metric: str
    before: float | None
    """None for a new metric."""
    now: float | None
    """None for one that was not measured: its limit goes."""
    part: str = ""
    line: str = ""
    is_tolerated: bool = False
    """If true, the old limit allows the value."""

    @property
    def row(self) -> list[str]:
        """The change as a table row, under HEADER."""
        if not self.metric:
            return [self.cell, f"{self.now:.0f} limits", "–", "–", "new", "", ""]
        values = (self.before, self.now)
        before, now = ("–" if value is None else judge.show_value(self.metric, value) for value in values)
        if self.before is None or self.now is None:
            return [self.cell, self.metric, before, now, "new" if self.before is None else "not measured", "", ""]
        by = judge.show_difference(self.metric, self.now - self.before)
        part = self.part or ("within its tolerance" if self.is_tolerated else "")
        return [self.cell, self.metric, before, now, by, part, self.line]


def limit_changes(row: dict[str, Any], before: CellBudget, after: CellBudget) -> list[LimitChange]:
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
    gone = ((metric, was) for metric, was in before.limits.items() if metric not in after.limits)
    return [*changes, *(LimitChange(name, metric, was.value, None) for metric, was in gone)]


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
"""Separates the processors of a file with values from several; limits on kernels' scratch are then not checked."""


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
    """Replaces a cell's recorded values, but keeps manual ceilings and tolerances. Also replaces cells of the same
    work whose names are not `taken` by rows of this recording; a new cell inherits from the first of these. Returns the
    changed limits, and messages on metrics that are too noisy.
    """
    if row["status"] != "ok":
        raise judge.UnjudgedError(f"{row['name']}: {row['status']}: {row['reason']}; nothing was recorded")
    environment = file.environments.setdefault(row["environment"], Environment())
    cells = environment.cells.items() if row["work"] else ()
    same_work = [name for name, cell in cells if cell.work == row["work"] and name != row["name"]]
    twins = [environment.cells.pop(name) for name in same_work if name not in taken]
    environment.about |= {
        "recorded": datetime.now(UTC).date().isoformat(),
        "commit": row["commit"] if row["data"] == WATCHED else ask_git("rev-parse", "HEAD", where=Path.cwd()),
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
    return limit_changes(row, before, after), _noisy(row, limits)


def _limits(before: dict[str, judge.Limit], row: dict[str, Any], wanted: Wanted) -> dict[str, judge.Limit]:
    metrics, tolerances = wanted.of(row), dict(wanted.tolerances)
    limits = {metric: limit for metric, limit in before.items() if limit.bound or metric not in metrics}
    for metric in metrics:
        value = row.get(metric)
        if value is None or pd.isna(value) or metric in limits:
            continue
        tolerance = before[metric].tolerance if metric in before else judge.DEFAULT_TOLERANCE.get(metric, 0.0)
        tolerance = tolerances.get(metric, tolerance)
        if metric == "step_s":  # a time that the machine cannot repeat within the tolerance cannot be a budget
            low, high, middle = row["step_s_low"], row["step_s_high"], row["step_s"]
            if row["launches"] < LEAST_LAUNCHES or pd.isna(low):
                why = f"step_s needs measure.repeats=3 or more, it has {row['launches']} launches"
                raise judge.UnjudgedError(f"{row['name']}: {why}")
            if high - middle > tolerance * middle or middle - low > tolerance * middle:
                ends = " and ".join(judge.show_value("step_s", end) for end in (low, high))
                why = f"step_s varies between {ends}, wider than its tolerance of {tolerance:.0%}"
                raise judge.UnjudgedError(f"{row['name']}: {why}")
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
