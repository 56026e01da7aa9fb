"""`zerobench budget record` and `zerobench budget check`: measured values become limits, runs are
checked against them.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from ...config.cell import CellConfig
from ...config.compose import RefusedError, compose_cells
from ...results import selection
from ...results.conditions import add_options
from ...results.summary import LEAST_LAUNCHES
from ...sizes import printable
from .check import check
from .file import DEFAULT_FOLDER, BudgetFile, CellBudget, Environment, check_command, read_budget, write_budget
from .judge import DEFAULT_TOLERANCE, METRICS, RECORDED, Limit, recorded, show_value
from .rows import UnjudgedError, finished_rows, run_rows

USAGE = """\
zerobench budget record [--file FILE] [--runs PATH] [--metrics A,B] [--time] [-m] KEY=VALUE ...
zerobench budget check [FILE ...] [--runs PATH] [--strict] [--junit FILE] [--markdown FILE] [KEY=VALUE ...]

record writes what cells need; check runs them again (or takes --runs) and says, a sentence each, what moved.
Bytes and volumes are compared exactly, both ways. Files are yaml: ceilings such as `states_bytes: <= 24 GiB`
may be written by hand:

  command: [-m, "strategy=zero1,zero2", model=gpt_tiny]    # what makes the cells
  environments:
    any:                                                   # or "cpu, torch 2.13", as record writes it
      cells:
        zero2 gpt_tiny N=2 b=8:                            # a cell's name, as zerobench status prints it
          limits: {states_bytes: <= 24 GiB, peak_bytes: 30 MiB ± 2 %}

More: zerobench budget record --help, zerobench budget check --help.
Exit code of check: 0 all within budget, or better; 1 a regression, a missing metric or cell (with --strict also an
improvement); 2 no budget for this environment, or a cell could not run.
"""


def budget(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code."""
    verbs: dict[str, Callable[[list[str]], int]] = {"record": _record, "check": check}
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if not arguments or arguments[0] not in verbs:
        what = f"{arguments[0]}: neither record nor check" if arguments else "record or check?"
        print(printable(f"zerobench budget: {what}; see zerobench budget --help"), file=sys.stderr)
        return 2
    try:
        return verbs[arguments[0]](arguments[1:])
    except KeyboardInterrupt:
        return 130
    except (RefusedError, UnjudgedError, OSError, ValueError) as error:
        for line in error.problems if isinstance(error, RefusedError) else [str(error)]:
            print(printable(f"zerobench budget: {line}"), file=sys.stderr)
        return 2


def _record(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="zerobench budget record", description="Writes measured values as limits.")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="the cells, as for a run or, with -m, a sweep"
    )
    parser.add_argument("-m", "--multirun", action="store_true", help="a sweep: several values a key")
    parser.add_argument("--file", type=Path, default=DEFAULT_FOLDER / "default.yaml", help="default: %(default)s")
    parser.add_argument("--runs", type=Path, help="take finished runs instead of running")
    add_options(parser)
    parser.add_argument("--metrics", help=f"comma-separated; default, where of use: {', '.join(RECORDED)}")
    parser.add_argument("--time", action="store_true", help="also step_s ± 25 %%; needs measure.repeats=3 or more")
    chosen = parser.parse_intermixed_args(arguments)
    named = chosen.metrics.split(",") if chosen.metrics else []
    for metric in named:
        if metric not in METRICS:
            raise ValueError(f"--metrics: {metric} is none of {', '.join(METRICS)}")
    command = [*(["-m"] if chosen.multirun else []), *chosen.overrides]
    if chosen.runs is None and not command:
        raise ValueError("name the cells, as in: zerobench budget record -m strategy=zero1,zero2 model=gpt_tiny")
    cells = [] if chosen.runs else compose_cells(command)
    file = read_budget(chosen.file) if chosen.file.is_file() else BudgetFile(chosen.file)
    kept = [part for part in command if not part.startswith(("results_dir=", "rerun="))]
    check_command(kept)
    if file.command and kept and kept != file.command:
        first = f"{file.path} was recorded by: budget record {shlex.join(file.command)}"
        raise ValueError(f"{first}; name another --file for other cells, or remove it")
    rows = finished_rows(chosen, selection.standing) if chosen.runs else run_rows(cells)
    file.command = kept or file.command
    names = {row["name"] for row in rows}
    for row in rows:
        metrics = named or [*recorded(CellConfig.from_json(row["config"])), *(["step_s"] if chosen.time else [])]
        record_cell(file, row, metrics, names)
    write_budget(file)
    print(f"budget: {file.path}, {len(rows)} cells")
    if not file.command:
        ways = (
            "add to --runs the overrides that made the runs, as in: budget record --runs PATH -m strategy=zero1,zero2"
        )
        print(f"warning: {file.path} has no command, so budget check will want --runs, too; {ways}", file=sys.stderr)
    return 0


def record_cell(file: BudgetFile, row: dict[str, Any], metrics: list[str], taken: set[str]) -> None:
    """Replaces a cell's recorded values; manual ceilings and tolerances stay, also those of the same work under a name
    that is not `taken` by another row.
    """
    if row["status"] != "ok":
        raise UnjudgedError(f"{row['name']}: {row['status']}: {row['reason']}; nothing was recorded")
    environment = file.environments.setdefault(row["environment"], Environment())
    environment.about = {
        "recorded": datetime.now(UTC).date().isoformat(),
        "commit": row["commit"],
        "torch": row["torch_version"],
        "processor": row["processor"],
        "cores": int(row["cores"]),
    }
    same_work = [name for name, cell in environment.cells.items() if cell.work == row["work"] and name != row["name"]]
    twins = [environment.cells.pop(name).limits for name in same_work if name not in taken]
    before = environment.cells.get(row["name"], CellBudget(None, twins[0] if twins else {})).limits
    limits = {metric: limit for metric, limit in before.items() if limit.bound or metric not in metrics}
    for metric in metrics:
        value = row[metric]
        if pd.isna(value) or metric in limits:
            continue
        tolerance = before[metric].tolerance if metric in before else DEFAULT_TOLERANCE.get(metric, 0.0)
        if metric == "step_s":
            _guard_time(row, tolerance)
        limits[metric] = Limit(float(value), "", tolerance)
        if metric in before and before[metric].judge(metric, float(value)) != "ok":
            was = show_value(metric, before[metric].value)
            print(f"{row['name']}: {metric}: {was} before, {show_value(metric, float(value))} now")
    ordered = {metric: limits[metric] for metric in METRICS if metric in limits}
    if not ordered:
        raise UnjudgedError(f"{row['name']}: it measured none of {', '.join(metrics)}; nothing was recorded")
    environment.cells[row["name"]] = CellBudget(row["work"], ordered, row.get("lines") or {})


def _guard_time(row: dict[str, Any], tolerance: float) -> None:
    """Raises where the machine cannot repeat a time within the tolerance: such a time is no budget."""
    low, high, middle = row["step_s_low"], row["step_s_high"], row["step_s"]
    if row["launches"] < LEAST_LAUNCHES or pd.isna(low):
        raise UnjudgedError(f"{row['name']}: step_s needs measure.repeats=3 or more, it has {row['launches']} launches")
    if high - middle > tolerance * middle or middle - low > tolerance * middle:
        words = f"between {show_value('step_s', low)} and {show_value('step_s', high)}"
        raise UnjudgedError(f"{row['name']}: step_s lies {words}, wider than its tolerance of {tolerance:.0%}")
