"""Fallbacks for runs that cannot be written to their results folder: the disk is full, or the folder was removed.

A run is tried in its results folder, then there once more, then in a folder next to it, then in the system's temporary
directory. Each of these is an ordinary results folder. If all fail, the row is only in the sweep's table.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.cell import CellConfig
from ..host.temporary import Aside
from ..records import RunRow
from ..sizes import show_count
from .folders import claim_folder, write_run


@dataclass(frozen=True)
class Unwritten:
    """A run outside of its results folder. `error`: the reason. `kept`: the folder that has it instead, or None."""

    results_dir: Path
    error: str
    kept: Path | None


def places(results_dir: Path) -> list[Path]:
    """Returns the folders in which a run may be written, in the order in which they are tried."""
    beside = results_dir.absolute()
    return [results_dir, beside.with_name(f"{beside.name}-rescued"), temporary_place()]


def temporary_place() -> Path:
    """Returns the user's results folder in the system's temporary directory; its name may be taken by anyone."""
    return Path(tempfile.gettempdir()) / f"zerobench-rescued-{os.getuid()}"


def _claim_in(place: Path, prefix: str) -> Aside:
    """Claims a folder in one of `places`. Raises OSError, also if another user has taken the temporary one's name."""
    if place == temporary_place():
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = place.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise PermissionError(f"{place} is a link, another user's, or others can write to it")
    return claim_folder(place, prefix)


def claim(results_dir: Path, prefix: str) -> Aside:
    """Claims a folder for a run, in the first place that works. Raises the first error if none does."""
    errors = []
    for place in places(results_dir):
        try:
            return _claim_in(place, prefix)
        except Exception as error:
            errors.append(error)
    raise errors[0]


def keep(
    aside: Aside, results_dir: Path, prefix: str, row: RunRow, config: CellConfig, provenance: dict[str, Any],
    tables: dict[str, list[Any]],
) -> Unwritten | None:  # fmt: skip
    """Calls folders.write_run in the first place that works. Returns None if that is the results folder. An error of
    any kind is treated alike: the run was measured, and the sweep goes on.
    """

    def write(to: Aside) -> None:
        write_run(to, prefix, row, config, provenance, tables)

    why = "" if aside.path.parent == results_dir else why_unwritable(results_dir)
    place = aside.path.parent
    try:
        write(aside)
    except Exception as error:
        why = why or words_of(error)
        _log(error, aside.path)
        found = _write_elsewhere(aside.path, results_dir, prefix, write)
        shutil.rmtree(aside.path, ignore_errors=True)
        if found is None:
            row.run_id = prefix
            return Unwritten(results_dir, why, None)
        place = found
    return None if place == results_dir else Unwritten(results_dir, why or "it could not be written to", place)


def _log(error: Exception, folder: Path) -> None:
    """Writes the traceback of an error that is not the disk's, as far as possible."""
    if not isinstance(error, OSError):
        with suppress(OSError):
            (folder / "logs").mkdir(exist_ok=True)
            (folder / "logs/harness.log").write_text("".join(traceback.format_exception(error)))


def _write_elsewhere(begun: Path, results_dir: Path, prefix: str, write: Callable[[Aside], None]) -> Path | None:
    """Returns the place that took the run, with the logs of the folder `begun`; None if none did."""
    for place in places(results_dir):
        with suppress(Exception):
            aside = _claim_in(place, prefix)
            try:
                with suppress(OSError, shutil.Error):  # as many as can be read
                    shutil.copytree(begun / "logs", aside.path / "logs")
                write(aside)
            except Exception:
                shutil.rmtree(aside.path, ignore_errors=True)
                raise
            return place
    return None


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
        return words_of(error)
    probe.release()
    shutil.rmtree(probe.path, ignore_errors=True)
    return ""


def remove_empty(results_dir: Path) -> None:
    """Removes the folder next to the results folder if it has no runs: nothing that was begun there was finished."""
    with suppress(OSError):
        places(results_dir)[1].rmdir()


def sentences(lost: Sequence[Unwritten]) -> list[str]:
    """Returns the messages at the end of a sweep on runs outside of their results folder."""
    found = []
    for (results_dir, error, kept), count in Counter((one.results_dir, one.error, one.kept) for one in lost).items():
        those = f"{show_count(count, 'run')} could not be written to {results_dir} ({error})"
        where = f"kept in {kept} instead: zerobench status {kept}" if kept else "in the table above alone"
        found.append(f"{those}; {'it is' if count == 1 else 'they are'} {where}")
    return found


def words_of(error: Exception) -> str:
    """Returns the reason of an error in a few words."""
    if isinstance(error, OSError):
        return os.strerror(error.errno) if error.errno else str(error)
    return f"{type(error).__name__}: {error}"
