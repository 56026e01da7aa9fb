"""`zerobench budget check`: finished or new runs checked against their budgets, cell by cell."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pandas as pd

from ...config.cell import CellConfig
from ...config.compose import RefusedError, compose_cells
from ...config.flat import differences
from ...config.flat import show_value as show_config
from ...config.identity import LOCAL, work_id
from ...results import selection
from ...results.options import Parser, add_options
from ...sizes import printable
from ..status_table import code_of
from .comment import write_check
from .file import DEFAULT_FOLDER, BudgetFile, CellBudget, Environment, read_budget
from .github import is_github, tell_github
from .judge import OF_KERNELS, Finding, Limit, held_elsewhere, judge_cell
from .report import Verdicts, print_findings, write_benchmark, write_junit, write_markdown
from .rows import UnjudgedError, environment_of_cell, finished_rows, run_rows


def check(arguments: list[str]) -> int:
    """Runs `zerobench budget check`. Returns the exit code: 0 all hold, 1 one does not, 125 they cannot be judged."""
    chosen = _parser().parse_intermixed_args(arguments)
    more = [one for one in chosen.files if "=" in one]
    paths = [Path(one) for one in chosen.files if "=" not in one] or sorted(DEFAULT_FOLDER.glob("*.yaml"))
    for path in paths:
        if not path.is_file():
            raise UnjudgedError(f"{path}: there is no such budget file")
    if not paths:
        raise UnjudgedError(f"{DEFAULT_FOLDER} holds no budgets; zerobench budget record writes one")
    finished = finished_rows(chosen, selection.standing_or_failed) if chosen.runs else None
    verdicts = Verdicts()
    for path in paths:
        try:
            verdicts.add(_check_file(read_budget(path), finished, more, chosen.all))
        except (RefusedError, UnjudgedError, ValueError, OSError) as error:  # the other files are judged all the same
            verdicts.add(Verdicts([Finding("unjudged", str(path), "", str(error))]))
    print_findings(verdicts.findings, verdicts.judged)
    _write(verdicts, chosen)
    return exit_code(verdicts.findings, chosen.strict)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="zerobench budget check", description="Holds cells against their budgets.")
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
    parser.add_argument("--comment", type=Path, metavar="FILE", help="Markdown for a comment that a bot updates")
    parser.add_argument(
        "--benchmark-json", type=Path, metavar="FILE", help="for github-action-benchmark, customSmallerIsBetter"
    )
    parser.add_argument(
        "--github",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="annotate lines and write the step's summary; default: where GITHUB_ACTIONS is true",
    )
    return parser


def _write(verdicts: Verdicts, chosen: argparse.Namespace) -> None:
    """Writes the reports that were asked for."""
    if chosen.junit:
        write_junit(chosen.junit, verdicts.findings, verdicts.judged)
    if chosen.markdown:
        write_markdown(chosen.markdown, verdicts.findings, verdicts.judged)
    if chosen.comment:
        write_check(chosen.comment, verdicts)
    if chosen.benchmark_json:
        write_benchmark(chosen.benchmark_json, verdicts)
    if is_github() if chosen.github is None else chosen.github:
        tell_github(verdicts)


UNJUDGED = 125
"""The exit code of a check that has no verdict; `git bisect run` skips such a revision."""


def exit_code(findings: list[Finding], strict: bool) -> int:
    """Returns the exit code: certain results first, so a regression counts even if another cell could not run."""
    kinds = {finding.kind for finding in findings}
    if kinds & {"regression", "missing"} or (strict and "improvement" in kinds):
        return 1
    return UNJUDGED if "unjudged" in kinds else 0


def _check_file(file: BudgetFile, finished: list[dict[str, Any]] | None, more: list[str], everything: bool) -> Verdicts:
    """Returns the verdicts on the cells of a file. Failed attempts among `finished` runs at cells
    without a budget count with `everything` only.
    """
    if finished is None:
        if not file.command:
            raise UnjudgedError(f"{file.path} was recorded from runs and names no command; give --runs")
        # one failure is not to hide the other cells
        cells = [cell.changed(fail_fast=False) for cell in compose_cells([*file.command, *more])]
        for environment in dict.fromkeys(environment_of_cell(cell) for cell in cells):
            _require(file, environment)
        rows = run_rows(cells)
    else:
        rows = finished
        _tell_of_older_code(rows)
    found = Verdicts()
    for environment in dict.fromkeys(row["environment"] for row in rows):
        _require(file, environment)
        mine = [row for row in rows if row["environment"] == environment]
        matched = []
        away = _recorded_elsewhere(file, environment, mine)
        for name, budgeted in file.of(environment):
            row = _match(name, budgeted, mine)
            other = None if row else next((one for one in mine if one["name"] == name and id(one) not in matched), None)
            matched += [id(row), id(other)]
            limits = held_elsewhere(budgeted.limits) if away else budgeted.limits
            if other is None:
                found.findings += judge_cell(name, limits, row, row["largest"] if row else "", budgeted.lines)
            else:
                found.findings.append(_other_work(file, environment, name, budgeted, other))
            found.judged += [(name, metric) for metric in limits]
            found.measured |= _measured(name, budgeted, row)
        rest = [row for row in mine if id(row) not in matched]
        found.findings += _unbudgeted([row for row in rest if finished is None or everything or row["status"] == "ok"])
    return found


def _recorded_elsewhere(file: BudgetFile, environment: str, rows: list[dict[str, Any]]) -> bool:
    """Returns True, after a sentence, where limits on the CPU are of another processor than the rows."""
    if not environment.startswith("cpu,"):
        return False
    there = file.environments[environment].about.get("processor") if environment in file.environments else None
    here = ", ".join(sorted({str(row["processor"]) for row in rows} - {str(there)}))
    if not there or not here:
        return False
    words = f"{file.path}: recorded on {there}, measured on {here}: recorded values of {', '.join(OF_KERNELS)}"
    print(printable(f"{words} are not judged, for kernels' scratch is the processor's; manual ceilings are"))
    return True


def _other_work(
    file: BudgetFile, environment: str, name: str, budgeted: CellBudget, row: dict[str, Any]
) -> Finding:  # fmt: skip
    """Returns the finding for a cell that has a budget's name and does other work, with the keys that differ if the
    file says by which command it was recorded.
    """
    command = file.environments.get(environment, Environment()).about.get("command")
    try:
        cells = compose_cells(command) if command else []
    except RefusedError:  # the choices of today are others
        cells = []
    before = next((cell.config for cell in cells if work_id(cell.config) == budgeted.work), None)
    moved = differences(before, CellConfig.from_json(row["config"])) if before is not None else {}
    said = [f"{key} was {show_config(was)} and is {show_config(now)}" for key, (was, now) in moved.items()
            if key not in LOCAL]  # fmt: skip
    keys = f" ({', '.join(said)})" if said else ""
    words = f"{name}: it is not the work that the budget is for{keys}; zerobench budget record takes the new one"
    return Finding("missing", name, "", words)


def _measured(
    name: str, budgeted: CellBudget, row: dict[str, Any] | None
) -> dict[tuple[str, str], tuple[Limit, float]]:
    if row is None or row["status"] != "ok":
        return {}
    values = {metric: row.get(metric) for metric in budgeted.limits}
    known = {metric: value for metric, value in values.items() if value is not None and not pd.isna(value)}
    return {(name, metric): (budgeted.limits[metric], float(value)) for metric, value in known.items()}


def _unbudgeted(rows: list[dict[str, Any]]) -> list[Finding]:
    """Returns findings for failed cells without a budget; other such cells get a note."""
    if rows:
        print(printable(f"without a budget: {', '.join(row['name'] for row in rows)}"))
    return [finding for row in rows if row["status"] != "ok" for finding in judge_cell(row["name"], {}, row)]


def _tell_of_older_code(rows: list[dict[str, Any]]) -> None:
    older = [row["name"] for row in rows if code_of(row) == "older"]
    if older:
        print(printable(f"by older code than this: {', '.join(older)}; without --runs they are measured anew"))


def _require(file: BudgetFile, environment: str) -> None:
    if not file.of(environment):
        known = ", ".join(file.environments) or "none"
        raise UnjudgedError(f"{file.path}: no budget for {environment}; there is one for: {known}")


def _match(name: str, budgeted: CellBudget, rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the row of the same work, of several that of the same name; without work the name decides."""
    same = [row for row in rows if row["work"] == budgeted.work] if budgeted.work else rows
    named = [row for row in same if row["name"] == name]
    return next(iter(named or (same if budgeted.work else [])), None)
