"""Reads the tables of runs into pandas (results/folders.py writes them). A run's folder::

    config.yaml  provenance.json  run.json  logs/  and steps, memory, timeline, tensors, lines, traffic as parquet,
    and events where they were asked for

A *collection* (`zerobench export --format parquet`) holds the same tables of many runs, one parquet file each.
`load` reads a run, a results folder, a collection, or a folder of collections.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from ..host.files import read_text
from ..records import EventRow, LineRow, MemoryRow, RunRow, SearchRow, StepRow, TensorRow, TimelineRow, TrafficRow
from . import table_cache
from .attempts import by_number, in_order
from .frames import concatenate, read_table, to_frame, write_frame
from .results import Results as Results
from .row_checks import problem_of_columns, problem_of_run, problem_of_values, problem_of_version

TABLES: dict[str, type] = {
    "steps": StepRow,
    "memory": MemoryRow,
    "timeline": TimelineRow,
    "tensors": TensorRow,
    "lines": LineRow,
    "traffic": TrafficRow,
    "events": EventRow,
}
"""The long tables, whose rows carry `run_id`."""
OPTIONAL = ("events",)
"""Tables that have no file where they have no rows."""

ALL_TABLES = {"runs": RunRow, "searches": SearchRow, **TABLES}

SEARCHES = "searches"
"""The folder, in a results folder, of the results of searches: a JSON file each."""

CODE = ("source_hash", "torch_version", "device_class")
"""Columns in which launches of a cell must agree to be the same measurement."""


def load(path: str | Path) -> Results:
    """Reads a run's folder, all runs in a results folder, or a collection; runs are in the order in which they began.

    Damaged runs, and those of a newer version, are left out with a warning. Raises FileNotFoundError where there is no
    such folder.
    """
    where = Path(path)
    if not where.is_dir():
        raise FileNotFoundError(f"{where}: there is no such results folder")
    parts = [_load_runs(where), *(one for c in collections_in(where) if (one := _read_collection(c)) is not None)]
    tables = {name: to_frame([one[name] for one in parts], kind, "run_id") for name, kind in TABLES.items()}
    runs = to_frame([in_order([one["runs"] for one in parts])], RunRow)
    searches = [pd.DataFrame(read_searches(where)), *(one["searches"] for one in parts)]
    return Results(runs, **tables, searches=to_frame(searches, SearchRow))


def _load_runs(where: Path) -> dict[str, pd.DataFrame]:
    """Reads the tables of the runs in a results folder; cached ones from few files."""
    folders = run_folders(where)
    cache, known = table_cache.recall(where, folders)
    remembered = _recall(cache, set(known)) if cache and known else None
    known = known if remembered else {}
    found = [run for folder in folders if folder.name not in known and (run := _read_run(folder)) is not None]
    tables = {"runs": pd.DataFrame([row for row, _ in found]), "searches": pd.DataFrame()}
    for name, kind in TABLES.items():
        tables[name] = concatenate([long_tables[name] for _, long_tables in found], kind)
    if remembered:
        tables = {name: _together(remembered[name], new, name) for name, new in tables.items()}
    new = {row["run_id"] for row, _ in found}
    if table_cache.is_due(len(new), len(known)):
        index = known | {one.name: table_cache.signature(one) for one in folders if one.name in new}
        whole = {name: to_frame([frame], *_shape_of(name)) for name, frame in tables.items()}
        table_cache.keep(where, index, partial(collect, Results(**whole).of(index)))
    return tables | {"runs": by_number(tables["runs"])} if len(tables["runs"]) else tables


def _together(remembered: pd.DataFrame, new: pd.DataFrame, name: str) -> pd.DataFrame:
    """Merges a table's cached rows and its new ones, in the order in which they would have been read from the runs."""
    whole = to_frame([remembered, new], *_shape_of(name))
    return whole if new.empty else whole.sort_values("run_id", kind="stable", ignore_index=True)


def _recall(cache: Path, known: set[str]) -> dict[str, pd.DataFrame] | None:
    """Reads the cached tables of the runs `known`; None where the cache is damaged."""
    try:
        tables = {name: read_table(cache / f"{name}.parquet", kind).to_pandas() for name, kind in ALL_TABLES.items()}
    except ValueError:
        return None
    whole = all((cache / f"{name}.parquet").is_file() for name in ALL_TABLES if name not in OPTIONAL)
    if not whole or not known <= set(tables["runs"]["run_id"]):
        return None
    return {name: one[one["run_id"].isin(known)] if "run_id" in one else one for name, one in tables.items()}


def merge(parts: Sequence[Results]) -> Results:
    """Concatenates the tables of all parts; runs in the order in which they began."""
    tables = {name: to_frame([getattr(p, name) for p in parts], kind, "run_id") for name, kind in TABLES.items()}
    runs = to_frame([in_order([p.runs for p in parts])], RunRow)
    return Results(runs, **tables, searches=to_frame([p.searches for p in parts], SearchRow))


def _read_run(folder: Path) -> tuple[dict[str, Any], dict[str, pa.Table]] | None:
    """Reads a run's row and its long tables; None, with a warning, where a file is damaged."""
    row = read_row(folder)
    if row is None:
        return None
    try:
        return row, {name: read_table(folder / f"{name}.parquet", kind, row["run_id"]) for name, kind in TABLES.items()}
    except ValueError as error:
        warnings.warn(f"{folder} has a damaged table and is left out: {error}", stacklevel=3)
        return None


def is_whole(folder: Path) -> bool:
    """Returns True where every table of a run can be read."""
    return _read_run(folder) is not None


def _read_collection(folder: Path) -> dict[str, pd.DataFrame] | None:
    """Reads the tables of a collection without its invalid runs; None, with a warning, where one is damaged."""
    try:
        tables = {name: read_table(folder / f"{name}.parquet", kind).to_pandas() for name, kind in ALL_TABLES.items()}
    except ValueError as error:
        warnings.warn(f"{folder} has a damaged table and is left out: {error}", stacklevel=3)
        return None
    rows = tables["runs"].astype("object").where(tables["runs"].notna(), None).to_dict("records")
    problems = [problem_of_run(row) for row in rows]
    for row, problem in zip(rows, problems, strict=True):
        if problem:
            warnings.warn(f"{folder}: {row.get('run_id')} is left out: {problem}", stacklevel=3)
    return tables | {"runs": tables["runs"][[not problem for problem in problems]]}


def run_folders(where: Path) -> list[Path]:
    """Returns `where` itself if it is a run, else the runs in it."""
    if (where / "run.json").is_file():
        return [where]
    return sorted(p for p in where.iterdir() if not p.name.startswith(".") and (p / "run.json").is_file())


def collections_in(where: Path) -> list[Path]:
    """Returns `where` itself if it is a collection, else those directly in it."""
    if (where / "runs.parquet").is_file():
        return [where]
    return sorted(p for p in where.iterdir() if not p.name.startswith(".") and (p / "runs.parquet").is_file())


def read_row(folder: Path) -> dict[str, Any] | None:
    """Reads a run's row; None, with a warning, where its run.json cannot be used: other runs must not be affected.

    A copy beside its original is skipped too, since its rows would count twice.
    """
    row = _read_json_row(folder / "run.json", RunRow)
    if row is not None and folder.name != row["run_id"] and (folder.parent / row["run_id"] / "run.json").is_file():
        warnings.warn(f"{folder} is left out: it is a copy of {row['run_id']}", stacklevel=2)
        return None
    return row


def read_searches(where: Path) -> list[dict[str, Any]]:
    """Reads the searches of a results folder, without those of its collections; damaged ones are left out, with a
    warning.
    """
    rows = (_read_json_row(path, SearchRow) for path in sorted((where / SEARCHES).glob("*.json")))
    return [row for row in rows if row is not None]


def _read_json_row(path: Path, kind: type) -> dict[str, Any] | None:
    try:
        row: dict[str, Any] = dict(json.loads(read_text(path)))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        warnings.warn(f"{path} cannot be read and is left out: {error}", stacklevel=3)
        return None
    problem = problem_of_version(row) or problem_of_columns(row, kind) or problem_of_values(row, kind)
    problem = problem or (problem_of_run(row) if kind is RunRow else "")
    if problem:
        warnings.warn(f"{path} is left out: {problem}", stacklevel=3)
        return None
    return {f.name: None for f in fields(kind) if f.default is not MISSING} | row


def latest(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the newest launches of each cell, all by the same code, the newest of each repeat; cells in their first
    order.
    """
    kept: list[Any] = []
    for _, mine in runs.groupby("cell_id", sort=False):
        same = (mine[list(CODE)] == mine[list(CODE)].iloc[-1]).all(axis=1)
        kept += list(mine[same].groupby("repeat", sort=True).tail(1).sort_values("repeat").index)
    return runs.loc[kept]


def collect(results: Results, folder: Path) -> None:
    """Writes a collection: every table as one parquet file. Replaces an existing one."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, kind in ALL_TABLES.items():
        if name in OPTIONAL and getattr(results, name).empty:
            (folder / f"{name}.parquet").unlink(missing_ok=True)
        else:
            write_frame(folder / f"{name}.parquet", getattr(results, name), kind, with_run_id=name in TABLES)


def _shape_of(name: str) -> tuple[Any, ...]:
    """Returns the row type of a table, and its column of runs where it is a long one."""
    return (ALL_TABLES[name], *(["run_id"] if name in TABLES else []))
