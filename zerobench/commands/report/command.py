"""`zerobench report RUNS`, `zerobench report A B`: an HTML page on finished runs, or on changes between two sets."""

from __future__ import annotations

import argparse
import shlex
import warnings
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd

from ...host.installed import installed_version
from ...host.pipes import print_line, print_note
from ...host.terminal import progress_bar
from ...results.markup import Html, details, grid, h, join
from ...results.options import Parser, add_options, verb
from ...results.selection import chosen as chosen_runs
from ...results.tables import Results, load
from ...sizes import show_bytes, show_count
from ..compare import Judge, add_judge
from . import compared
from .figures import figures_of
from .page import PagePart, answers, page, runs_table
from .runs import LIGHT, ReportedRun, accounts, columns_of_runs, commands, differing, failures, origin, runs_of, told_of
from .settings import Setting, costs, overall, settings_of, verdict_of

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
    own = shlex.join(["zerobench", "report", *arguments])
    make = of_two if len(sides) == 2 else of_runs
    page = make(sides, chosen.runs, judge, chosen.title, own)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(page, encoding="utf-8")
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
    if results.runs.empty:
        raise ValueError(_why_none(where, caught))
    return chosen_runs(results, options.where)[0]


def _why_none(where: Path, caught: Sequence[warnings.WarningMessage]) -> str:
    inside = [path.name for path in sorted(where.glob("*/")) if any(path.glob("*/run.json"))]
    if inside:
        return f"{where}: no runs here; `zerobench report {where / inside[0]}` reports those in it"
    if caught:
        return f"{where}: no run can be read"
    return f"{where}: no runs here; `zerobench experiment=stages results_dir={where}` makes some"


def _parser() -> argparse.ArgumentParser:
    parser = Parser("zerobench report", DESCRIPTION, EXAMPLES)
    words = "a results folder, a run or a collection; two of them, before and after, are compared"
    parser.add_argument("runs", nargs="*", type=Path, default=[Path("results/runs")], metavar="RUNS", help=words)
    out = Path("report.html")
    parser.add_argument("--out", type=Path, default=out, metavar="FILE", help="default: %(default)s, here")
    parser.add_argument("--title", metavar="TEXT", help="heading of the page (default: the folders' names)")
    add_judge(parser)
    add_options(parser, attempts=False)
    return parser


MOST = 24
"""Most settings that a page draws."""

OPEN = 3
"""Settings that are shown initially; the others open on a click."""


def of_runs(sides: Sequence[Results], folders: Sequence[Path], judge: Judge, title: str | None, own: str) -> Html:
    """Builds the page on one folder."""
    results = sides[0]
    settings = settings_of(results.runs)
    verdict = PagePart("verdict", "Verdict", "Verdict", _verdict(settings, judge))
    parts = [verdict, *_about_runs(results, runs_of(results, folders), own)]
    return page(title or f"Report on {_name(folders[0])}", _facts(results.runs), parts)


def of_two(sides: Sequence[Results], folders: Sequence[Path], judge: Judge, title: str | None, own: str) -> Html:
    """Builds the page on the changes between two folders. Raises ValueError if they have no cell in common."""
    a, b = sides
    found = judge.compare_runs(a, b)
    if not found.pairs:
        raise ValueError(f"no cell of {folders[0]} is also in {folders[1]}; `zerobench report` of each shows its cells")
    inside = join(
        [answers(list(compared.summary(found))), compared.figures(found), grid(compared.table(found), "Cells")]
    )
    both = a.with_runs(pd.concat([a.runs, b.runs], ignore_index=True))
    runs = [*runs_of(a, folders[:1]), *runs_of(b, folders[1:])]  # apart: equal code names runs alike
    marks = ["A"] * len(a.runs) + ["B"] * len(b.runs)
    parts = [
        PagePart("verdict", "What moved", "What moved from A to B", inside),
        PagePart("cells", "Cell by cell", "Cell by cell", compared.pairs(found, LIGHT)),
        *_about_runs(both, runs, own, marks),
    ]
    facts = [f"A: {folders[0]}, {show_count(len(a.runs), 'run')}", f"B: {folders[1]}, {show_count(len(b.runs), 'run')}"]
    return page(title or f"{_name(folders[0])} against {_name(folders[1])}", [*facts, _when()], parts)


def _name(folder: Path) -> str:
    return folder.resolve().name


def _when() -> str:
    made_by = installed_version("zerobench") or "of a checkout"
    return f"written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by zerobench {made_by}"


def _facts(runs: pd.DataFrame) -> list[str]:
    ended = Counter(runs["status"]).most_common()
    days = sorted({str(started)[:10] for started in runs["started"]})
    cells = show_count(runs["cell_id"].nunique(), "cell")
    counted = f"{show_count(len(runs), 'run')} of {cells}: {', '.join(f'{n} {status}' for status, n in ended)}"
    return [counted, f"recorded {days[0]}" + (f" to {days[-1]}" if len(days) > 1 else ""), _when()]


def _verdict(settings: Sequence[Setting], judge: Judge) -> Html:
    told = [h("p", words) for words in overall(settings, judge)]
    drawn = settings[:MOST]
    cards = [_card(setting, judge, place < OPEN, len(drawn)) for place, setting in enumerate(drawn)]
    if left := settings[MOST:]:
        words = (
            f"Of {show_count(len(left), 'more setting')} the table has the cells; `zerobench report --where KEY=VALUE`"
        )
        told.append(h("p", f"{words} shows those that you choose."))
    more = details(f"{show_count(len(cards) - OPEN, 'more setting')}", join(cards[OPEN:]), lazy=False)
    return join([*told, *cards[:OPEN], *([more] if len(cards) > OPEN else [])])


def _card(setting: Setting, judge: Judge, is_open: bool, count: int) -> Html:
    beside = costs(setting, judge)
    inside = join([
        answers(list(verdict_of(setting, judge))),
        figures_of(setting) if setting.ok else "",
        grid(beside, f"Costs: {setting.title}") if beside else "",
    ])  # fmt: skip
    if is_open:
        return h("article", h("h3", setting.title), inside, class_="card")
    return details(setting.title, inside, count > LIGHT, class_="card")


def _about_runs(
    results: Results, runs: Sequence[ReportedRun], own: str, marks: Sequence[str] | None = None
) -> list[PagePart]:
    """Returns the parts that both pages have. `runs`: of `results`; `marks`: the side of each."""
    told = {*told_of(runs, ok=True), *told_of(runs, ok=False)}
    links = [f"run-{place}" if place in told else None for place in range(len(runs))]
    table = runs_table(columns_of_runs(results, marks), links)
    bad = sum(run.row["status"] != "ok" for run in runs)
    parts = [PagePart("runs", "Runs", "Runs", table)]
    parts += [PagePart("failures", f"Failures ({bad})", "Failures", failures(runs))] * bool(bad)
    if differs := differing(results.runs):
        parts.append(
            PagePart("differs", "What differs", "What differs between configs", grid(differs, "Keys that differ"))
        )
    parts += [PagePart("accounts", "Accounts", "Accounts, run by run", _accounts(runs))] * (bad < len(runs))
    made = grid(origin(results.runs), "Origin of the runs")
    parts.append(PagePart("provenance", "Provenance", "Provenance", made))
    return [*parts, PagePart("reproduce", "Reproduce", "Commands to reproduce", commands(results.runs, own))]


def _accounts(runs: Sequence[ReportedRun]) -> Html:
    with progress_bar("accounts", len(told_of(runs, ok=True)), "runs") as advance:
        said = h(
            "p", "Memory, traffic and time of each run as `zerobench show` prints them, with residuals.", class_="dim"
        )
        return join([said, accounts(runs, advance)])
