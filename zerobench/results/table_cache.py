"""A cache of the tables that `load` has read from a large results folder: each table beside the runs as one file::

    .tables-NAME-KEY/    NAME.parquet; index.json: run -> sizes and times of its files

Ten thousand small files take seconds to read, one large one a moment. The cache is derived data: a run whose files
have changed is read again, a deleted one is left out, and a read-only folder has no cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from ..host.files import read_text

PREFIX = ".tables-"
ASIDE = ".tables."
"""Prefix of a cache until it is whole."""

INDEX = "index.json"

WORTH = 64
"""Runs from which on a folder has a cache."""

RENEWED_AFTER = 16
"""Runs, or a tenth of those that are remembered, that must be new before the cache is written again."""

Signature = list[list[int | str]]
"""Name, size in bytes and time of the last change in ns of every file of a run."""


def is_there(where: Path) -> bool:
    """Returns True where a table of the folder is cached."""
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
    """Returns True where so many uncached runs are worth a new cache."""
    return new >= max(RENEWED_AFTER, remembered // 10) and new + remembered >= WORTH


def keep(where: Path, name: str, index: dict[str, Signature], write: Callable[[Path], None]) -> None:
    """Replaces the cache of a table: `write` writes it, of the runs of `index`, to a path."""
    of_all_tables = [path for path in where.glob(f"{PREFIX}*") if "-" not in path.name.removeprefix(PREFIX)]
    old = [*where.glob(f"{PREFIX}{name}-*"), *of_all_tables]  # an earlier version wrote the latter
    aside = where / f"{ASIDE}{uuid.uuid4().hex[:12]}"
    try:
        aside.mkdir()
        write(aside / f"{name}.parquet")
        (aside / INDEX).write_text(json.dumps(index))
        aside.rename(where / f"{PREFIX}{name}-{uuid.uuid4().hex[:12]}")
    except OSError:  # read-only, or full: the runs themselves are complete
        old = [aside]
    for folder in old:
        shutil.rmtree(folder, ignore_errors=True)


def signature(folder: Path) -> Signature:
    """Returns the state of a run's files."""
    with os.scandir(folder) as files:
        found = [(one.name, one.stat()) for one in files if one.is_file()]
    return sorted([name, state.st_size, state.st_mtime_ns] for name, state in found)
