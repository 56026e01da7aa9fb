"""A cache of the tables that `load` has read from a large results folder, as one collection beside the runs::

    .tables-KEY/    runs, steps, memory, ... as parquet; index.json: run -> sizes and times of its files

Ten thousand small files take seconds to read, seven large ones a moment. The cache is derived data: a run whose files
have changed is read again, a deleted one is left out, and a read-only folder has no cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable
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


def recall(where: Path, folders: Iterable[Path]) -> tuple[Path | None, dict[str, Signature]]:
    """Returns the cached collection of `where`, or None; and the runs of `folders` that are in it unchanged."""
    for kept in where.glob(f"{PREFIX}*"):
        # damaged, or being replaced: no cache
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError, RecursionError):
            index = json.loads(read_text(kept / INDEX)).items()
            there = {folder.name: folder for folder in folders}
            return kept, {name: was for name, was in index if name in there and was == signature(there[name])}
    return None, {}


def is_due(new: int, remembered: int) -> bool:
    """Returns True where so many uncached runs are worth a new cache."""
    return new >= max(RENEWED_AFTER, remembered // 10) and new + remembered >= WORTH


def keep(where: Path, index: dict[str, Signature], collect: Callable[[Path], None]) -> None:
    """Replaces the cache of `where`: `collect` writes the tables of the runs of `index` into a folder."""
    old = list(where.glob(f"{PREFIX}*"))
    aside = where / f"{ASIDE}{uuid.uuid4().hex[:12]}"
    try:
        collect(aside)
        (aside / INDEX).write_text(json.dumps(index))
        aside.rename(where / f"{PREFIX}{uuid.uuid4().hex[:12]}")
    except OSError:  # read-only, or full: the runs themselves are complete
        old = [aside]
    for folder in old:
        shutil.rmtree(folder, ignore_errors=True)


def signature(folder: Path) -> Signature:
    """Returns the state of a run's files."""
    with os.scandir(folder) as files:
        found = [(one.name, one.stat()) for one in files if one.is_file()]
    return sorted([name, state.st_size, state.st_mtime_ns] for name, state in found)
