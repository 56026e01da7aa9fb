"""Rows as tables in files and as frames, with the columns of their dataclass and one type for each.

A *kind* is the dataclass of a row. The type of a field determines its column's type in parquet and in pandas. Columns
that a file lacks are filled in; additional columns are dropped. Readers can rely on these types:

category   strategy, category, phase and tier are ordered: sort, groupby and legends follow the order of the stages, of
           the ledger and of a step. A frame's categories are only the values that occur in it
unit       `frame.attrs["units"]` is column -> unit, for every number that has one (docs/reference/columns.md)
bytes      are integers, except for means over a group of ranks (`wire_bytes` of traffic)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ..records import ALLOCATOR, CATEGORIES, PHASES, SCHEMA_VERSION, TIERS, describe
from ..records.describe import unit_of
from ..sizes import show_bytes
from ..strategies import built_in
from .grid import Grid

Row = dict[str, Any]
"""A row of a frame, by column."""

_ARROW = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}
_PANDAS = {int: "Int64", float: "float64", str: "object", bool: "boolean"}


@cache
def base_types(kind: type) -> tuple[tuple[str, type], ...]:
    """Returns column names and base types of a row type; an optional column has its base type."""
    hints = get_type_hints(kind)
    bases = (str, bool, int, float)
    return tuple(
        (column.name, next(t for t in bases if t in getattr(hints[column.name], "__args__", (hints[column.name],))))
        for column in fields(kind)
    )


def schema_of(kind: type, with_run_id: bool = False) -> pa.Schema:
    """Returns the columns of `kind` in a file, after `run_id` if the table has many runs."""
    columns = [pa.field("run_id", pa.string())] * with_run_id
    columns += [pa.field(name, _ARROW[base]) for name, base in base_types(kind)]
    return pa.schema(columns, metadata={"schema_version": str(SCHEMA_VERSION)})


def write_rows(path: Path, rows: Sequence[Any], kind: type) -> None:
    """Writes rows of dataclass `kind` as a parquet file."""
    table = pa.Table.from_pylist([asdict(row) for row in rows], schema=schema_of(kind))
    pq.write_table(table, path, write_page_checksum=True)


def write_frame(path: Path, frame: pd.DataFrame, kind: type, with_run_id: bool) -> None:
    """Writes a frame with the columns of `kind` as a parquet file, replacing an existing one atomically."""
    aside = path.with_name(f".{path.name}")
    table = pa.Table.from_pandas(untyped(frame), schema=schema_of(kind, with_run_id), preserve_index=False)
    pq.write_table(table, aside, write_page_checksum=True)
    aside.replace(path)


def read_table(path: Path, run_id: str | None = None) -> pa.Table:
    """Reads a table; an empty one if there is no file. Raises ValueError, with the file's name, if it is damaged."""
    if not os.path.lexists(path):
        return pa.table({})
    with _opened(path) as file:
        table = file.read(use_threads=False).replace_schema_metadata()  # of pandas', which it would trust
        table.validate(full=True)
    return table if run_id is None else table.add_column(0, "run_id", [pa.repeat(run_id, table.num_rows)])


def check_table(path: Path) -> None:
    """Checks the footer of a run's table, if it has one. Raises ValueError, with the file's name, if it is damaged."""
    if os.path.lexists(path):
        with _opened(path):
            pass


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    """Opens a table; raises any error in the block as ValueError with its file name."""
    if not path.is_file():
        raise ValueError(f"{path.name}: it is no file")
    try:
        with pa.OSFile(str(path)) as source, pq.ParquetFile(source, page_checksum_verification=True) as file:
            yield file
    except Exception as error:  # a parser may raise anything for bytes of another format
        raise ValueError(f"{path.name}: {' '.join(str(error).split())[:200]}") from error


def concatenate(parts: list[pa.Table], kind: type) -> pd.DataFrame:
    """Concatenates tables of runs, with the columns of `kind` that any of them has."""
    wanted = schema_of(kind, with_run_id=True).names
    filled = [part.select([name for name in wanted if name in part.column_names]) for part in parts if part.num_rows]
    return pa.concat_tables(filled, promote_options="permissive").to_pandas() if filled else pd.DataFrame()


def frame_of(rows: Sequence[Any], kind: type) -> pd.DataFrame:
    """Converts rows, of dataclass `kind` or as dicts, to a frame with the columns of `kind` and their types."""
    return to_frame([pd.DataFrame([row if isinstance(row, dict) else vars(row) for row in rows])], kind)


def to_frame(parts: list[pd.DataFrame], kind: type, *more: str) -> pd.DataFrame:
    """Concatenates the parts, with the columns of `kind` and their types; missing columns are filled in."""
    filled = [part for part in parts if len(part)] or [pd.DataFrame()]
    frame = pd.concat(filled, ignore_index=True) if len(filled) > 1 else filled[0].reset_index(drop=True)
    columns = {name: frame[name] if name in frame else pd.Series(None, frame.index, "object") for name in more}
    columns |= {name: _column(frame, name, _PANDAS[base]) for name, base in base_types(kind)}
    return pd.DataFrame(columns)


def _column(frame: pd.DataFrame, name: str, dtype: Any) -> pd.Series:
    """Returns a column in its type, None for missing text, so that it is the same when read from JSON or parquet."""
    column = frame[name] if name in frame else pd.Series(None, frame.index, dtype)
    made = column if column.dtype == dtype else column.astype(dtype)
    if name == "tier":  # an older table has the device only
        return made.fillna("device")
    return made.where(made.notna(), None) if dtype == "object" and made.hasnans else made


def to_records(frame: pd.DataFrame) -> list[Row]:
    """Returns the rows as dicts, None for missing values."""
    return frame.astype("object").where(frame.notna(), None).to_dict("records")  # type: ignore[return-value]


ORDERS: dict[str, Callable[[], Sequence[str]]] = {
    "strategy": lambda: list(built_in()),
    "category": lambda: (*CATEGORIES, "states", "total", *ALLOCATOR),
    "phase": lambda: PHASES,
    "tier": lambda: TIERS,
}
"""Column -> its values, in order. Others, such as a user's strategy, follow by name."""


class Units(dict[str, str]):
    """Column -> unit. Never modified, so a copy is the same object: pandas copies `attrs` with each operation."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Units:
        return self


@cache
def units_of(table: str) -> Units:
    """Units of the table's columns that have one."""
    return Units({column.name: column.unit for column in describe.columns_of(table) if column.unit})


def typed(table: str, frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the frame with ordered categories and units; it shares the other columns with `frame`."""
    ordered = {}
    for name, column in ((name, frame[name]) for name in ORDERS if name in frame):
        order, present = ORDERS[name](), set(column.dropna().unique())
        values = [*(value for value in order if value in present), *sorted(present.difference(order))]
        ordered[name] = column.astype("object").astype(pd.CategoricalDtype(values, ordered=True))
    made = frame.assign(**ordered)
    made.attrs = {**frame.attrs, "units": units_of(table)}
    return made


def untyped(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the frame with text instead of categories and without units, as stored in files."""
    made = frame.astype({name: "object" for name in ORDERS if name in frame})
    made.attrs = {}
    return made


def table_of(frame: pd.DataFrame, headings: Mapping[str, str], left: int = 1) -> Grid:
    """Returns a table of the columns in `headings`, each value in its column's unit. `left`: the number of columns of
    words, which come first.
    """
    units = [unit_of(name) for name in headings]
    rows = [
        [show_figure(value, unit) for value, unit in zip(row, units, strict=True)]
        for row in frame[list(headings)].itertuples(index=False, name=None)
    ]
    return Grid(list(headings.values()), rows, left)


def show_figure(value: Any, unit: str) -> str:
    """Formats a value of a column with this unit; a missing value is a dash."""
    if value is None or pd.isna(value):
        return "–"
    if unit == "bytes":
        return show_bytes(float(value))
    if isinstance(value, float):
        return f"{value:.3f}" if unit == "elements / ψ" else f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
