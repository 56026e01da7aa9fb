"""Reads rows from files into pandas (results/folders.py writes them). A run's folder::

    config.yaml  provenance.json  run.json  logs/  and steps, memory, timeline, tensors, lines, traffic as parquet,
    and events where they were asked for

A *collection* (`zerobench export --format parquet`) holds the same tables of many runs, one parquet file each.
`load` reads a run, a results folder, a collection, or a folder of collections.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ..config.flat import swept
from ..records import (
    SCHEMA_VERSION,
    EventRow,
    LineRow,
    MemoryRow,
    RunRow,
    SearchRow,
    StepRow,
    TensorRow,
    TimelineRow,
    TrafficRow,
)
from . import table_cache
from .attempts import by_number, in_order
from .row_checks import (
    columns_of,
    problem_of_columns,
    problem_of_run,
    problem_of_table,
    problem_of_values,
    problem_of_version,
)

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

_ARROW = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}
_PANDAS = {int: "Int64", float: "float64", str: "object", bool: "boolean"}


@dataclass(frozen=True)
class Results:
    """Tables of one or many runs. `runs`: one row per run. The others carry `run_id`; their columns: records/."""

    runs: pd.DataFrame
    steps: pd.DataFrame
    memory: pd.DataFrame
    timeline: pd.DataFrame
    tensors: pd.DataFrame
    lines: pd.DataFrame
    traffic: pd.DataFrame
    events: pd.DataFrame
    searches: pd.DataFrame

    def of(self, run_ids: Iterable[str]) -> Results:
        """Returns the tables of these runs only."""
        kept = set(run_ids)
        own = {name: (frame := getattr(self, name))[frame["run_id"].isin(kept)] for name in ("runs", *TABLES)}
        return Results(**own, searches=self.searches)

    def sweep(self) -> pd.DataFrame:
        """`runs` with a leading column for each swept key that has no column of its own, named as on the command line:
        "optimizer.lr", "model.hidden", "offload". It is empty where a run's choices have no such key.
        """
        columns = swept(list(self.runs["config"]), beside=self.runs.columns)
        values = {
            key: pd.Series(one, index=self.runs.index, dtype="object").infer_objects() for key, one in columns.items()
        }
        return pd.concat([pd.DataFrame(values, index=self.runs.index), self.runs], axis=1)


def load(path: str | Path) -> Results:
    """Reads a run's folder, all runs in a results folder, or a collection; runs are in the order in which they began.

    Damaged runs, and those of a newer version, are left out with a warning. Raises FileNotFoundError where there is no
    such folder.
    """
    where = Path(path)
    if not where.is_dir():
        raise FileNotFoundError(f"{where}: there is no such results folder")
    parts = [_load_runs(where), *(one for c in collections_in(where) if (one := _read_collection(c)) is not None)]
    tables = {name: _frame([one[name] for one in parts], kind, "run_id") for name, kind in TABLES.items()}
    runs = _frame([in_order([one["runs"] for one in parts])], RunRow)
    searches = [pd.DataFrame(_read_searches(where)), *(one["searches"] for one in parts)]
    return Results(runs, **tables, searches=_frame(searches, SearchRow))


def _load_runs(where: Path) -> dict[str, pd.DataFrame]:
    """Reads the tables of the runs in a results folder; cached ones from few files."""
    folders = run_folders(where)
    cache, known = table_cache.recall(where, folders)
    remembered = _recall(cache, set(known)) if cache and known else None
    known = known if remembered else {}
    found = [run for folder in folders if folder.name not in known and (run := _read_run(folder)) is not None]
    tables = {"runs": pd.DataFrame([row for row, _ in found]), "searches": pd.DataFrame()}
    for name, kind in TABLES.items():
        tables[name] = _below([long_tables[name] for _, long_tables in found], kind)
    if remembered:
        tables = {name: _together(remembered[name], new, name) for name, new in tables.items()}
    new = {row["run_id"] for row, _ in found}
    if table_cache.is_due(len(new), len(known)):
        index = known | {one.name: table_cache.signature(one) for one in folders if one.name in new}
        whole = {name: _frame([frame], *_shape_of(name)) for name, frame in tables.items()}
        table_cache.keep(where, index, partial(collect, Results(**whole).of(index)))
    return tables | {"runs": by_number(tables["runs"])} if len(tables["runs"]) else tables


def _together(remembered: pd.DataFrame, new: pd.DataFrame, name: str) -> pd.DataFrame:
    """Merges a table's cached rows and its new ones, in the order in which they would have been read from the runs."""
    whole = _frame([remembered, new], *_shape_of(name))
    return whole if new.empty else whole.sort_values("run_id", kind="stable", ignore_index=True)


def _recall(cache: Path, known: set[str]) -> dict[str, pd.DataFrame] | None:
    """Reads the cached tables of the runs `known`; None where the cache is damaged."""
    try:
        tables = {name: _read(cache / f"{name}.parquet", kind).to_pandas() for name, kind in ALL_TABLES.items()}
        return {name: one[one["run_id"].isin(known)] if "run_id" in one else one for name, one in tables.items()}
    except ValueError:
        return None


def merge(parts: Sequence[Results]) -> Results:
    """Concatenates the tables of all parts; runs in the order in which they began."""
    tables = {name: _frame([getattr(p, name) for p in parts], kind, "run_id") for name, kind in TABLES.items()}
    runs = _frame([in_order([p.runs for p in parts])], RunRow)
    return Results(runs, **tables, searches=_frame([p.searches for p in parts], SearchRow))


def _read_run(folder: Path) -> tuple[dict[str, Any], dict[str, pa.Table]] | None:
    """Reads a run's row and its long tables; None, with a warning, where a file is damaged."""
    row = read_row(folder)
    if row is None:
        return None
    try:
        return row, {name: _read(folder / f"{name}.parquet", kind, row["run_id"]) for name, kind in TABLES.items()}
    except ValueError as error:
        warnings.warn(f"{folder} has a damaged table and is left out: {error}", stacklevel=3)
        return None


def is_whole(folder: Path) -> bool:
    """Returns True where every table of a run can be read."""
    return _read_run(folder) is not None


def _read_collection(folder: Path) -> dict[str, pd.DataFrame] | None:
    """Reads the tables of a collection without its invalid runs; None, with a warning, where one is damaged."""
    try:
        tables = {name: _read(folder / f"{name}.parquet", kind).to_pandas() for name, kind in ALL_TABLES.items()}
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


def _read_searches(where: Path) -> list[dict[str, Any]]:
    rows = (_read_json_row(path, SearchRow) for path in sorted((where / SEARCHES).glob("*.json")))
    return [row for row in rows if row is not None]


def _read_json_row(path: Path, kind: type) -> dict[str, Any] | None:
    try:
        row: dict[str, Any] = dict(json.loads(path.read_text()))
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


def write_rows(path: Path, rows: Sequence[Any], kind: type) -> None:
    """Writes rows of dataclass `kind` as a parquet file."""
    table = pa.Table.from_pylist([asdict(row) for row in rows], schema=_schema(kind))
    pq.write_table(table, path, write_page_checksum=True)


def collect(results: Results, folder: Path) -> None:
    """Writes a collection: every table as one parquet file. Replaces an existing one."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, kind in ALL_TABLES.items():
        if name in OPTIONAL and getattr(results, name).empty:
            (folder / f"{name}.parquet").unlink(missing_ok=True)
            continue
        schema = _schema(kind, with_run_id=name in TABLES)
        aside = folder / f".{name}.parquet"
        table = pa.Table.from_pandas(getattr(results, name), schema=schema, preserve_index=False)
        pq.write_table(table, aside, write_page_checksum=True)
        aside.replace(folder / f"{name}.parquet")


def frame_of(rows: list[dict[str, Any]], kind: type) -> pd.DataFrame:
    """Converts rows as dicts to a frame with the columns of `kind` and their types."""
    return _frame([pd.DataFrame(rows)], kind)


def _schema(kind: type, with_run_id: bool = False) -> pa.Schema:
    columns = [pa.field("run_id", pa.string())] * with_run_id
    columns += [pa.field(name, _ARROW[base]) for name, base in columns_of(kind)]
    return pa.schema(columns, metadata={"schema_version": str(SCHEMA_VERSION)})


def _read(path: Path, kind: type, run_id: str | None = None) -> pa.Table:
    """Reads a table; without a file an empty one. Raises ValueError, with the file's name, where it is damaged."""
    if not path.is_file():
        return pa.table({})
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read(use_threads=False)
        table.validate(full=True)
    except Exception as error:  # a parser may raise anything for bytes of another format
        raise ValueError(f"{path.name}: {' '.join(str(error).split())[:200]}") from error
    if problem := problem_of_table(table.schema, kind, own=run_id is not None):
        raise ValueError(f"{path.name}: {problem}")
    return table if run_id is None else table.add_column(0, "run_id", [pa.repeat(run_id, table.num_rows)])


def _below(parts: list[pa.Table], kind: type) -> pd.DataFrame:
    """Concatenates tables of runs, with the columns of `kind` that any of them has."""
    wanted = _schema(kind, with_run_id=True).names
    filled = [part.select([name for name in wanted if name in part.column_names]) for part in parts if part.num_rows]
    return pa.concat_tables(filled, promote_options="permissive").to_pandas() if filled else pd.DataFrame()


def _shape_of(name: str) -> tuple[Any, ...]:
    """Returns the row type of a table, and its column of runs where it is a long one."""
    return (ALL_TABLES[name], *(["run_id"] if name in TABLES else []))


def _frame(parts: list[pd.DataFrame], kind: type, *more: str) -> pd.DataFrame:
    """Concatenates the parts, with the columns of `kind` and their types; missing columns are filled."""
    columns = dict(columns_of(kind))
    filled = [part for part in parts if len(part)]
    names = [*more, *columns]
    frame = pd.concat(filled, ignore_index=True) if filled else pd.DataFrame(columns=names)
    frame = frame.reindex(columns=names)
    if "tier" in frame:  # an older table has the device only
        frame["tier"] = frame["tier"].astype("object").fillna("device")
    frame = frame.astype({name: _PANDAS[base] for name, base in columns.items()})
    for name in (name for name, base in columns.items() if base is str and frame[name].hasnans):
        frame[name] = frame[name].where(frame[name].notna(), None)  # equal whether read from JSON or from parquet
    return frame
