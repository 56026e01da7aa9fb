"""Leftovers of killed processes in a results folder, including the folders of a launcher's jobs. Each sweep removes
them when it begins, and so does `zerobench prune`.

in use      a job's folder of which the composing process, or a task of the job, holds its lease (host/leases.py)
orphan      a job in use without its composing process, whose board used to list its launches
abandoned   hidden, and no living process will finish it:
            partial runs, boards          whose lease is not held
            folders of a launcher's jobs  that are not in use: the composing process was killed, and the job has ended
                                          or not begun; a job that begins without its folder ends immediately
            unclaimed ones                folders that are half written or half removed, files that are about to
                                          replace another: their owner is unknown, so they count after an hour

A lease that is not held is removed by the look at it, without a question.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..host.files import PROBE, clock_of, is_ours, read_text
from ..host.leases import TASK_LEASE, is_held
from ..host.temporary import LEASE, PRUNED, is_claimed, remove
from .board import board_folders
from .folders import PARTIAL
from .run_files import ASIDE as CACHE
from .tables import SEARCHES

JOBS = ".jobs"
"""The folder, in a results folder, with the folders of jobs."""

ORDER = "order.json"

UNCLAIMED_AT_MOST_S = 3600.0

UNCLAIMED = tuple(f"{prefix}*" for prefix in (PRUNED, PROBE, CACHE, f"{SEARCHES}/.", f"{JOBS}/."))
"""Patterns of unclaimed entries."""


def partials(where: Path) -> list[Path]:
    """Returns the folders in which runs are written, including those of dead processes."""
    return [path for path in sorted(where.glob(f"{PARTIAL}*")) if path.is_dir() and not path.is_symlink()]


def abandoned(where: Path) -> list[Path]:
    """Returns the leftovers of a results folder."""
    killed = [path for path in partials(where) if is_ours(path) and not is_claimed(path)]
    killed += [path for path in board_folders(where) if is_ours(path) and not is_claimed(path)]
    killed += abandoned_jobs(where)
    for lease in where.glob(f".*{LEASE}"):
        if is_ours(lease.with_suffix("")):
            is_held(lease)
    return killed + sorted(_unclaimed(where))


def _unclaimed(where: Path) -> Iterator[Path]:
    found = [path for pattern in UNCLAIMED for path in where.glob(pattern) if is_ours(path)]
    now = clock_of(where) if found else None
    for path in found:
        with suppress(OSError):  # it has its name, or is gone
            own = not path.is_symlink() and not path.parent.is_symlink()
            if own and now is not None and path.stat().st_mtime < now - UNCLAIMED_AT_MOST_S:
                yield path


def tidy(where: Path) -> None:
    """Removes the leftovers, as far as possible."""
    for path in abandoned(where):
        if path.parent.name == JOBS and is_in_use(path):  # the job has begun since
            continue
        if path.is_dir():
            remove(path)
        else:
            with suppress(OSError):
                path.unlink()
    with suppress(OSError):  # there is none, or others' jobs are in it
        (where / JOBS).rmdir()


def job_folders(results_dir: Path) -> list[Path]:
    """Returns the folders of jobs in a results folder; links are not followed."""
    jobs = results_dir / JOBS
    if jobs.is_symlink():
        return []
    with suppress(OSError):  # none are there, or they are being removed
        found = [entry for entry in os.scandir(jobs) if entry.name[:1].isdecimal() and "-" in entry.name]
        return sorted(Path(entry.path) for entry in found if entry.is_dir(follow_symlinks=False))
    return []


def is_in_use(folder: Path) -> bool:
    """Returns True if the composing process, or a task of the job, is alive, on any machine."""
    with suppress(OSError):  # it is being removed, by its composing process
        return is_claimed(folder) or any(map(is_held, folder.glob(f"{TASK_LEASE}*")))
    return True


def abandoned_jobs(results_dir: Path) -> list[Path]:
    """Returns the folders of jobs that no process will use."""
    return [folder for folder in job_folders(results_dir) if (folder / ORDER).is_file() and not is_in_use(folder)]


def boards_of_orphans(results_dir: Path) -> list[Path]:
    """Returns the boards of orphans."""
    boards = []
    for folder in job_folders(results_dir):
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):  # it is being removed, or is no job's
            order = json.loads(read_text(folder / ORDER))
            if not is_claimed(results_dir / str(order["board"] or "none")):
                boards += board_folders(folder)
    return boards
