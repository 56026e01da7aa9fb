"""Content of the page, of one folder and of two: which parts it has, and what they are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.progress import Progress

from ...host.installed import installed_version
from ...judging.comparison import compare_runs
from ...results.tables import Results
from ...sizes import show_count
from . import compared
from .columns import columns_of_runs
from .figures import figures_of
from .markup import Html, details, grid, h, join
from .page import Part, answers, page, runs_table
from .runs import LIGHT, Run, accounts, commands, differing, failures, origin, runs_of, told_of
from .settings import Setting, settings_of
from .verdict import Judge, costs, overall, verdict_of

MOST = 24
"""Settings that a page draws at most."""

OPEN = 3
"""Settings that are shown from the start; the others open on a click."""


def of_runs(sides: Sequence[Results], folders: Sequence[Path], judge: Judge, title: str | None, own: str) -> Html:
    """Builds the page on one folder."""
    results = sides[0]
    settings = settings_of(results.runs)
    verdict = Part("verdict", "Verdict", "Verdict", _verdict(settings, judge))
    parts = [verdict, *_about_runs(results, runs_of(results, folders), own)]
    return page(title or f"Report on {_name(folders[0])}", _facts(results.runs), parts)


def of_two(sides: Sequence[Results], folders: Sequence[Path], judge: Judge, title: str | None, own: str) -> Html:
    """Builds the page on what moved from one folder to another. Raises ValueError where they have no cell in common."""
    a, b = sides
    found = compare_runs(a.runs, b.runs, judge.minimum_effect, list(judge.floors), (a.lines, b.lines))
    if not found.pairs:
        raise ValueError(
            f"no cell of {folders[0]} is also in {folders[1]}; `zerobench report` of each tells what is there"
        )
    inside = join(
        [answers(list(compared.summary(found))), compared.figures(found), grid(compared.table(found), "Cells")]
    )
    both = a.with_runs(pd.concat([a.runs, b.runs], ignore_index=True))
    runs = [*runs_of(a, folders[:1]), *runs_of(b, folders[1:])]  # apart: equal code names runs alike
    marks = ["A"] * len(a.runs) + ["B"] * len(b.runs)
    parts = [
        Part("verdict", "What moved", "What moved from A to B", inside),
        Part("cells", "Cell by cell", "Cell by cell", compared.pairs(found, LIGHT)),
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


def _about_runs(results: Results, runs: Sequence[Run], own: str, marks: Sequence[str] | None = None) -> list[Part]:
    """Returns the parts that both pages have. `runs`: those of `results`; `marks`: the side of each."""
    told = {*told_of(runs, ok=True), *told_of(runs, ok=False)}
    links = [f"run-{place}" if place in told else None for place in range(len(runs))]
    table = runs_table(columns_of_runs(results, marks), links)
    bad = sum(run.row["status"] != "ok" for run in runs)
    parts = [Part("runs", "Runs", "Runs", table)]
    parts += [Part("failures", f"Failures ({bad})", "Failures", failures(runs))] * bool(bad)
    if differs := differing(results.runs):
        parts.append(Part("differs", "What differs", "What differs between configs", grid(differs, "Keys that differ")))
    parts += [Part("accounts", "Accounts", "Accounts, run by run", _accounts(runs))] * (bad < len(runs))
    made = grid(origin(results.runs), "Origin of the runs")
    parts.append(Part("provenance", "Provenance", "Provenance", made))
    return [*parts, Part("reproduce", "Reproduce", "Commands to reproduce", commands(results.runs, own))]


def _accounts(runs: Sequence[Run]) -> Html:
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("accounts", total=len(told_of(runs, ok=True)))
        said = h(
            "p", "Memory, traffic and time of each run as `zerobench show` prints them, with residuals.", class_="dim"
        )
        return join([said, accounts(runs, lambda: progress.advance(task))])
