"""Rows <-> pandas <-> files. A run's folder::

    config.yaml  provenance.json  run.json  steps.parquet  memory.parquet  tensors.parquet  traffic.parquet  logs/

It is written aside and renamed, so a folder that is there is whole.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from .records import SCHEMA_VERSION, MemoryRow, RunRow, StepRow, TensorRow, TrafficRow

TABLES: dict[str, type] = {"steps": StepRow, "memory": MemoryRow, "tensors": TensorRow, "traffic": TrafficRow}

_ARROW = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}
_PANDAS = {int: "Int64", float: "float64", str: "object", bool: "boolean"}


@dataclass(frozen=True)
class Results:
    """Tables of one or many runs. `runs`: a row a cell. The others carry `run_id`; their columns: records.py."""

    runs: pd.DataFrame
    steps: pd.DataFrame
    memory: pd.DataFrame
    tensors: pd.DataFrame
    traffic: pd.DataFrame


def load(path: str | Path) -> Results:
    """Reads a run's folder, or all runs in a results folder, oldest first.

    Raises FileNotFoundError where there is no such folder, ValueError for tables of a newer version.
    """
    where = Path(path)
    if not where.is_dir():
        raise FileNotFoundError(f"{where}: there is no such results folder")
    found = [(row, folder) for folder in run_folders(where) if (row := read_row(folder)) is not None]
    found.sort(key=lambda one: one[0]["started"])
    tables = {name: _read_table([folder for _, folder in found], name, kind) for name, kind in TABLES.items()}
    return Results(_frame([row for row, _ in found], RunRow), **tables)


def run_folders(where: Path) -> list[Path]:
    """`where` itself if it is a run, else the runs in it."""
    if (where / "run.json").is_file():
        return [where]
    return sorted(p for p in where.iterdir() if not p.name.startswith(".") and (p / "run.json").is_file())


def read_row(folder: Path) -> dict[str, Any] | None:
    """A run's one row; None, with a warning, where its run.json cannot be read: other runs are not to suffer.

    Raises ValueError for a table of a newer version.
    """
    try:
        row: dict[str, Any] = json.loads((folder / "run.json").read_text())
        missing = [f.name for f in fields(RunRow) if f.name not in row]
    except (OSError, ValueError, TypeError) as error:
        warnings.warn(f"{folder / 'run.json'} cannot be read and is left out: {error}", stacklevel=2)
        return None
    if missing:
        warnings.warn(f"{folder / 'run.json'} lacks {', '.join(missing[:3])} and is left out", stacklevel=2)
        return None
    if row["schema_version"] > SCHEMA_VERSION:
        newer = f"schema_version {row['schema_version']} is newer than {SCHEMA_VERSION}"
        raise ValueError(f"{folder}: {newer}; update zerobench")
    return row


def latest(runs: pd.DataFrame) -> pd.DataFrame:
    """The newest run of each cell, in the order in which the cells were first run."""
    return runs.loc[runs.groupby("cell_id", sort=False).tail(1).index]


def claim_folder(results_dir: Path, prefix: str) -> Path:
    """A hidden folder to write a run in; those that dead processes left behind are removed."""
    results_dir.mkdir(parents=True, exist_ok=True)
    for left in results_dir.glob(".partial-*"):
        owner = left.name.split("-")[1]
        if owner.isdigit() and not _is_alive(int(owner)):
            shutil.rmtree(left, ignore_errors=True)
    aside = results_dir / f".partial-{os.getpid()}-{prefix}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    return aside


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def write_run(
    aside: Path,
    prefix: str,
    row: RunRow,
    config: dict[str, Any],
    provenance: dict[str, Any],
    tables: dict[str, list[Any]],
) -> Path:
    """Fills the folder `aside` and renames it to PREFIX-ATTEMPT, the first attempt that is free; sets row.run_id."""
    (aside / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (aside / "provenance.json").write_text(json.dumps(provenance, indent=1))
    for name, kind in TABLES.items():
        _write_table(aside / f"{name}.parquet", tables.get(name, []), kind)
    attempt = 1
    while True:
        row.run_id = f"{prefix}-{attempt}"
        target = aside.parent / row.run_id
        (aside / "run.json").write_text(json.dumps(_finite(asdict(row)), indent=1, allow_nan=False))
        try:
            if not target.exists():
                aside.rename(target)  # fails, rather than replaces, if somebody else was faster
                return target
        except OSError:
            if not target.exists():
                raise
        attempt += 1


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no NaN: a loss that is not finite is null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def _write_table(path: Path, rows: Sequence[Any], kind: type) -> None:
    schema = _schema(kind)
    pq.write_table(pa.Table.from_pylist([asdict(row) for row in rows], schema=schema), path)


def _schema(kind: type) -> pa.Schema:
    columns = [pa.field(name, _ARROW[base]) for name, base in _columns(kind)]
    return pa.schema(columns, metadata={"schema_version": str(SCHEMA_VERSION)})


def _read_table(folders: Iterable[Path], name: str, kind: type) -> pd.DataFrame:
    frames = []
    for folder in folders:
        if (folder / f"{name}.parquet").is_file():
            frame = pq.read_table(folder / f"{name}.parquet").to_pandas()
            frame.insert(0, "run_id", folder.name)
            frames.append(frame)
    if not frames:
        return pd.DataFrame(columns=["run_id", *(f.name for f in fields(kind))])
    return pd.concat(frames, ignore_index=True)


def _frame(rows: list[dict[str, Any]], kind: type) -> pd.DataFrame:
    columns = dict(_columns(kind))
    frame = pd.DataFrame(rows, columns=list(columns))
    return frame.astype({name: _PANDAS[base] for name, base in columns.items()})


def _columns(kind: type) -> list[tuple[str, type]]:
    """Column names and base types; an optional column has its base type."""
    hints = get_type_hints(kind)
    return [
        (
            f.name,
            next(t for t in (str, bool, int, float) if t in getattr(hints[f.name], "__args__", (hints[f.name],))),
        )
        for f in fields(kind)
    ]
