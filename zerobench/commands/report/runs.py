"""Parts of the page on runs, one by one: their table, accounts, failures with their logs, origin, commands.

The table has the columns of a sweep's table first, then swept keys, then every column for which any run has a value. A
column has `texts`, which are shown, and `values`, by which it is sorted and filtered.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pandas as pd

from ...config.cell import CellConfig
from ...config.flat import name_cells, show_value, swept
from ...records.describe import columns_of
from ...results.grid import Grid
from ...results.markup import Html, details, h, join, listing, parts
from ...results.printed_table import COLUMNS
from ...results.tables import Results, of_run, run_folders
from ...sizes import counted, show_bytes
from ..account.account import passages_of, setting_of

Row = dict[str, Any]

LIGHT = 40
"""Most accounts that a page stores as elements; if there are more, they stay text until they are opened."""

MOST = 60
"""Most accounts, and most failures with their logs, on a page."""

VALUES = 8
"""Most values of a key that are listed."""

ORIGIN = ("commit", "source_hash", "torch_version", "device_class", "processor", "cores", "backend")
"""Columns of a run on the code and the machine that made it."""


@dataclass(frozen=True)
class ReportedRun:
    """A run with its cell's name, its folder if it has one, and its place among the runs of `whole`."""

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


def runs_of(results: Results, folders: Sequence[Path]) -> list[ReportedRun]:
    """Splits results by run; `folders`: where they were read."""
    known = {folder.name: folder for where in folders for folder in run_folders(where)}
    rows: list[Row] = results.runs.to_dict("records")  # type: ignore[assignment]
    names = name_cells([CellConfig.from_json(row["config"]) for row in rows])
    named = enumerate(zip(rows, names, strict=True))
    return [ReportedRun(row, name, known.get(row["run_id"]), results, place) for place, (row, name) in named]


def told_of(runs: Sequence[ReportedRun], ok: bool) -> list[int]:
    """Returns the places of the runs with an account on the page or, if not `ok`, of the failures with their logs; at
    most the newest MOST.
    """
    return [place for place, run in enumerate(runs) if (run.row["status"] == "ok") is ok][-MOST:]


def _left(runs: Sequence[ReportedRun], ok: bool) -> Html:
    """Builds a note on the runs that only the table shows."""
    count = sum((run.row["status"] == "ok") is ok for run in runs)
    words = f"The newest {MOST} of {count}; `zerobench show RUN` prints any of them."
    return h("p", words, class_="dim") if count > MOST else Html("")


def accounts(runs: Sequence[ReportedRun], tick: Callable[[], None]) -> Html:
    """Builds a collapsed account per ok run, at most the newest MOST; `tick` is called for each."""
    places = told_of(runs, ok=True)
    told = (_account(place, runs[place], len(places) > LIGHT, tick) for place in places)
    return join([_left(runs, ok=True), *told])


def _account(place: int, run: ReportedRun, lazy: bool, tick: Callable[[], None]) -> Html:
    tick()
    facts = join(h("div", h("dt", label), h("dd", words)) for label, words in setting_of(run.row))
    told = [join([h("h4", one.title), parts(one.parts)]) for one in passages_of(run.row, run.results(), run.folder)]
    head = join([run.name, h("span", run.row["run_id"], class_="dim")], between=" ")
    return details(head, join([h("dl", facts), *told]), lazy, id=f"run-{place}")


def failures(runs: Sequence[ReportedRun]) -> Html:
    """Builds the reason and the ends of the logs for each run that is not ok, at most the newest MOST."""
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


def _logs(run: ReportedRun) -> Iterator[Html]:
    found = passages_of(run.row, run.whole, run.folder)
    if not found:
        where = "its logs are empty" if run.folder is not None else "the tables were collected without the runs' logs"
        yield h("p", f"No log: {where}.", class_="dim")
    for one in found:
        yield h("h4", one.title)
        yield listing(one.parts)


def differing(runs: pd.DataFrame) -> Grid | None:
    """Returns the keys in which configs differ, each with its values and the number of runs that have them."""
    found = swept(list(runs["config"]))
    rows = [[key, *_counted(values)] for key, values in found.items()]
    return Grid(["key", "values, and the runs that have them", "values"], rows, left=2) if rows else None


def _counted(values: Sequence[Any]) -> list[str]:
    counts = Counter("not a key of it" if value is None else show_value(value) for value in values)
    listed = [f"{value} ({number})" for value, number in counts.most_common(VALUES)]
    return [", ".join(listed) + f" and {len(counts) - VALUES} more" * (len(counts) > VALUES), str(len(counts))]


def origin(runs: pd.DataFrame) -> Grid:
    """Returns the code and the machines that made the runs, a row each, with number of runs and days."""
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


LONG = ("config", "formulas")
"""Columns that are documents of their own, shown elsewhere: in the differences between configs and in each account."""

EXACT = {
    "peak MiB": "peak_bytes", "host MiB": "host_peak_bytes", "files MiB": "nvme_bytes", "states MiB": "states_bytes",
    "formula": "floor_states_bytes", "predicted": "predicted_states_bytes", "down MiB": "down_bytes",
    "up MiB": "up_bytes", "volume ψ": "volume_psi", "predicted ψ": "predicted_volume_psi",
    "between nodes MiB": "between_nodes_bytes", "step ms": "step_s", "95 % interval": "step_s_low",
    "tokens/s": "tokens_per_s", "samples/s": "tokens_per_s", "last loss": "loss_last", "trains": "training",
}  # fmt: skip
"""Column of a sweep's table -> the column of a run with the exact value by which it is sorted."""


@dataclass(frozen=True)
class PageColumn:
    """A column with a text and a value per run; `shown` initially, or only when selected."""

    name: str
    meaning: str
    is_number: bool
    shown: bool
    texts: list[str]
    values: list[Any]


def columns_of_runs(results: Results, sides: Sequence[str] | None = None) -> list[PageColumn]:
    """Returns the columns of the runs, in order. `sides`: in a comparison, the side of each run."""
    rows: list[Row] = results.runs.assign(launches=1).astype("object").to_dict("records")  # type: ignore[assignment]
    names = name_cells([CellConfig.from_json(row["config"]) for row in rows])
    found = [PageColumn("cell", "Name of the run's cell", False, True, names, names)]
    if sides is not None:
        found.append(PageColumn("side", "A before, B after", False, True, list(sides), list(sides)))
    status = [str(row["status"]) for row in rows]
    found.append(PageColumn("status", "How the run ended", False, True, status, status))
    ok = [row for row in rows if row["status"] == "ok"]
    found += [_of_sweep(name, rows) for name, one in COLUMNS.items() if any(map(one.there, ok))]
    found += _swept(results, {one.name for one in found})
    meant = {column.name: column for column in columns_of("runs")}
    rate = f"{counted(row['sequence'] for row in rows)} /"
    for key, column in meant.items():
        values = [_plain(row[key]) for row in rows]
        if key not in (*LONG, "status") and any(value is not None for value in values):
            unit = f" ({column.unit})".replace("tokens /", rate) if column.unit else ""
            texts = [_shown(value, column.unit) for value in values]
            found.append(PageColumn(key, column.meaning + unit, column.kind in ("int", "float"), False, texts, values))
    return found


def _of_sweep(name: str, rows: list[Row]) -> PageColumn:
    key, one = EXACT.get(name), COLUMNS[name]
    texts = [one.show(row) if row["status"] == "ok" else "–" for row in rows]
    ends = zip(rows, texts, strict=True)
    values = [None if text == "–" else _plain(row[key]) if key else text for row, text in ends]
    meaning = next((column.meaning for column in columns_of("runs") if column.name == key), name)
    return PageColumn(name, meaning, name != "trains", True, texts, values)


def _swept(results: Results, taken: set[str]) -> list[PageColumn]:
    """Returns hidden columns of swept keys that are not columns of a run: the cells' names already show them."""
    sweep = results.sweep()
    keys = [str(key) for key in sweep.columns if key not in results.runs.columns and key not in taken]
    return [
        PageColumn(
            key, f"Key {key} of the config", False, False, ["–" if v is None else str(v) for v in values], values
        )
        for key in keys
        for values in [[_plain(value) for value in sweep[key]]]
    ]


def _plain(value: Any) -> Any:
    """Converts a value to one that JSON can represent."""
    if value is None or pd.isna(value):
        return None
    value = value.item() if hasattr(value, "item") else value
    return value if not isinstance(value, float) or math.isfinite(value) else None


def _shown(value: Any, unit: str) -> str:
    if value is None:
        return "–"
    if unit == "bytes":
        return show_bytes(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def as_json(columns: Sequence[PageColumn]) -> str:
    """Formats the columns for the page's script: texts only if they differ from the values; for a column with many
    repeats, its distinct values and texts, with their index (`of`) for each run.
    """
    told = []
    for column in columns:
        pairs = list(zip(column.values, column.texts, strict=True))
        places = {pair: place for place, pair in enumerate(dict.fromkeys(pairs))}
        repeats = 2 * len(places) < len(pairs)
        values, texts = map(list, zip(*(places if repeats else pairs), strict=True))
        told.append(
            {"name": column.name, "meaning": column.meaning, "number": column.is_number, "shown": column.shown}
            | {"values": values}
            | ({"texts": texts} if texts != values else {})
            | ({"of": [places[pair] for pair in pairs]} if repeats else {})
        )
    # "<" would end the element that contains it
    return json.dumps(told, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
