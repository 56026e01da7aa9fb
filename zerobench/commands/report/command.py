"""`zerobench report RUNS`, `zerobench report A B`: an HTML page on finished runs, or on changes between two sets."""

from __future__ import annotations

import argparse
import shlex
import warnings
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from ...host.pipes import print_line, print_note
from ...host.revisions import installed_version
from ...host.terminal import progress_bar
from ...results.markup import render
from ...results.options import Parser, add_options, add_price, verb
from ...results.summary import price_of
from ...results.tables import Results, load
from ...sizes import show_bytes, show_count
from ..account import passages_of, setting_of
from ..compare import Judge, add_judge
from ..comparison_text import passages
from . import compared
from .figures import figures_of
from .runs import ReportedRun, as_json, columns_of_runs, commands, days_of, differing, origin, runs_of
from .settings import costs, overall, settings_of, verdict_of

DESCRIPTION = """\
Writes finished runs as one page of HTML: the verdict in words, the table of runs, figures,
accounts with predictions and residuals, failures with their logs, provenance, commands.
Of two folders: what moved.
"""

EXAMPLES = """\
examples:
  zerobench report results/runs --out report.html
  zerobench report results/runs --where model=gpt_small --where world_size=2 --title "ZeRO on two ranks"
  zerobench report results/runs/before results/runs/after --out moved.html

The page opens from the disk and asks for nothing: style, script and figures are in it. Print it for a PDF.
A folder is a results folder, a run, or a collection (zerobench export --format parquet), which has no logs.
"""


@verb
def report(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code: 0, or 2 if there is nothing to report."""
    chosen = _parser().parse_args(arguments)
    if len(chosen.runs) > 2:
        given = show_count(len(chosen.runs), "folder")
        raise ValueError(f"RUNS: {given} given; name one, or two to compare, or a folder of collections")
    if chosen.out.is_dir():
        raise ValueError(f"--out {chosen.out}: is a folder; name a file, as {chosen.out / 'report.html'}")
    judge = Judge.of(chosen)
    sides = [_load(where, chosen) for where in chosen.runs]
    if len(sides) == 2:
        values = of_two(sides[0], sides[1], chosen.runs, judge)
    else:
        values = of_runs(sides[0], chosen.runs[0], judge)
    made_by = installed_version("zerobench") or "of a checkout"
    values["facts"].append(f"written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by zerobench {made_by}")
    values |= {"own": shlex.join(["zerobench", "report", *arguments])} | (
        {"title": chosen.title} if chosen.title else {}
    )
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(render("commands/report/page.html", **values), encoding="utf-8")
    counted = " and ".join(show_count(len(side.runs), "run") for side in sides)
    print_line(f"report: {chosen.out}, {counted}, {show_bytes(chosen.out.stat().st_size)}")
    return 0


def _load(where: Path, options: argparse.Namespace) -> Results:
    """Reads one folder. Raises ValueError if no run is left."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = load(where)
    for warning in caught:
        print_note(f"zerobench report: {warning.message}")
    if not results.runs.empty:
        results = results.chosen(options.where)[0]
        if options.price is not None:
            results = results.with_runs(results.runs.assign(**price_of(results.runs, options.price)))
        return results
    inside = [path.name for path in sorted(where.glob("*/")) if any(path.glob("*/run.json"))]
    if caught and not inside:
        raise ValueError(f"{where}: no run can be read")
    hint = f"experiment=stages results_dir={where}` makes some"
    hint = f"report {where / inside[0]}` reports those in it" if inside else hint
    raise ValueError(f"{where}: no runs here; `zerobench {hint}")


def _parser() -> argparse.ArgumentParser:
    parser = Parser("zerobench report", DESCRIPTION, EXAMPLES)
    runs_help = "a results folder, a run or a collection; two of them, before and after, are compared"
    parser.add_argument("runs", nargs="*", type=Path, default=[Path("results/runs")], metavar="RUNS", help=runs_help)
    out = Path("report.html")
    parser.add_argument("--out", type=Path, default=out, metavar="FILE", help="default: %(default)s, here")
    parser.add_argument("--title", metavar="TEXT", help="heading of the page (default: the folders' names)")
    add_judge(parser)
    add_price(parser)
    add_options(parser, attempts=False)
    return parser


MOST = 24
"""Most settings that a page draws."""

MOST_RUNS = 60
"""Most accounts, and most failures with their logs, on a page: the newest."""

LIGHT = 40
"""Most accounts that a page stores as elements; if there are more, they stay text until they are opened."""


def of_runs(results: Results, folder: Path, judge: Judge) -> dict[str, Any]:
    """Returns the values of the page on one folder."""
    settings = settings_of(results.runs)
    cards = [
        {"title": setting.title, "answers": list(verdict_of(setting, judge)), "costs": costs(setting, judge),
         "figures": list(figures_of(setting))}
        for setting in settings[:MOST]
    ]  # fmt: skip
    undrawn = len(settings) - len(cards)
    verdict = {"overall": list(overall(settings, judge)), "settings": cards, "undrawn": undrawn}
    ended = ", ".join(f"{number} {status}" for status, number in Counter(results.runs["status"]).most_common())
    cells = show_count(results.runs["cell_id"].nunique(), "cell")
    facts = [f"{show_count(len(results), 'run')} of {cells}: {ended}", f"recorded {days_of(results.runs)}"]
    about = _about_runs(results, runs_of(results, [folder]))
    return about | {"title": f"Report on {_name(folder)}", "facts": facts, "verdict": verdict, "moved": None}


def of_two(a: Results, b: Results, folders: Sequence[Path], judge: Judge) -> dict[str, Any]:
    """Returns the values of the page on the changes between two folders. Raises ValueError if they have no cell in
    common.
    """
    comparison = judge.compare_runs(a, b)
    if not comparison.pairs:
        raise ValueError(f"no cell of {folders[0]} is also in {folders[1]}; `zerobench report` of each shows its cells")
    moved = {
        "answers": list(compared.summary(comparison)), "figures": list(compared.figures_of(comparison)),
        "table": compared.table(comparison), "passages": passages(comparison),
    }  # fmt: skip
    both = a.with_runs(pd.concat([a.runs, b.runs], ignore_index=True))
    runs = [*runs_of(a, folders[:1]), *runs_of(b, folders[1:])]  # apart: equal code names runs alike
    facts = [f"A: {folders[0]}, {show_count(len(a), 'run')}", f"B: {folders[1]}, {show_count(len(b), 'run')}"]
    title = f"{_name(folders[0])} against {_name(folders[1])}"
    about = _about_runs(both, runs, ["A"] * len(a) + ["B"] * len(b))
    return about | {"title": title, "facts": facts, "verdict": None, "moved": moved}


def _name(folder: Path) -> str:
    return folder.resolve().name


def _about_runs(results: Results, runs: Sequence[ReportedRun], sides: Sequence[str] | None = None) -> dict[str, Any]:
    """Returns the values of the parts that both pages have. `runs`: of `results`; `sides`: the side of each."""
    anchors = {run: f"run-{number}" for number, run in enumerate(runs)}
    ok = [run for run in runs if run.row["status"] == "ok"]
    failed = [run for run in runs if run.row["status"] != "ok"]
    shown, shown_failed = ok[-MOST_RUNS:], failed[-MOST_RUNS:]
    columns, accounts = columns_of_runs(results, sides), []
    with progress_bar("accounts", len(shown), "runs") as advance:
        for run in shown:
            account = passages_of(run.row, run.results(), run.folder)
            accounts.append((anchors[run], run, list(setting_of(run.row)), account))
            advance()
    return {
        "columns": columns, "data": as_json(columns), "accounts": accounts, "failed": len(failed),
        "links": [anchors[run] if run in shown or run in shown_failed else "" for run in runs],
        "failures": [(anchors[run], run, passages_of(run.row, run.whole, run.folder)) for run in shown_failed],
        "differing": differing(results.runs), "origin": origin(results.runs), "commands": list(commands(results.runs)),
        "most": MOST_RUNS, "light": LIGHT,
    }  # fmt: skip
