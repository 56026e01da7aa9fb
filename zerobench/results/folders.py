"""Folders of runs, the writing side. A run is written to a claimed temporary folder, which is then renamed.

    1. claim    a hidden folder with a lease is created; abandoned ones, whose lease is not held, are removed
    2. fill     logs, tables and the row are written there, and flushed to the disk
    3. rename   to PREFIX-ATTEMPT-TOKEN, atomically: readers see a complete run or none

No process, even on another machine or in another container, considers a live run abandoned, since its lease
(host/leases.py) is renewed. The token is random, so that no two machines give a run the same name, and two folders can
be merged by copying all files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ..host import leases
from ..host.files import is_ours, read_text, rename_new, replace_text, sync, sync_files
from ..host.temporary import LEASE, Aside, claim
from ..records import RunRow, SearchRow
from .frames import write_rows
from .selection import split
from .tables import OPTIONAL, SEARCHES, TABLES

if TYPE_CHECKING:
    from ..config.cell import CellConfig

PARTIAL = ".partial-"

TURN = ".turn-"
"""Prefix of the leases by which measuring processes take turns in a results folder; see `turn`."""

TRY_AGAIN_S = 1.0


def claim_folder(results_dir: Path, prefix: str) -> Aside:
    """Claims a folder to write a run in; removes those that dead processes left behind."""
    results_dir.mkdir(parents=True, exist_ok=True)
    return claim(results_dir, PARTIAL, prefix, mode=0o777)


def write_run(
    aside: Aside, prefix: str, row: RunRow, config: CellConfig, provenance: dict[str, Any], tables: dict[str, list[Any]]
) -> Path:
    """Fills the folder `aside` and renames it to PREFIX-ATTEMPT-TOKEN with the next attempt; sets row.run_id."""
    try:
        (aside.path / "config.yaml").write_text(yaml.safe_dump(config.written(), sort_keys=False))
        (aside.path / "provenance.json").write_text(json.dumps(provenance, indent=1))
        for name, kind in TABLES.items():
            if name in OPTIONAL and not tables.get(name):
                continue
            write_rows(aside.path / f"{name}.parquet", tables.get(name, []), kind)
        others = (split(path.name) for path in aside.path.parent.glob(f"{escape(prefix)}-*"))
        attempt = 1 + max((number for name, number in others if name == prefix), default=0)
        path = aside.path.with_name(f"{prefix}-{attempt}-x{secrets.token_hex(3)}")
        text = json.dumps(finite(asdict(row) | {"run_id": path.name}), indent=1, allow_nan=False)
        (aside.path / "run.json").write_text(text)
        sync_files(aside.path)
        rename_new(aside.path, path)
        sync(path.parent)
        row.run_id = path.name
        return path
    finally:
        aside.release()


def amend_row(folder: Path, changes: dict[str, Any]) -> None:
    """Changes columns of a finished run's row; readers see the old row or the new one.

    A process that is killed here leaves a temporary file behind. The row is then still the old one, so the amendment is
    repeated, which removes the file.
    """
    path = folder / "run.json"
    for left in filter(is_ours, folder.glob(f".{path.name}.*")):
        left.unlink(missing_ok=True)
    replace_text(path, json.dumps(finite(json.loads(read_text(path)) | changes), indent=1, allow_nan=False))


@contextlib.contextmanager
def turn(results_dir: Path, launch: str, on_wait: Callable[[bool], None] = lambda _: None) -> Iterator[None]:
    """Holds a `launch`, any text, exclusively among all processes that write to this folder; waits for another holder.
    `on_wait`: called with True when a wait begins, with False at its end.

    A turn is a lease, named by a hash of the text. In rare cases two processes that find the same dead lease at the
    same moment may both continue: the launch is then measured twice, and no run is lost. In a read-only folder no
    process waits.
    """
    name = f"{TURN}{hashlib.sha256(launch.encode()).hexdigest()[:16]}{LEASE}"
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            results_dir.mkdir(parents=True, exist_ok=True)
            lease, waits = leases.lease_at(results_dir / name), False
            while not leases.acquire(lease):
                if not waits:
                    on_wait(True)
                waits = True
                time.sleep(TRY_AGAIN_S)
            if waits:
                on_wait(False)
            held.callback(lease.release)
        yield


def write_search(results_dir: Path, row: SearchRow) -> None:
    """Writes the result of a search, replacing an earlier one of the same search."""
    folder = results_dir / SEARCHES
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / f"{row.search_id}.json", json.dumps(finite(asdict(row)), indent=1, allow_nan=False))


def finite(row: dict[str, Any]) -> dict[str, Any]:
    """Replaces non-finite numbers by null, since JSON cannot represent them."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
