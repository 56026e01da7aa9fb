"""Folders of runs, the writing side: claimed, filled, renamed; rescued if that fails; tidied after killed processes.

    1. claim    a hidden folder with a lease is created; abandoned ones, whose lease is not held, are removed
    2. fill     logs, tables and the row are written there, and flushed to the disk
    3. rename   to PREFIX-ATTEMPT-TOKEN, atomically: readers see a complete run or none

No process, even on another machine or in another container, considers a live run abandoned, since its lease
(host/temporary.py) is renewed. The token is random, so that no two machines give a run the same name, and two folders
can be merged by copying all files.

rescued     a run that cannot be written there, since the disk is full or the folder was removed, is written to a
            results folder of this process in the system's temporary directory; if that fails, too, its row is only in
            the sweep's table
abandoned   a leftover of a killed process that no living process will finish; each sweep removes them when it begins,
            and so does `zerobench prune`:
            partial runs                  whose lease is not held
            folders of a launcher's jobs  whose lease, of the composing process, is not held; a job that begins without
                                          its folder ends immediately
            unclaimed ones                folders that are half written or half removed, files that are about to
                                          replace another: their owner is unknown, so they count after an hour
            Checking whether a lease is held removes it if it is not; no confirmation is requested.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from glob import escape
from pathlib import Path
from typing import Any

import yaml

from ..config.cell import CellConfig
from ..host.files import is_ours, read_text, rename_new, replace_text, sync, sync_files
from ..host.temporary import LEASE, PRUNED, Aside, acquire, claim, is_claimed, is_held, lease_at, remove
from ..records import RunRow, SearchRow
from ..sizes import show_count
from .frames import write_rows
from .selection import split
from .tables import OPTIONAL, SEARCHES, TABLES

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
        (aside.path / "run.json").write_text(_json_of(asdict(row) | {"run_id": path.name}))
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
    replace_text(path, _json_of(json.loads(read_text(path)) | changes))


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
            lease, waits = lease_at(results_dir / name), False
            while not acquire(lease):
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
    replace_text(folder / f"{row.search_id}.json", _json_of(asdict(row)))


def _json_of(row: dict[str, Any]) -> str:
    """Returns a row as JSON, which cannot represent numbers that are not finite: they are null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(finite, indent=1, allow_nan=False)


JOBS = ".jobs-"
"""Prefix of a sweep's folder for its jobs, in a results folder."""

UNCLAIMED_AT_MOST_S = 3600.0

UNCLAIMED = tuple(f"{prefix}*" for prefix in (PRUNED, f"{SEARCHES}/."))
"""Patterns of unclaimed entries."""


def partials(where: Path, prefix: str = PARTIAL) -> list[Path]:
    """Returns the folders in which runs, or jobs, are written, including those of dead processes."""
    return [path for path in sorted(where.glob(f"{prefix}*/")) if not path.is_symlink()]


def abandoned(where: Path) -> list[Path]:
    """Returns the leftovers of a results folder."""
    claimed = [path for path in (*partials(where), *partials(where, JOBS)) if is_ours(path)]
    killed = [path for path in claimed if not is_claimed(path)]
    for lease in where.glob(f".*{LEASE}"):
        if is_ours(lease.with_suffix("")):
            is_held(lease)
    old = []
    for path in (path for pattern in UNCLAIMED for path in where.glob(pattern) if is_ours(path)):
        with suppress(OSError):  # it has its name, or is gone
            own = not path.is_symlink() and not path.parent.is_symlink()
            if own and path.stat().st_mtime < time.time() - UNCLAIMED_AT_MOST_S:
                old.append(path)
    return killed + sorted(old)


def tidy(where: Path) -> None:
    """Removes the leftovers, as far as possible."""
    for path in abandoned(where):
        if path.is_dir():
            remove(path)
        else:
            with suppress(OSError):
                path.unlink()


@dataclass(frozen=True)
class Unwritten:
    """A run outside of its results folder. `error`: the reason. `kept`: the folder that has it instead, or None."""

    results_dir: Path
    error: str
    kept: Path | None


@cache
def temporary_results() -> Path:
    """Creates and returns the results folder of this process for rescued runs. Only the user can write to it."""
    return Path(tempfile.mkdtemp(prefix="zerobench-rescued-"))


def claim_or_rescue(results_dir: Path, prefix: str) -> Aside:
    """Claims a folder for a run. Raises the results folder's error if the temporary one fails, too."""
    try:
        return claim_folder(results_dir, prefix)
    except Exception as error:
        with suppress(Exception):
            return claim_folder(temporary_results(), prefix)
        raise error from None


def write_or_rescue(
    aside: Aside, results_dir: Path, prefix: str, row: RunRow, config: CellConfig, provenance: dict[str, Any],
    tables: dict[str, list[Any]],
) -> Unwritten | None:  # fmt: skip
    """Calls write_run. Returns None if the run is in its results folder. An error of any kind is treated alike:
    the run was measured, and the sweep goes on.
    """
    reason = "" if aside.path.parent == results_dir else why_unwritable(results_dir) or "it could not be written to"
    try:
        write_run(aside, prefix, row, config, provenance, tables)
        return Unwritten(results_dir, reason, aside.path.parent) if reason else None
    except Exception as error:
        reason = reason or short_reason(error)
        with suppress(Exception):
            rescued = claim_folder(temporary_results(), prefix)
            try:
                with suppress(OSError, shutil.Error):  # as many logs as can be read
                    shutil.copytree(aside.path / "logs", rescued.path / "logs")
                if not isinstance(error, OSError):  # it is not the disk's
                    (rescued.path / "logs").mkdir(exist_ok=True)
                    (rescued.path / "logs/harness.log").write_text("".join(traceback.format_exception(error)))
                write_run(rescued, prefix, row, config, provenance, tables)
                return Unwritten(results_dir, reason, rescued.path.parent)
            finally:
                shutil.rmtree(rescued.path, ignore_errors=True)  # written, it has another name
        row.run_id = prefix
        return Unwritten(results_dir, reason, None)
    finally:
        shutil.rmtree(aside.path, ignore_errors=True)


def why_unwritable(results_dir: Path) -> str:
    """Returns the reason why no run can be written there; empty if one can."""
    try:
        for path in (results_dir.absolute(), results_dir.resolve()):
            str(path).encode()
    except UnicodeEncodeError:  # tables and configs are UTF-8
        return f"its path, {os.fsencode(path)!r}, is not UTF-8"
    try:
        probe = claim_folder(results_dir, "probe")
    except Exception as error:
        return short_reason(error)
    probe.release()
    shutil.rmtree(probe.path, ignore_errors=True)
    return ""


def unwritten_messages(lost: Sequence[Unwritten]) -> list[str]:
    """Returns the messages at the end of a sweep on runs outside of their results folder."""
    messages = []
    for run, count in Counter(lost).items():
        kept = f"kept in {run.kept} instead: zerobench status {run.kept}" if run.kept else "in the table above alone"
        pronoun = "it is" if count == 1 else "they are"
        runs = show_count(count, "run")
        messages.append(f"{runs} could not be written to {run.results_dir} ({run.error}); {pronoun} {kept}")
    return messages


def short_reason(error: Exception) -> str:
    """Returns the reason of an error in a few words."""
    if isinstance(error, OSError):
        return os.strerror(error.errno) if error.errno else str(error)
    return f"{type(error).__name__}: {error}"
