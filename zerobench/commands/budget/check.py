"""`zerobench budget check`: finished or new runs checked against their budgets, cell by cell."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...config.compose import RefusedError, compose_cells
from ...results import selection
from ...results.conditions import add_options
from ..status_table import code_of
from .file import DEFAULT_FOLDER, BudgetFile, CellBudget, read_budget
from .judge import Finding, judge_cell
from .report import print_findings, write_junit, write_markdown
from .rows import UnjudgedError, environment_of_cell, finished_rows, run_rows


def check(arguments: list[str]) -> int:
    """Runs `zerobench budget check`. Returns the exit code: 0 all hold, 1 one does not, 2 they cannot be judged."""
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
    finished = finished_rows(chosen, selection.standing_or_failed) if chosen.runs else None
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
    """Returns the exit code: certain results first, so a regression counts even where another cell could not run."""
    kinds = {finding.kind for finding in findings}
    if kinds & {"regression", "missing"} or (strict and "improvement" in kinds):
        return 1
    return 2 if "unjudged" in kinds else 0


def _check_file(
    file: BudgetFile, finished: list[dict[str, Any]] | None, more: list[str], everything: bool
) -> tuple[list[Finding], list[tuple[str, str]]]:
    """Returns findings, and the (cell, metric) pairs that were checked. Failed attempts among `finished` runs at cells
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
    findings: list[Finding] = []
    judged: list[tuple[str, str]] = []
    for environment in dict.fromkeys(row["environment"] for row in rows):
        _require(file, environment)
        mine = [row for row in rows if row["environment"] == environment]
        matched = []
        for name, budgeted in file.of(environment):
            row = _match(name, budgeted, mine)
            matched += [id(row)]
            findings += judge_cell(name, budgeted.limits, row, row["largest"] if row else "", budgeted.lines)
            judged += [(name, metric) for metric in budgeted.limits]
        other = [row for row in mine if id(row) not in matched]
        findings += _unbudgeted([row for row in other if finished is None or everything or row["status"] == "ok"])
    return findings, judged


def _unbudgeted(rows: list[dict[str, Any]]) -> list[Finding]:
    """Returns findings for failed cells without a budget; other such cells get a note."""
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
    """Returns the row of the same work, of several that of the same name; without work the name decides."""
    same = [row for row in rows if row["work"] == budgeted.work] if budgeted.work else rows
    named = [row for row in same if row["name"] == name]
    return next(iter(named or (same if budgeted.work else [])), None)
