"""`zerobench budget record` and `zerobench budget check`: measured values become limits, runs are held against them."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from .. import selection, tables
from ..compose import RefusedError, compose_cells
from ..conditions import add_options
from ..naming import name_cells
from ..provenance import device_class
from ..records import RunRow
from ..resolve import Cell, work_id
from ..runner import run_cells
from ..summary import LEAST_LAUNCHES, summarize
from ..units import printable, show_count
from .budget_file import BudgetFile, CellBudget, Environment, check_command, environment_of, read_budget, write_budget
from .budget_report import print_findings, write_junit, write_markdown
from .limits import DEFAULT_TOLERANCE, METRICS, RECORDED, Finding, Limit, judge_cell, recorded, show_value
from .status_table import code_of

DEFAULT_FOLDER = Path("results/budgets")

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


class UnjudgedError(Exception):
    """Nothing can be said; the message is the sentence."""


def budget(arguments: list[str]) -> int:
    """The verb. Returns the exit code."""
    verbs: dict[str, Callable[[list[str]], int]] = {"record": _record, "check": _check}
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


# -- record -------------------------------------------------------------------------------------------------


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
    rows = _finished(chosen, selection.standing) if chosen.runs else _run(cells)
    file.command = kept or file.command
    names = {row["name"] for row in rows}
    for row in rows:
        metrics = named or [*recorded(json.loads(row["config"])), *(["step_s"] if chosen.time else [])]
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
    """Puts a cell's values in place of those that are there; ceilings and tolerances by hand stay, also those of the
    same work under a name that is not `taken` by another row.
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
    environment.cells[row["name"]] = CellBudget(row["work"], ordered)


def _guard_time(row: dict[str, Any], tolerance: float) -> None:
    """A time that the machine cannot repeat within the tolerance is no budget."""
    low, high, middle = row["step_s_low"], row["step_s_high"], row["step_s"]
    if row["launches"] < LEAST_LAUNCHES or pd.isna(low):
        raise UnjudgedError(f"{row['name']}: step_s needs measure.repeats=3 or more, it has {row['launches']} launches")
    if high - middle > tolerance * middle or middle - low > tolerance * middle:
        words = f"between {show_value('step_s', low)} and {show_value('step_s', high)}"
        raise UnjudgedError(f"{row['name']}: step_s lies {words}, wider than its tolerance of {tolerance:.0%}")


# -- check --------------------------------------------------------------------------------------------------


def _check(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="zerobench budget check", description="Holds cells against their budgets.")
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help=f"default: all of {DEFAULT_FOLDER}/; a KEY=VALUE, as rerun=true, is for the runs",
    )
    parser.add_argument("--runs", type=Path, help="take finished runs instead of running")
    add_options(parser)
    parser.add_argument("--strict", action="store_true", help="an improvement fails too: record it")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="a JUnit XML report")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="a Markdown summary")
    chosen = parser.parse_intermixed_args(arguments)
    more = [one for one in chosen.files if "=" in one]
    paths = [Path(one) for one in chosen.files if "=" not in one] or sorted(DEFAULT_FOLDER.glob("*.yaml"))
    for path in paths:
        if not path.is_file():
            raise UnjudgedError(f"{path}: there is no such budget file")
    if not paths:
        raise UnjudgedError(f"{DEFAULT_FOLDER} holds no budgets; zerobench budget record writes one")
    finished = _finished(chosen, selection.standing_or_failed) if chosen.runs else None
    findings: list[Finding] = []
    judged: list[tuple[str, str]] = []
    for path in paths:
        try:
            mine, held = _check_file(read_budget(path), finished, more, chosen.all)
        except (RefusedError, UnjudgedError, ValueError, OSError) as error:  # the other files are judged all the same
            mine, held = [Finding("unjudged", str(path), "", str(error))], []
        findings += mine
        judged += held
    print_findings(findings, judged)
    if chosen.junit:
        write_junit(chosen.junit, findings, judged)
    if chosen.markdown:
        write_markdown(chosen.markdown, findings, judged)
    return exit_code(findings, chosen.strict)


def exit_code(findings: list[Finding], strict: bool) -> int:
    """What is certain goes first: a regression is one, even where another cell could not run."""
    kinds = {finding.kind for finding in findings}
    if kinds & {"regression", "missing"} or (strict and "improvement" in kinds):
        return 1
    return 2 if "unjudged" in kinds else 0


def _check_file(
    file: BudgetFile, finished: list[dict[str, Any]] | None, more: list[str], everything: bool
) -> tuple[list[Finding], list[tuple[str, str]]]:
    """Findings, and the (cell, metric) pairs that were held against a limit. Of `finished` runs the failed attempts at
    cells without a budget count with `everything` alone.
    """
    if finished is None:
        if not file.command:
            raise UnjudgedError(f"{file.path} was recorded from runs and names no command; give --runs")
        # one failure is not to hide the other cells
        cells = [cell.changed(fail_fast=False) for cell in compose_cells([*file.command, *more])]
        for environment in dict.fromkeys(_environment_of_cell(cell) for cell in cells):
            _require(file, environment)
        rows = _run(cells)
    else:
        rows = finished
        _tell_of_older_code(rows)
    findings: list[Finding] = []
    judged: list[tuple[str, str]] = []
    for environment in dict.fromkeys(row["environment"] for row in rows):
        _require(file, environment)
        mine = [row for row in rows if row["environment"] == environment]
        matched = []
        for name, budgeted in file.of(environment):
            row = _match(name, budgeted, mine)
            matched += [id(row)]
            findings += judge_cell(name, budgeted.limits, row, row["largest"] if row else "")
            judged += [(name, metric) for metric in budgeted.limits]
        other = [row for row in mine if id(row) not in matched]
        findings += _unbudgeted([row for row in other if finished is None or everything or row["status"] == "ok"])
    return findings, judged


def _unbudgeted(rows: list[dict[str, Any]]) -> list[Finding]:
    """Cells without a budget: those that failed are findings, the others a word."""
    if rows:
        print(f"without a budget: {', '.join(row['name'] for row in rows)}")
    return [finding for row in rows if row["status"] != "ok" for finding in judge_cell(row["name"], {}, row)]


def _tell_of_older_code(rows: list[dict[str, Any]]) -> None:
    older = [row["name"] for row in rows if code_of(row) == "older"]
    if older:
        print(f"by older code than this: {', '.join(older)}; without --runs they are measured anew")


def _require(file: BudgetFile, environment: str) -> None:
    if not file.of(environment):
        known = ", ".join(file.environments) or "none"
        raise UnjudgedError(f"{file.path}: no budget for {environment}; there is one for: {known}")


def _match(name: str, budgeted: CellBudget, rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The row of the same work, of several that of the same name; without work the name decides."""
    same = [row for row in rows if row["work"] == budgeted.work] if budgeted.work else rows
    named = [row for row in same if row["name"] == name]
    return next(iter(named or (same if budgeted.work else [])), None)


# -- rows ---------------------------------------------------------------------------------------------------


def _environment_of_cell(cell: Cell) -> str:
    return environment_of(device_class(cell.config["device"]), version("torch"))


def _run(cells: list[Cell]) -> list[dict[str, Any]]:
    """Runs cells, finished ones reused, and summarizes them. Raises KeyboardInterrupt where the user stops it."""
    code, rows = run_cells(cells)
    if code == 130:
        raise KeyboardInterrupt
    ids = {row["run_id"] for row in rows}
    folders = dict.fromkeys(cell.config["results_dir"] for cell in cells)
    tensors = pd.concat([tables.load(folder).of(ids).tensors for folder in folders])
    return _summaries(tables.frame_of(rows, RunRow), tensors)


def _finished(chosen: argparse.Namespace, keep: Callable[[pd.DataFrame], pd.DataFrame]) -> list[dict[str, Any]]:
    """The rows of --runs that --where asks for and, without --all, `keep` keeps."""
    results = tables.load(chosen.runs)
    if results.runs.empty:
        raise UnjudgedError(f"{chosen.runs} holds no runs")
    runs = selection.matching(results.runs, chosen.where)
    kept = runs if chosen.all else keep(runs)
    if kept.empty:
        raise UnjudgedError(f"{chosen.runs}: every run there failed; --all takes failed attempts, too")
    if len(kept) < len(runs):
        number = show_count(len(runs) - len(kept), "failed or superseded run")
        print(f"{chosen.runs}: {number} left out; --all takes them")
    return _summaries(kept, results.tensors)


def _summaries(runs: pd.DataFrame, tensors: pd.DataFrame) -> list[dict[str, Any]]:
    """A row a cell, with its name, work and environment, and the largest tensor at its peak in words."""
    rows: list[Any] = summarize(runs).to_dict("records")
    configs = [json.loads(row["config"]) for row in rows]
    for row, config, name in zip(rows, configs, name_cells(configs), strict=True):
        mine = tensors[tensors["run_id"] == row["run_id"]].sort_values("bytes", ascending=False)
        row |= {"name": name, "work": work_id(config)}
        row["environment"] = environment_of(row["device_class"], row["torch_version"])
        top = next(mine.itertuples(), None)
        name = (top.name or top.module or f"made in {top.phase}") if top else ""
        row["largest"] = f"{name} ({top.category}, {top.bytes:,} B)" if top else ""
    return rows
