"""Parts of the page on runs, one by one: their table, accounts, failures with their logs, origin, commands.

The table has the columns of a sweep's table first, then swept keys, then every column for which any run has a value. A
column has `texts`, which are shown, and `values`, by which it is sorted and filtered.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pandas as pd

from ...config.cell import CellConfig
from ...config.flat import name_cells, show_value, swept
from ...records.describe import columns_of
from ...results.frames import show_figure
from ...results.grid import Grid
from ...results.printed_table import COLUMNS
from ...results.tables import Results, of_run, run_folders
from ...sizes import counted

Row = dict[str, Any]

VALUES = 8
"""Most values of a key that are listed."""

ORIGIN = {
    "commit": "commit", "source_hash": "code", "torch_version": "torch", "device_class": "device",
    "processor": "processor", "cores": "cores", "backend": "backend",
}  # fmt: skip
"""Columns of a run on the code and the machine that made it -> their headings."""

LONG = ("config", "formulas")
"""Columns that are documents of their own, shown elsewhere: in the differences between configs and in each account."""


@dataclass(frozen=True, eq=False)
class ReportedRun:
    """A run with its cell's name, its folder if it has one, and its index among the runs of `whole`."""

    row: Row
    name: str
    folder: Path | None
    whole: Results
    index: int

    def results(self) -> Results:
        """Returns the tables of this run alone."""
        if self.folder is not None:
            return of_run(self.whole, self.index, self.folder)
        return self.whole.of([self.row["run_id"]])


def runs_of(results: Results, folders: Sequence[Path]) -> list[ReportedRun]:
    """Splits results by run; `folders`: where they were read."""
    by_name = {folder.name: folder for where in folders for folder in run_folders(where)}
    rows: list[Row] = results.runs.to_dict("records")  # type: ignore[assignment]
    names = name_cells([CellConfig.from_json(row["config"]) for row in rows])
    return [
        ReportedRun(row, name, by_name.get(row["run_id"]), results, index)
        for index, (row, name) in enumerate(zip(rows, names, strict=True))
    ]


def differing(runs: pd.DataFrame) -> Grid | None:
    """Returns the keys in which configs differ, each with its values and the number of runs that have them."""
    rows = []
    for key, values in swept(list(runs["config"])).items():
        counts = Counter("not a key of it" if value is None else show_value(value) for value in values)
        listed = ", ".join(f"{value} ({number})" for value, number in counts.most_common(VALUES))
        listed += f" and {len(counts) - VALUES} more" if len(counts) > VALUES else ""
        rows.append([key, listed, str(len(counts))])
    return Grid(["key", "values, and the runs that have them", "values"], rows, left=2) if rows else None


def origin(runs: pd.DataFrame) -> Grid:
    """Returns the code and the machines that made the runs, a row each, with number of runs and days."""
    rows = []
    for key, group in runs.groupby(list(ORIGIN), sort=False, dropna=False):
        commit, *others = ("not known" if pd.isna(value) else str(value) for value in cast("tuple[Any, ...]", key))
        rows.append([commit if commit == "not known" else commit[:12], *others, days_of(group), str(len(group))])
    return Grid([*ORIGIN.values(), "recorded", "runs"], rows, left=8)


def days_of(runs: pd.DataFrame) -> str:
    """Formats the day, or the first and the last one, on which runs began."""
    days = sorted({str(started)[:10] for started in runs["started"]})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def commands(runs: pd.DataFrame) -> Iterator[list[str]]:
    """Yields the commands that made the runs, by commit."""
    for commit, group in runs.groupby("commit", sort=False, dropna=False):
        yield [*([f"git checkout {commit}"] if isinstance(commit, str) else []), *dict.fromkeys(group["command"])]


@dataclass(frozen=True)
class PageColumn:
    """A column with a value and a text per run; `shown` initially, or only when selected. `number`: its values are."""

    name: str
    meaning: str
    number: bool
    shown: bool
    values: list[Any]
    texts: list[str]


def columns_of_runs(results: Results, sides: Sequence[str] | None = None) -> list[PageColumn]:
    """Returns the columns of the runs, in order. `sides`: in a comparison, the side of each run."""
    rows: list[Row] = results.runs.assign(launches=1).astype("object").to_dict("records")  # type: ignore[assignment]
    leading = {"cell": ("Name of the run's cell", name_cells([CellConfig.from_json(row["config"]) for row in rows]))}
    if sides is not None:
        leading["side"] = ("A before, B after", list(sides))
    leading["status"] = ("How the run ended", [str(row["status"]) for row in rows])
    columns = [PageColumn(name, meaning, False, True, texts, texts) for name, (meaning, texts) in leading.items()]
    ok = [row for row in rows if row["status"] == "ok"]
    all_columns = {column.name: column for column in columns_of("runs")}
    for name, column in COLUMNS.items():
        if any(map(column.is_shown, ok)):
            meaning = all_columns[column.key].meaning if column.key else name
            texts = [column.show(row) if row["status"] == "ok" else "–" for row in rows]
            exact = [_plain(row[column.key]) if column.key else text for row, text in zip(rows, texts, strict=True)]
            values = [None if text == "–" else value for value, text in zip(exact, texts, strict=True)]
            columns.append(PageColumn(name, meaning, name != "trains", True, values, texts))
    sweep, taken = results.sweep(), {column.name for column in columns}
    for key in (str(key) for key in sweep.columns if key not in results.runs.columns and key not in taken):
        values = [_plain(value) for value in sweep[key]]
        texts = ["–" if value is None else str(value) for value in values]
        columns.append(PageColumn(key, f"Key {key} of the config", False, False, values, texts))
    rate = f"{counted(row['sequence'] for row in rows)} /"
    for key, described in all_columns.items():
        values = [_plain(row[key]) for row in rows]
        if key not in (*LONG, "status") and any(value is not None for value in values):
            unit = f" ({described.unit})".replace("tokens /", rate) if described.unit else ""
            texts = [show_figure(value, described.unit) for value in values]
            number = described.kind in ("int", "float")
            columns.append(PageColumn(key, described.meaning + unit, number, False, values, texts))
    return columns


def _plain(value: Any) -> Any:
    """Converts a value to one that JSON can represent."""
    if value is None or pd.isna(value):
        return None
    value = value.item() if hasattr(value, "item") else value
    return value if not isinstance(value, float) or math.isfinite(value) else None


def as_json(columns: Sequence[PageColumn]) -> str:
    """Formats the columns for the page's script: texts only if they differ from the values; for a column with many
    repeats, its distinct values and texts, with their index (`of`) for each run.
    """
    written = []
    for column in columns:
        pairs = list(zip(column.values, column.texts, strict=True))
        index = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
        repeats = 2 * len(index) < len(pairs)
        values, texts = map(list, zip(*(index if repeats else pairs), strict=True))
        record = {"name": column.name, "meaning": column.meaning, "number": column.number, "shown": column.shown}
        record |= {"values": values} | ({"texts": texts} if texts != values else {})
        written.append(record | ({"of": [index[pair] for pair in pairs]} if repeats else {}))
    # "<" would end the element that contains it
    return json.dumps(written, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
