"""`zerobench budget record`: measured values become limits, and each limit that changes is explained.

baseline   the launches of a cell by one code that its limits are taken from
noisy      an exact metric in which the launches of a baseline differ: no limit would hold
change     a limit before and now, with the category and the line of code that moved it
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from ...config.cell import CellConfig
from ...config.compose import RefusedError, compose_cells
from ...results import selection
from ...results.options import Parser, add_options
from ...results.summary import LEAST_LAUNCHES
from ...sizes import printable, show_count
from .changes import Change, changes_of, print_changes
from .comment import write_changes
from .file import DEFAULT_FOLDER, BudgetFile, CellBudget, Environment, check_command, read_budget, write_budget
from .judge import DEFAULT_TOLERANCE, METRICS, OF_KERNELS, RECORDED, Limit, recorded, show_value
from .rows import UnjudgedError, finished_rows, run_rows

PROCESSORS = "; "
"""Separates processors where a file's values are of several; kernels' scratch is then judged on none of them."""


@dataclass(frozen=True)
class Wanted:
    """The choice of what is recorded of a cell: `metrics`, or those of use, with `step_s` if `time`. `tolerances`: of
    metrics, as fractions.
    """

    metrics: tuple[str, ...] = ()
    time: bool = False
    tolerances: tuple[tuple[str, float], ...] = ()

    def of(self, row: dict[str, Any]) -> list[str]:
        """Returns the metrics of one cell."""
        own = self.metrics or recorded(CellConfig.from_json(row["config"]))
        return [*own, *(["step_s"] if self.time and "step_s" not in own else [])]


def record(arguments: list[str]) -> int:
    """Runs `zerobench budget record`. Returns the exit code: 0 written, 2 refused, with nothing written."""
    chosen = _parser().parse_intermixed_args(arguments)
    wanted = _wanted(chosen)
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
    changes, noisy = [], []
    for row in rows:
        made, said = record_cell(file, row, wanted, names)
        changes += made
        noisy += said
    if noisy:
        raise RefusedError(noisy)
    _tell(file, rows, changes, chosen)
    return 0


def _tell(file: BudgetFile, rows: list[dict[str, Any]], changes: list[Change], chosen: argparse.Namespace) -> None:
    """Writes the file, unless it is a dry run, and the account of its changes."""
    print_changes(changes)
    for path in (chosen.markdown, chosen.comment):
        if path:
            write_changes(path, str(file.path), changes)
    if chosen.dry_run:
        print(printable(f"budget: {file.path}, {show_count(len(rows), 'cell')}; --dry-run: nothing was written"))
        return
    write_budget(file)
    print(printable(f"budget: {file.path}, {show_count(len(rows), 'cell')}"))
    watched = all(row["data"] == "watched" for row in rows)
    if not file.command and not watched:
        ways = (
            "add to --runs the overrides that made the runs, as in: budget record --runs PATH -m strategy=zero1,zero2"
        )
        print(f"warning: {file.path} has no command, so budget check will want --runs, too; {ways}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="zerobench budget record",
        description="Writes measured values as limits, and says of each limit that changes: before, now, what moved.",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="the cells, as for a run or, with -m, a sweep"
    )
    parser.add_argument("-m", "--multirun", action="store_true", help="a sweep: several values a key")
    parser.add_argument("--file", type=Path, default=DEFAULT_FOLDER / "default.yaml", help="default: %(default)s")
    parser.add_argument("--runs", type=Path, help="take finished runs, or watched loops, instead of running")
    add_options(parser)
    parser.add_argument("--metrics", help=f"comma-separated; default, where of use: {', '.join(RECORDED)}")
    parser.add_argument("--time", action="store_true", help="also step_s ± 25 %%; needs measure.repeats=3 or more")
    parser.add_argument(
        "--tolerance", action="append", default=[], metavar="METRIC=PERCENT",
        help="for a metric whose launches differ, as peak_bytes=2; may be given again",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="say what would change, write no budget")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the changes as a Markdown table")
    parser.add_argument("--comment", type=Path, metavar="FILE", help="the same, for a comment that a bot updates")
    return parser


def _wanted(chosen: argparse.Namespace) -> Wanted:
    named = chosen.metrics.split(",") if chosen.metrics else []
    for metric in named:
        if metric not in METRICS:
            raise ValueError(f"--metrics: {metric} is none of {', '.join(METRICS)}")
    tolerances = []
    for text in chosen.tolerance:
        metric, _, percent = text.partition("=")
        if metric not in METRICS:
            raise ValueError(f"--tolerance {text}: {metric} is none of {', '.join(METRICS)}")
        try:
            share = float(percent) / 100
        except ValueError:
            share = -1.0
        if not 0 <= share < 1:
            raise ValueError(f"--tolerance {text}: {percent!r} is no percentage from 0 to 100, as in {metric}=2")
        tolerances.append((metric, share))
    return Wanted(tuple(named), chosen.time, tuple(tolerances))


def record_cell(
    file: BudgetFile, row: dict[str, Any], wanted: Wanted, taken: set[str]
) -> tuple[list[Change], list[str]]:
    """Replaces a cell's recorded values; manual ceilings and tolerances stay, also those of the same work under a name
    that is not `taken` by a row of this recording. Returns the changed limits, and sentences on metrics that are too
    noisy.
    """
    if row["status"] != "ok":
        raise UnjudgedError(f"{row['name']}: {row['status']}: {row['reason']}; nothing was recorded")
    environment = file.environments.setdefault(row["environment"], Environment())
    cells = environment.cells.items() if row["work"] else ()
    same_work = [name for name, cell in cells if cell.work == row["work"] and name != row["name"]]
    twins = [environment.cells.pop(name) for name in same_work if name not in taken]
    environment.about |= {
        "recorded": datetime.now(UTC).date().isoformat(),
        "commit": row["commit"],
        "torch": row["torch_version"],
        "cores": int(row["cores"]),
        "command": [*file.command],
    }
    before = environment.cells.get(row["name"], twins[0] if twins else CellBudget(None, {}))
    limits = _limits(before.limits, row, wanted)
    if not limits:
        raise UnjudgedError(f"{row['name']}: it measured none of {', '.join(wanted.of(row))}; nothing was recorded")
    after = CellBudget(row["work"], limits, row.get("lines") or {})
    environment.cells[row["name"]] = after
    environment.about["processor"] = _processors(environment, row, wanted, taken)
    return changes_of(row, before, after), [*_noisy(row, limits)]


def _processors(environment: Environment, row: dict[str, Any], wanted: Wanted, taken: set[str]) -> str:
    """Returns the processors on which kernels' scratch was recorded: the row's, and those named before where a value is
    of an earlier recording.
    """
    named = str(environment.about.get("processor") or "")
    stay = named and any(
        metric in OF_KERNELS and not limit.bound and (name not in taken or metric not in wanted.of(row))
        for name, cell in environment.cells.items()
        for metric, limit in cell.limits.items()
    )
    return PROCESSORS.join(sorted({*named.split(PROCESSORS), row["processor"]} if stay else {row["processor"]}))


def _limits(before: dict[str, Limit], row: dict[str, Any], wanted: Wanted) -> dict[str, Limit]:
    metrics, tolerances = wanted.of(row), dict(wanted.tolerances)
    limits = {metric: limit for metric, limit in before.items() if limit.bound or metric not in metrics}
    for metric in metrics:
        value = row.get(metric)
        if value is None or pd.isna(value) or metric in limits:
            continue
        tolerance = before[metric].tolerance if metric in before else DEFAULT_TOLERANCE.get(metric, 0.0)
        tolerance = tolerances.get(metric, tolerance)
        if metric == "step_s":
            _guard_time(row, tolerance)
        limits[metric] = Limit(float(value), "", tolerance)
    return {metric: limits[metric] for metric in METRICS if metric in limits}


def _noisy(row: dict[str, Any], limits: dict[str, Limit]) -> list[str]:
    """Returns a sentence per limit that a launch of its own baseline does not meet; times are guarded apart."""
    said = []
    for metric, limit in limits.items():
        values = row.get("launched", {}).get(metric, [])
        if limit.bound or metric in ("step_s", "tokens_per_s") or all(limit.judge(metric, v) == "ok" for v in values):
            continue
        most = max(abs(value - limit.value) for value in values)
        percent = f"{100 * most / limit.value + 0.05:.1f}" if limit.value else "PERCENT"
        shown = ", ".join(show_value(metric, value) for value in sorted(set(values)))
        said.append(
            f"{row['name']}: {metric} differs between {len(values)} launches of the same code: {shown}; nothing was"
            " recorded: find out why, take one of them (--where run_id=...), or allow it:"
            f" --tolerance {metric}={percent}"
        )
    return said


def _guard_time(row: dict[str, Any], tolerance: float) -> None:
    """Raises where the machine cannot repeat a time within the tolerance: such a time is no budget."""
    low, high, middle = row["step_s_low"], row["step_s_high"], row["step_s"]
    if row["launches"] < LEAST_LAUNCHES or pd.isna(low):
        raise UnjudgedError(f"{row['name']}: step_s needs measure.repeats=3 or more, it has {row['launches']} launches")
    if high - middle > tolerance * middle or middle - low > tolerance * middle:
        words = f"between {show_value('step_s', low)} and {show_value('step_s', high)}"
        raise UnjudgedError(f"{row['name']}: step_s lies {words}, wider than its tolerance of {tolerance:.0%}")
