"""Equality of runs and searches whatever they are called, and what a results folder holds by content.

launch    all columns of a run's row but its name: one launch has one start, one duration, one outcome
equal     two runs are, where their launches are and every file of theirs, logs too, has the same bytes
"""

from __future__ import annotations

import filecmp
import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pandas as pd

from ...records import RunRow, SearchRow
from ...results.row_checks import columns_of
from ...results.selection import split
from ...results.tables import collections_in, load, read_row, read_searches, run_folders

Row = dict[str, Any]

ROW = "run.json"


@dataclass
class Contents:
    """A results folder by content. `runs`: launch -> names of its runs with a folder; `collected`: launch -> its name
    in a collection; `searches`: what a search says -> its id; `names`: all names that are taken.
    """

    where: Path
    runs: dict[str, list[str]] = field(default_factory=dict)
    collected: dict[str, str] = field(default_factory=dict)
    searches: dict[str, str] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def like(self, row: Row, folder: Path | None) -> str | None:
        """Returns the name of an equal run; None without one. `folder`: its files, None for a collection's row."""
        launch = launch_of(row)
        for name in self.runs.get(launch, []):
            if folder is None or same_files(folder, self.where / name):
                return name
        return self.collected.get(launch)

    def free(self, name: str) -> str:
        """Returns the name, or where it is taken or has no number that of the next attempt."""
        prefix, number = split(name)
        if number and name not in self.names:
            return name
        taken = [known for other, known in map(split, self.names) if other == prefix]
        return f"{prefix}-{1 + max(taken, default=0)}"

    def add(self, row: Row, name: str, collected: bool = False) -> None:
        """Adds a run."""
        self.names.add(name)
        if collected:
            self.collected.setdefault(launch_of(row), name)
        else:
            self.runs.setdefault(launch_of(row), []).append(name)


def contents(where: Path) -> Contents:
    """Reads what a results folder holds; one that does not exist holds nothing."""
    found = Contents(where)
    if not where.is_dir():
        return found
    found.names |= {path.name for path in where.iterdir()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # damaged runs are equal to none
        for folder in run_folders(where):
            if (row := read_row(folder)) is not None:
                found.add(row, folder.name)
        searches = read_searches(where)
        for collection in collections_in(where):
            results = load(collection)
            searches += rows_of(results.searches)
            for row in rows_of(results.runs):
                found.add(row, row["run_id"], collected=True)
        found.searches = {search_of(row): row["search_id"] for row in searches}
    return found


def files_of(folder: Path) -> Iterator[Path]:
    """Yields the paths, relative to a run's folder, of its files. Links and hidden files are no part of a run."""
    for at, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = [Path(at) / name for name in sorted(names) if not name.startswith(".")]
        yield from (path.relative_to(folder) for path in paths if path.is_file() and not path.is_symlink())


def same_files(one: Path, other: Path) -> bool:
    """Returns True where two runs have the same files, whatever their rows say."""
    here, there = ([path for path in files_of(run) if str(path) != ROW] for run in (one, other))
    try:
        return here == there and all(filecmp.cmp(one / path, other / path, shallow=False) for path in here)
    except OSError:  # one is removed meanwhile
        return False


def rows_of(frame: pd.DataFrame) -> list[Row]:
    """Returns the rows of a frame, missing values as None."""
    plain = frame.astype("object")
    return plain.where(plain.notna(), None).to_dict("records")  # type: ignore[return-value]


def launch_of(row: Row) -> str:
    """Returns a row's launch; it is the same whether read from JSON or from parquet."""
    return _said(row, RunRow, "run_id")


def search_of(row: Row) -> str:
    """Returns what a search says, without its id."""
    return _said(row, SearchRow, "search_id")


def _said(row: Row, kind: type, *but: str) -> str:
    bases = dict(columns_of(kind))
    names = [one.name for one in fields(kind) if one.name not in (*but, "schema_version")]
    values = [None if row.get(name) is None else bases[name](row[name]) for name in names]
    return json.dumps([None if value != value else value for value in values])
