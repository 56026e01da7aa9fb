"""The fallback for runs that cannot be written to their results folder: the disk is full, or the folder was removed.

Such a run is written to a results folder of this process in the system's temporary directory. If that fails, too, its
row is only in the sweep's table.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
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


@cache
def temporary_results() -> Path:
    """Creates and returns the results folder of this process for rescued runs. Only the user can write to it."""
    return Path(tempfile.mkdtemp(prefix="zerobench-rescued-"))


def claim(results_dir: Path, prefix: str) -> Aside:
    """Claims a folder for a run. Raises the results folder's error if the temporary one fails, too."""
    try:
        return claim_folder(results_dir, prefix)
    except Exception as error:
        with suppress(Exception):
            return claim_folder(temporary_results(), prefix)
        raise error from None


def keep(
    aside: Aside, results_dir: Path, prefix: str, row: RunRow, config: CellConfig, provenance: dict[str, Any],
    tables: dict[str, list[Any]],
) -> Unwritten | None:  # fmt: skip
    """Calls folders.write_run. Returns None if the run is in its results folder. An error of any kind is treated alike:
    the run was measured, and the sweep goes on.
    """
    reason = "" if aside.path.parent == results_dir else why_unwritable(results_dir) or "it could not be written to"
    try:
        write_run(aside, prefix, row, config, provenance, tables)
        return Unwritten(results_dir, reason, aside.path.parent) if reason else None
    except Exception as error:
        reason = reason or reason_of(error)
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
        return reason_of(error)
    probe.release()
    shutil.rmtree(probe.path, ignore_errors=True)
    return ""


def messages_of(lost: Sequence[Unwritten]) -> list[str]:
    """Returns the messages at the end of a sweep on runs outside of their results folder."""
    messages = []
    for run, count in Counter(lost).items():
        kept = f"kept in {run.kept} instead: zerobench status {run.kept}" if run.kept else "in the table above alone"
        pronoun = "it is" if count == 1 else "they are"
        runs = show_count(count, "run")
        messages.append(f"{runs} could not be written to {run.results_dir} ({run.error}); {pronoun} {kept}")
    return messages


def reason_of(error: Exception) -> str:
    """Returns the reason of an error in a few words."""
    if isinstance(error, OSError):
        return os.strerror(error.errno) if error.errno else str(error)
    return f"{type(error).__name__}: {error}"
