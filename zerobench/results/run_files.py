"""The tables of the runs in a results folder: rows first, a long table when it is first used.

ended    a table whose footer was read: the number of its rows, its columns and their types
whole    a table whose pages were read too, each compared with its checksum

A run with a damaged table is left out. In a small folder everything is read with the rows. In a large one only the
footers are: a long table is read when it is used, and a run has no rows in it if one of its pages is damaged.

The tables of a large folder are cached, each as one file::

    .tables-NAME-KEY/    NAME.parquet; index.json: run -> sizes and times of its files

Ten thousand small files take seconds to read, one large file a moment. The cache is derived data: a run whose files
have changed is read again, a deleted one is left out, and a read-only folder has no cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from ..host.files import is_ours, read_text
from ..records import RunRow
from .frames import check_table, concatenate, read_table, to_frame, write_frame
from .selection import by_number

RUNS = "runs"


class RunFiles:
    """The runs in `folders` of the results folder `where`. `kinds`: long table -> its row type. `read_row`: returns the
    row of a run's folder, None if it cannot be used.
    """

    def __init__(
        self, where: Path, folders: list[Path], kinds: dict[str, type],
        read_row: Callable[[Path], dict[str, Any] | None],
    ) -> None:  # fmt: skip
        self._where, self._kinds, self._read_row = where, kinds, read_row
        self.is_large = len(folders) >= WORTH
        self._read: dict[tuple[Path, str], pa.Table] = {}
        cached = self.is_large or is_there(where)
        self._states = {folder.name: signature(folder) for folder in folders} if cached else {}
        self._used: list[tuple[Path, str]] = []
        self.rows = self._read_rows(folders)
        """The rows of all runs, in the order of their numbers."""

    def _read_rows(self, folders: list[Path]) -> pd.DataFrame:
        remembered, known = self._recall(RUNS, RunRow)
        found = []
        for folder in folders:
            if folder.name in known:
                self._used.append((folder, folder.name))
            elif (row := self._checked_row(folder)) is not None:
                self._used.append((folder, row["run_id"]))
                found.append(row)
        frame = to_frame([remembered, pd.DataFrame(found)], RunRow)
        self._keep(RUNS, RunRow, frame, known, set())
        return by_number(frame) if len(frame) else frame

    def _checked_row(self, folder: Path) -> dict[str, Any] | None:
        row = self._read_row(folder)
        if row is None:
            return None
        try:
            for name, kind in self._kinds.items():
                if self.is_large:
                    check_table(folder / f"{name}.parquet", kind)
                else:
                    self._read[folder, name] = read_table(folder / f"{name}.parquet", kind, row["run_id"])
        except ValueError as error:
            warnings.warn(f"{folder} has a damaged table and is left out: {error}", stacklevel=5)
            return None
        return row

    def table(self, name: str) -> pd.DataFrame:
        """Reads a long table."""
        kind = self._kinds[name]
        remembered, known = self._recall(name, kind)
        found, damaged = [], set()
        for folder, run_id in self._used:
            if folder.name == run_id and run_id in known:
                continue
            table = self._read.pop((folder, name), None)
            if table is None:
                table = read_or_warn(folder, name, kind, run_id)
            if table is None:
                damaged.add(run_id)
            else:
                found.append(table)
        frame = to_frame([remembered, concatenate(found, kind)], kind, "run_id")
        if known and found:  # in the order in which they would have been read from the runs
            frame = frame.sort_values("run_id", kind="stable", ignore_index=True)
        self._keep(name, kind, frame, known, damaged)
        return frame

    def _recall(self, name: str, kind: type) -> tuple[pd.DataFrame, set[str]]:
        """Returns the cached rows of a table, and their runs; none if the cache is damaged."""
        cache, known = recall(self._where, name, self._states)
        known &= {run_id for _, run_id in self._used} if name != RUNS else known
        try:
            frame = read_table(cache, kind).to_pandas() if cache and known else pd.DataFrame()
        except ValueError:
            frame = pd.DataFrame()
        if "run_id" not in frame or (name == RUNS and not known <= set(frame["run_id"])):
            return pd.DataFrame(), set()
        return frame[frame["run_id"].isin(known)], known

    def _keep(self, name: str, kind: type, frame: pd.DataFrame, known: set[str], damaged: set[str]) -> None:
        of_runs = {run_id for folder, run_id in self._used if folder.name == run_id} - damaged
        index = {run_id: self._states[run_id] for run_id in of_runs if run_id in self._states}
        if is_due(len(index) - len(known), len(known)):
            rows = frame[frame["run_id"].isin(index)]
            keep(self._where, name, index, lambda path: write_frame(path, rows, kind, name != RUNS))


def read_or_warn(folder: Path, name: str, kind: type, run_id: str) -> pa.Table | None:
    """Reads a long table of a run; None, with a warning, if it is damaged or the run was removed."""
    try:
        if not folder.is_dir():
            raise ValueError("the run was removed meanwhile")
        return read_table(folder / f"{name}.parquet", kind, run_id)
    except ValueError as error:
        warnings.warn(f"{folder}: rows of {name} are left out: {error}", stacklevel=4)
        return None


PREFIX = ".tables-"
ASIDE = ".tables."
"""Prefix of a cache until it is complete."""

INDEX = "index.json"

WORTH = 64
"""Number of runs from which on a folder has a cache."""

RENEWED_AFTER = 16
"""The cache is rewritten once this many runs, or a tenth of the cached ones, are new."""

Signature = list[list[int | str]]
"""Name, size in bytes and time of the last change in ns of every file of a run."""


def is_there(where: Path) -> bool:
    """Returns True if any table of the folder is cached."""
    return next(where.glob(f"{PREFIX}*"), None) is not None


def recall(where: Path, name: str, states: dict[str, Signature]) -> tuple[Path | None, set[str]]:
    """Returns the file of a cached table, or None; and the runs of `states` that are in it unchanged."""
    for kept in where.glob(f"{PREFIX}{name}-*"):
        # damaged, or being replaced: no cache
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError, RecursionError):
            index = json.loads(read_text(kept / INDEX)).items()
            return kept / f"{name}.parquet", {run for run, was in index if run in states and was == states[run]}
    return None, set()


def is_due(new: int, remembered: int) -> bool:
    """Returns True if `new` uncached runs are worth a new cache."""
    return new >= max(RENEWED_AFTER, remembered // 10) and new + remembered >= WORTH


def keep(where: Path, name: str, index: dict[str, Signature], write: Callable[[Path], None]) -> None:
    """Replaces the cache of a table: `write` writes the rows of the runs in `index` to a path."""
    old = [*where.glob(f"{PREFIX}{name}-*")]
    aside = where / f"{ASIDE}{uuid.uuid4().hex[:12]}"
    try:
        aside.mkdir()
        write(aside / f"{name}.parquet")
        (aside / INDEX).write_text(json.dumps(index))
        aside.rename(where / f"{PREFIX}{name}-{uuid.uuid4().hex[:12]}")
    except OSError:  # read-only, or full: the runs themselves are complete
        old = [aside]
    for folder in filter(is_ours, old):
        shutil.rmtree(folder, ignore_errors=True)


def signature(folder: Path) -> Signature:
    """Returns the state of a run's files."""
    with os.scandir(folder) as files:
        found = [(one.name, one.stat()) for one in files if one.is_file()]
    return sorted([name, state.st_size, state.st_mtime_ns] for name, state in found)
