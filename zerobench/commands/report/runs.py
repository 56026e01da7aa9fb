"""Parts of the page that are about runs one by one: accounts, failures with their logs, origin, commands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pandas as pd

from ...config.cell import CellConfig
from ...config.flat import swept
from ...config.names import name_cells, show_value
from ...results.tables import Results, of_run, run_folders
from ..account.account import passages_of, setting_of
from ..text_blocks import Grid
from .markup import Html, details, h, join, listing, parts

Row = dict[str, Any]

LIGHT = 40
"""Accounts up to which a page holds them as elements; more of them are text until they are opened."""

MOST = 60
"""Accounts, and failures with their logs, that a page has at most."""

VALUES = 8
"""Values of a key that are listed."""

ORIGIN = ("commit", "source_hash", "torch_version", "device_class", "processor", "cores", "backend")
"""Columns of a run that say by what code and on what machine it was made."""


@dataclass(frozen=True)
class Run:
    """A run with its cell's name, its folder where it has one, and its place among the runs of `whole`."""

    row: Row
    name: str
    folder: Path | None
    whole: Results
    place: int

    def results(self) -> Results:
        """Returns the tables of this run alone."""
        if self.folder is not None:
            return of_run(self.whole, self.place, self.folder)
        return self.whole.of([self.row["run_id"]])


def runs_of(results: Results, folders: Sequence[Path]) -> list[Run]:
    """Splits results by run; `folders`: where they were read."""
    known = {folder.name: folder for where in folders for folder in run_folders(where)}
    rows: list[Row] = results.runs.to_dict("records")  # type: ignore[assignment]
    names = name_cells([CellConfig.from_json(row["config"]) for row in rows])
    named = enumerate(zip(rows, names, strict=True))
    return [Run(row, name, known.get(row["run_id"]), results, place) for place, (row, name) in named]


def told_of(runs: Sequence[Run], ok: bool) -> list[int]:
    """Returns the places of the runs that the page has an account of, or else the failures with their logs: of many the
    newest.
    """
    return [place for place, run in enumerate(runs) if (run.row["status"] == "ok") is ok][-MOST:]


def _left(runs: Sequence[Run], ok: bool) -> Html:
    """Builds a sentence on the runs of which only the table tells."""
    count = sum((run.row["status"] == "ok") is ok for run in runs)
    words = f"The newest {MOST} of {count}; `zerobench show RUN` prints any of them."
    return h("p", words, class_="dim") if count > MOST else Html("")


def accounts(runs: Sequence[Run], tick: Callable[[], None]) -> Html:
    """Builds an account per run that is ok, of many of the newest, closed; `tick` is called for each."""
    places = told_of(runs, ok=True)
    told = (_account(place, runs[place], len(places) > LIGHT, tick) for place in places)
    return join([_left(runs, ok=True), *told])


def _account(place: int, run: Run, lazy: bool, tick: Callable[[], None]) -> Html:
    tick()
    facts = join(h("div", h("dt", label), h("dd", words)) for label, words in setting_of(run.row))
    told = [join([h("h4", one.title), parts(one.parts)]) for one in passages_of(run.row, run.results(), run.folder)]
    head = join([run.name, h("span", run.row["run_id"], class_="dim")], between=" ")
    return details(head, join([h("dl", facts), *told]), lazy, id=f"run-{place}")


def failures(runs: Sequence[Run]) -> Html:
    """Builds, for each run that is not ok, of many for the newest, its reason and the ends of its logs."""
    found = [(place, runs[place]) for place in told_of(runs, ok=False)]
    told = (
        h(
            "article",
            h("h3", run.name, h("span", run.row["status"], class_="status bad")),
            h("p", run.row["reason"] or "no reason is recorded"),
            h("p", run.row["run_id"], class_="dim"),
            *_logs(run),
            id=f"run-{place}",
        )
        for place, run in found
    )
    return join([_left(runs, ok=False), *told])


def _logs(run: Run) -> Iterator[Html]:
    found = passages_of(run.row, run.whole, run.folder)
    if not found:
        where = "its logs are empty" if run.folder is not None else "the tables were collected without the runs' logs"
        yield h("p", f"No log: {where}.", class_="dim")
    for one in found:
        yield h("h4", one.title)
        yield listing(one.parts)


def differing(runs: pd.DataFrame) -> Grid | None:
    """Returns the keys in which configs differ, each with its values and how many runs have them."""
    found = swept(list(runs["config"]))
    rows = [[key, *_counted(values)] for key, values in found.items()]
    return Grid(["key", "values, and the runs that have them", "values"], rows, left=2) if rows else None


def _counted(values: Sequence[Any]) -> list[str]:
    counts = Counter("not a key of it" if value is None else show_value(value) for value in values)
    listed = [f"{value} ({number})" for value, number in counts.most_common(VALUES)]
    return [", ".join(listed) + f" and {len(counts) - VALUES} more" * (len(counts) > VALUES), str(len(counts))]


def origin(runs: pd.DataFrame) -> Grid:
    """Returns the code and the machines that made the runs, a row each, with their number and days."""
    rows = []
    for key, mine in runs.groupby(list(ORIGIN), sort=False, dropna=False):
        days = sorted({str(started)[:10] for started in mine["started"]})
        when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        told = ["not known" if pd.isna(value) else str(value) for value in cast("tuple[Any, ...]", key)]
        rows.append([told[0][:12] if told[0] != "not known" else told[0], *told[1:], when, str(len(mine))])
    names = ["commit", "code", "torch", "device", "processor", "cores", "backend", "recorded", "runs"]
    return Grid(names, rows, left=8)


def commands(runs: pd.DataFrame, own: str) -> Html:
    """Builds the commands that made the runs, by commit, and the one that made the page."""
    blocks = []
    for commit, mine in runs.groupby("commit", sort=False, dropna=False):
        lines = [f"git checkout {commit}"] if isinstance(commit, str) else []
        blocks.append(_copied([*lines, *dict.fromkeys(mine["command"])]))
    return join([*blocks, h("p", "This page:"), _copied([own])])


def _copied(lines: Sequence[str]) -> Html:
    return h("div", h("button", "Copy", type="button", data_copy=True), listing(lines), class_="command")
