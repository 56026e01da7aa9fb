"""`zerobench budget`: measured values become limits (`record`), and runs are compared with them (`check`)."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from ..budgets import budget_file, judge, reports
from ..budgets.budget_file import Wanted, print_changes, record_cell
from ..budgets.lines import lines_by_cell
from ..budgets.reports import is_github, report_to_github
from ..config.cell import LOCAL, Cell, CellConfig, work_id
from ..config.compose import RefusedError, compose_cells
from ..config.flat import differences, name_cells
from ..config.flat import show_value as show_config
from ..host.pipes import print_line, print_note, write_text
from ..records import RunRow
from ..results import selection, tables
from ..results.frames import frame_of
from ..results.options import Parser, add_options, refuse, verb
from ..results.provenance import device_class
from ..results.selection import CODE, latest
from ..results.summary import summarize
from ..results.tables import Results
from ..sizes import show_count
from ..sweep.command import run_cells
from .folder_contents import code_age

USAGE = """\
zerobench budget record [--file FILE] [--runs PATH] [--metrics A,B] [--time] [--dry-run] [-m] [KEY=VALUE ...]
zerobench budget check [FILE ...] [--runs PATH] [--strict] [--junit FILE] [--comment FILE] [KEY=VALUE ...]

record writes the bytes and volumes of cells as limits, and explains each limit that changes; without KEY=VALUE it runs
the cells that the file was recorded by. check runs the cells again (or reads --runs) and prints each change with the
line of code that caused it, which it annotates in a GitHub workflow.
Bytes and volumes are compared exactly, both ways. Files are yaml: ceilings such as `states_bytes: <= 24 GiB`
may be written by hand:

  command: [-m, "strategy=zero1,zero2", model=gpt_tiny]    # what makes the cells
  environments:
    any:                                                   # or "cpu, torch 2.13", as written by record
      cells:
        zero2 gpt_tiny N=2 b=8:                            # a cell's name, as printed by zerobench status
          limits: {states_bytes: <= 24 GiB, peak_bytes: 30 MiB ± 2 %}

More: zerobench budget record --help, zerobench budget check --help.
Exit code of check: 0 all within budget, or better; 1 a regression, a missing metric or cell (with --strict also an
improvement); 125 no verdict: no budget for this environment, or a cell could not run, so that `git bisect run` skips
the revision; 2 an invalid option; 130 interrupted.
"""


@verb
def budget(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code."""
    verbs: dict[str, Callable[[list[str]], int]] = {"record": record, "check": check}
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if not arguments or arguments[0] not in verbs:
        what = f"{arguments[0]}: neither record nor check" if arguments else "record or check?"
        raise ValueError(f"{what}; see zerobench budget --help")
    try:
        return verbs[arguments[0]](arguments[1:])
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError) as error:
        code = refuse(error, "zerobench budget")
        return UNJUDGED if arguments[0] == "check" and isinstance(error, (OSError, judge.UnjudgedError)) else code


def record(arguments: list[str]) -> int:
    """Runs `zerobench budget record`. Returns the exit code: 0 written, 2 refused, with nothing written."""
    description = "Writes measured values as limits, and says of each limit that changes: before, now, what moved."
    parser = Parser("zerobench budget record", description)
    add = parser.add_argument
    cells_help = "the cells, as for a run or, with -m, a sweep; default: those that the file was recorded by"
    add("overrides", nargs="*", metavar="KEY=VALUE", help=cells_help)
    add("-m", "--multirun", action="store_true", help="a sweep: several values a key")
    add("--file", type=Path, default=budget_file.DEFAULT_FOLDER / "default.yaml", help="default: %(default)s")
    add("--runs", type=Path, help="take finished runs, or watched loops, instead of running")
    add_options(parser)
    add("--metrics", help=f"comma-separated; default, if they apply to a cell: {', '.join(judge.RECORDED)}")
    add("--time", action="store_true", help="also step_s ± 25 %%; needs measure.repeats=3 or more")
    tolerance_help = "for a metric whose launches differ, as peak_bytes=2; may be given again"
    add("--tolerance", action="append", default=[], metavar="METRIC=PERCENT", help=tolerance_help)
    add("--dry-run", action="store_true", help="show the changes without writing them")
    add("--markdown", type=Path, metavar="FILE", help="the changes as a Markdown table")
    add("--comment", type=Path, metavar="FILE", help="the same, for a comment that a bot updates")
    chosen = parser.parse_intermixed_args(arguments)
    wanted = _wanted(chosen)
    _check_selection(chosen)
    command = [*(["-m"] if chosen.multirun else []), *chosen.overrides]
    named = [part for part in command if not part.startswith(("results_dir=", "rerun="))]
    budget_file.check_command(named)
    file = budget_file.read_budget(chosen.file) if chosen.file.is_file() else budget_file.BudgetFile(chosen.file)
    if file.command and named and named != file.command:
        first = f"{file.path} was recorded by: budget record {shlex.join(file.command)}"
        raise ValueError(f"{first}; name another --file for other cells, or remove it")
    if chosen.runs is None and not (named or file.command):
        raise ValueError("name the cells, as in: zerobench budget record -m strategy=zero1,zero2 model=gpt_tiny")
    if chosen.runs:
        rows = finished_rows(chosen, selection.standing)
    else:
        rows = run_rows(compose_cells(command if named else [*file.overrides, *command]))
    file.command = named or file.command
    folder = next((part.partition("=")[2] for part in reversed(command) if part.startswith("results_dir=")), "")
    file.results_dir = (budget_file.folder_below(folder) if named else "") or file.results_dir
    names = {row["name"] for row in rows}
    changes, noisy = [], []
    for row in rows:
        made, said = record_cell(file, row, wanted, names)
        changes += made
        noisy += said
    if noisy:
        raise RefusedError(noisy)
    print_changes(changes)
    for path in (chosen.markdown, chosen.comment):
        if path:
            reports.write_comment(path, reports.MARKER_OF_CHANGES, reports.changes_body(str(file.path), changes))
    if chosen.dry_run:
        print_line(f"budget: {file.path}, {show_count(len(rows), 'cell')}; --dry-run: nothing was written")
        return 0
    budget_file.write_budget(file)
    print_line(f"budget: {file.path}, {show_count(len(rows), 'cell')}")
    watched = all(row["data"] == "watched" for row in rows)
    if not file.command and not watched:
        ways = (
            "add to --runs the overrides that made the runs, as in: budget record --runs PATH -m strategy=zero1,zero2"
        )
        print_note(f"warning: {file.path} has no command, so budget check will want --runs, too; {ways}")
    return 0


def _check_selection(chosen: argparse.Namespace) -> None:
    """Raises ValueError for options that select finished runs if there are none to select from."""
    for option, value in (("--where", chosen.where), ("--all", chosen.all)):
        if value and chosen.runs is None:
            raise ValueError(f"{option} selects finished runs; name their folder with --runs")


def _wanted(chosen: argparse.Namespace) -> Wanted:
    named = chosen.metrics.split(",") if chosen.metrics else []
    for metric in named:
        if metric not in judge.METRICS:
            raise ValueError(f"--metrics: {metric} is none of {', '.join(judge.METRICS)}")
    tolerances = []
    for text in chosen.tolerance:
        metric, _, percent = text.partition("=")
        if metric not in judge.METRICS:
            raise ValueError(f"--tolerance {text}: {metric} is none of {', '.join(judge.METRICS)}")
        try:
            share = float(percent) / 100
        except ValueError:
            share = -1.0
        if not 0 <= share < 1:
            raise ValueError(f"--tolerance {text}: {percent!r} is no percentage from 0 to 100, as in {metric}=2")
        tolerances.append((metric, share))
    return Wanted(tuple(named), chosen.time, tuple(tolerances))


def check(arguments: list[str]) -> int:
    """Runs `zerobench budget check`. Returns the exit code: 0 all hold, 1 one does not, 125 they cannot be judged."""
    parser = Parser("zerobench budget check", "Compares cells with their budgets.")
    add = parser.add_argument
    files_help = f"default: all of {budget_file.DEFAULT_FOLDER}/; a KEY=VALUE, as rerun=true, is for the runs"
    add("files", nargs="*", metavar="FILE", help=files_help)
    add("--runs", type=Path, help="take finished runs instead of running")
    add_options(parser)
    add("--strict", action="store_true", help="an improvement fails too: record it")
    add("--junit", type=Path, metavar="FILE", help="a JUnit XML report")
    add("--markdown", type=Path, metavar="FILE", help="a Markdown summary")
    add("--comment", type=Path, metavar="FILE", help="Markdown for a comment that a bot updates")
    add("--benchmark-json", type=Path, metavar="FILE", help="for github-action-benchmark, customSmallerIsBetter")
    github_help = "annotate lines and write the step's summary; default: where GITHUB_ACTIONS is true"
    add("--github", action=argparse.BooleanOptionalAction, default=None, help=github_help)
    chosen = parser.parse_intermixed_args(arguments)
    _check_selection(chosen)
    more = [word for word in chosen.files if "=" in word]
    if chosen.runs and more:
        raise ValueError(f"{more[0]}: with --runs nothing is run; leave it out, or leave out --runs")
    paths = [Path(word) for word in chosen.files if "=" not in word]
    paths = paths or sorted(budget_file.DEFAULT_FOLDER.glob("*.yaml"))
    for path in paths:
        if not path.is_file():
            raise judge.UnjudgedError(f"{path}: there is no such budget file")
    if not paths:
        raise judge.UnjudgedError(f"{budget_file.DEFAULT_FOLDER} holds no budgets; zerobench budget record writes one")
    finished = finished_rows(chosen, selection.standing_or_failed) if chosen.runs else None
    findings: list[judge.Finding] = []
    for path in paths:
        try:
            findings += _check_file(budget_file.read_budget(path), finished, more, chosen.all)
        except (OSError, ValueError) as error:  # the other files are judged all the same
            findings.append(judge.Finding("unjudged", str(path), "", str(error), limits=0))
    reports.print_findings(findings)
    code = exit_code(findings, chosen.strict)
    try:
        if chosen.junit:
            reports.write_junit(chosen.junit, findings)
        if chosen.markdown:
            write_text("\n".join(reports.check_body(findings)), chosen.markdown)
        if chosen.comment:
            reports.write_comment(chosen.comment, reports.MARKER, reports.check_body(findings))
        if chosen.benchmark_json:
            reports.write_benchmark(chosen.benchmark_json, findings)
        if is_github() if chosen.github is None else chosen.github:
            report_to_github(findings)
    except (OSError, ValueError) as error:
        refused = refuse(error, "zerobench budget")
        return code if code == 1 else refused  # a regression counts all the same
    return code


UNJUDGED = 125
"""The exit code of a check without a verdict; `git bisect run` skips such a revision."""


def exit_code(findings: list[judge.Finding], strict: bool) -> int:
    """Returns the exit code: certain results first, so a regression counts even if another cell could not run."""
    kinds = {finding.kind for finding in findings}
    if kinds & {"regression", "missing"} or (strict and "improvement" in kinds):
        return 1
    return UNJUDGED if "unjudged" in kinds else 0


def _check_file(
    file: budget_file.BudgetFile, finished: list[dict[str, Any]] | None, more: list[str], everything: bool
) -> list[judge.Finding]:
    """Returns the findings on the cells of a file, a limit each. Among `finished` runs, failed attempts at cells
    without a budget count only if `everything` is set.
    """
    if finished is None:
        if not file.command:
            raise judge.UnjudgedError(
                f"{file.path} was recorded from runs or by pytest and names no command; give --runs, or run pytest"
            )
        # one failure must not hide the other cells
        cells = [cell.changed(fail_fast=False) for cell in compose_cells([*file.overrides, *more])]
        for device in dict.fromkeys(device_class(cell.config.device) for cell in cells):
            _require(file, budget_file.environment_of(device, version("torch")))
        rows = run_rows(cells)
    else:
        rows = finished
        if older := [row["name"] for row in rows if code_age(row) == "older"]:
            print_line(f"by older code than this: {', '.join(older)}; without --runs they are measured again")
    findings: list[judge.Finding] = []
    for environment in dict.fromkeys(row["environment"] for row in rows):
        try:
            _require(file, environment)
        except judge.UnjudgedError as error:  # runs of other environments are judged all the same
            findings.append(judge.Finding("unjudged", str(file.path), "", str(error), limits=0))
            continue
        own_rows = [row for row in rows if row["environment"] == environment]
        matched = []
        away = _recorded_elsewhere(file, environment, own_rows)
        for name, budgeted in file.of(environment):
            # the row with the same work, preferably one with the same name; if the budget has no work, by name
            same = [row for row in own_rows if row["work"] == budgeted.work] if budgeted.work else own_rows
            named = [row for row in same if row["name"] == name]
            row = next(iter(named or (same if budgeted.work else [])), None)
            namesakes = (each for each in own_rows if each["name"] == name and id(each) not in matched)
            other = None if row else next(namesakes, None)
            matched += [id(row), id(other)]
            limits = budgeted.limits
            if away:
                limits = {name: limit for name, limit in limits.items() if limit.bound or name not in judge.OF_KERNELS}
            if other is None:
                findings += judge.judge_limits(name, limits, row, budgeted.lines)
            else:
                findings.append(_other_work(file, environment, name, budgeted, other))
        rest = [row for row in own_rows if finished is None or everything or row["status"] == "ok"]
        if unbudgeted := [row for row in rest if id(row) not in matched]:
            print_line(f"without a budget: {', '.join(row['name'] for row in unbudgeted)}")
        for row in unbudgeted:
            findings += judge.judge_cell(row["name"], {}, row) if row["status"] != "ok" else []
    if not findings:
        raise judge.UnjudgedError(f"{file.path}: no limit could be judged here; all are of the processor that it names")
    return findings


def _recorded_elsewhere(file: budget_file.BudgetFile, environment: str, rows: list[dict[str, Any]]) -> bool:
    """Returns True, after printing a note, if limits on the CPU were recorded on another processor than the rows."""
    if not environment.startswith("cpu,"):
        return False
    there = file.environments[environment].about.get("processor") if environment in file.environments else None
    here = ", ".join(sorted({str(row["processor"]) for row in rows} - {str(there)}))
    if not there or not here:
        return False
    values = f"recorded values of {', '.join(judge.OF_KERNELS)}"
    why = "for kernels' scratch is the processor's; manual ceilings are"
    print_line(f"{file.path}: recorded on {there}, measured on {here}: {values} are not judged, {why}")
    return True


def _other_work(
    file: budget_file.BudgetFile, environment: str, name: str, budgeted: budget_file.CellBudget, row: dict[str, Any]
) -> judge.Finding:  # fmt: skip
    """Returns the finding for a cell that has the name of a budgeted cell but does other work, with the keys that
    differ if the file names the command that recorded it.
    """
    command = file.environments.get(environment, budget_file.Environment()).about.get("command")
    try:
        cells = compose_cells(command) if command else []
    except RefusedError:  # the choices of today are others
        cells = []
    before = next((cell.config for cell in cells if work_id(cell.config) == budgeted.work), None)
    moved = differences(before, CellConfig.from_json(row["config"])) if before is not None else {}
    said = [f"{key} was {show_config(was)} and is {show_config(now)}" for key, (was, now) in moved.items()
            if key not in LOCAL]  # fmt: skip
    keys = f" ({', '.join(said)})" if said else ""
    message = f"{name}: its work is not the budget's{keys}; zerobench budget record replaces the budget"
    return judge.Finding("missing", name, "", message, limits=len(budgeted.limits))


def _require(file: budget_file.BudgetFile, environment: str) -> None:
    if not file.of(environment):
        environments = ", ".join(file.environments) or "none"
        raise judge.UnjudgedError(f"{file.path}: no budget for {environment}; there is one for: {environments}")


def run_rows(cells: list[Cell]) -> list[dict[str, Any]]:
    """Runs cells, finished ones reused, and summarizes them. Raises KeyboardInterrupt if the user stops it."""
    code, rows = run_cells(cells)
    if code == 130:
        raise KeyboardInterrupt
    ids = {row.run_id for row in rows}
    folders = dict.fromkeys(cell.config.results_dir for cell in cells if not cell.problems)
    results = tables.merge([tables.load(folder).of(ids) for folder in folders])
    return summaries(frame_of(rows, RunRow), results)


def finished_rows(chosen: argparse.Namespace, keep: Callable[[pd.DataFrame], pd.DataFrame]) -> list[dict[str, Any]]:
    """Returns the rows of --runs that --where selects and, without --all, `keep` keeps."""
    results = tables.load(chosen.runs)
    if results.runs.empty:
        raise judge.UnjudgedError(f"{chosen.runs} holds no runs")
    runs = selection.matching(results.runs, chosen.where)
    kept = runs if chosen.all else keep(runs)
    if kept.empty:
        raise judge.UnjudgedError(f"{chosen.runs}: every run there failed; --all takes failed attempts, too")
    if len(kept) < len(runs):
        is_failed = runs["status"].drop(kept.index).isin(selection.ATTEMPTS)
        counts = {"failed attempt": int(is_failed.sum()), "superseded run": int((~is_failed).sum())}
        left_out = " and ".join(show_count(count, noun) for noun, count in counts.items() if count)
        print_line(f"{chosen.runs}: {left_out} left out; --all takes them")
    return summaries(kept, results.of(runs["run_id"]))


def summaries(runs: pd.DataFrame, results: Results) -> list[dict[str, Any]]:
    """Returns a row per cell, with its name, work, environment and lines of code. `results`: the tables of these
    runs.
    """
    lines = lines_by_cell(results.lines, latest(runs))
    rows: list[Any] = summarize(runs).to_dict("records")
    configs = [CellConfig.from_json(row["config"]) for row in rows]
    for row, config, name in zip(rows, configs, name_cells(configs), strict=True):
        row |= {"name": name, "work": work_id(config)}
        row["environment"] = budget_file.environment_of(row["device_class"], row["torch_version"])
        # the launches of the cell by the same code, from one commit of the user's code
        same = results.runs[(results.runs["cell_id"] == row["cell_id"]) & (results.runs["status"] == "ok")]
        for column in (*CODE, "commit"):
            same = same[same[column].isna() if pd.isna(row[column]) else same[column] == row[column]]
        row["launched"] = {
            metric: [float(v) for v in same[metric].dropna()] for metric in judge.METRICS if metric in same
        }
        row["lines"] = lines.get(row["cell_id"], {})
    return rows
