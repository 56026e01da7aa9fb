"""Folders of runs, the writing side. A run is written aside, in a folder that a lock marks as in use, then renamed.

    1. claim    a hidden folder is created and locked; abandoned ones, whose lock is free, are removed
    2. fill     logs, tables and the row are written there
    3. rename   to PREFIX-ATTEMPT, atomically: readers see a complete run or none

The lock is the kernel's (flock): it ends with its process, so no stale lock remains, and neither another machine nor
another container on the same folder takes a living run for an abandoned one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from glob import escape
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from ..config.cell import CellConfig
from ..host.temporary import Aside, claim
from ..records import RunRow, SearchRow
from .attempts import split
from .frames import write_rows
from .tables import OPTIONAL, SEARCHES, TABLES

PARTIAL = ".partial-"


TURNS = ".turns"
"""The file in a results folder whose bytes are locked by measuring processes; see `turn`."""

TRY_AGAIN_S = 0.2


def claim_folder(results_dir: Path, prefix: str) -> Aside:
    """Claims a folder to write a run in; removes those that dead processes left behind."""
    results_dir.mkdir(parents=True, exist_ok=True)
    return claim(results_dir, ".claim-", PARTIAL, prefix, mode=0o777)


def write_run(
    aside: Aside,
    prefix: str,
    row: RunRow,
    config: CellConfig,
    provenance: dict[str, Any],
    tables: dict[str, list[Any]],
) -> Path:
    """Fills the folder `aside` and renames it to PREFIX-ATTEMPT, one more than the last; sets row.run_id."""
    try:
        (aside.path / "config.yaml").write_text(yaml.safe_dump(config.written(), sort_keys=False))
        (aside.path / "provenance.json").write_text(json.dumps(provenance, indent=1))
        for name, kind in TABLES.items():
            if name in OPTIONAL and not tables.get(name):
                continue
            write_rows(aside.path / f"{name}.parquet", tables.get(name, []), kind)
        return _rename_free(aside.path, prefix, row)
    finally:
        aside.release()


def _rename_free(aside: Path, prefix: str, row: RunRow) -> Path:
    others = aside.parent.glob(f"{escape(prefix)}-*")
    attempt = 1 + max((number for name, number in (split(p.name) for p in others) if name == prefix), default=0)
    while True:
        row.run_id = f"{prefix}-{attempt}"
        target = aside.parent / row.run_id
        (aside / "run.json").write_text(json.dumps(_finite(asdict(row)), indent=1, allow_nan=False))
        try:
            if not target.exists():
                aside.rename(target)  # fails, rather than replaces, where another process took the number first
                return target
        except OSError:
            if not target.exists():
                raise
        attempt += 1


def amend_row(folder: Path, changes: dict[str, Any]) -> None:
    """Changes columns of a finished run's row; readers see the old row or the new one."""
    path = folder / "run.json"
    aside = folder / f".run.json.{os.getpid()}"
    aside.write_text(json.dumps(_finite(json.loads(path.read_text()) | changes), indent=1, allow_nan=False))
    aside.replace(path)


@contextlib.contextmanager
def turn(results_dir: Path, launch: str, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Holds a `launch`, any text, against all other processes that write to this folder; waits for one that holds it.

    The lock is one byte of a file, at an offset derived from the text, and the kernel's: it ends with its process.
    Where no lock can be had, in a read-only folder or on a file system without locks, no process waits.
    """
    place = int.from_bytes(hashlib.sha256(launch.encode()).digest()[:7], "big")
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            results_dir.mkdir(parents=True, exist_ok=True)
            file = held.enter_context((results_dir / TURNS).open("ab"))
            told = False
            while not _try_lock(file, place):
                if not told:
                    on_wait()
                told = True
                time.sleep(TRY_AGAIN_S)
        yield


def _try_lock(file: BinaryIO, place: int) -> bool:
    """Tries to lock this byte; returns True on success. Raises OSError where the file system has no locks."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except (BlockingIOError, PermissionError):  # POSIX permits either
        return False
    return True


def write_search(results_dir: Path, row: SearchRow) -> None:
    """Writes the result of a search; the same search again replaces it."""
    folder = results_dir / SEARCHES
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".{row.search_id}.{os.getpid()}"
    aside.write_text(json.dumps(_finite(asdict(row)), indent=1, allow_nan=False))
    aside.replace(folder / f"{row.search_id}.json")


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """Replaces non-finite numbers by null, since JSON has none."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
