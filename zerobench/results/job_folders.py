"""The folders of a launcher's jobs in a results folder, and which of them are in use: for sweeps, followers and
`zerobench prune`.

in use      the composing process, or a task of the job, holds its lease (host/leases.py) in the folder
abandoned   not in use: the composing process was killed, and the job is over or has not begun. The next sweep removes
            the folder (abandoned.py), and a job that begins without its folder ends at once
orphan      a job in use without its composing process, on whose board its launches were
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from ..host.files import read_text
from ..host.leases import is_held
from .board import board_folders, is_up

JOBS = ".jobs"
"""The folder, in a results folder, of jobs' folders."""

ORDER = "order.json"

LEASE, COMPOSER = "lease-", "lease-composer"
"""Prefix of the names of leases in a job's folder, and the composing process's."""


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
    """Returns True where the composing process, or a task of the job, lives, on any machine."""
    with suppress(OSError):  # it is being removed, by its composing process
        tasks = (is_held(path) for path in folder.glob(f"{LEASE}[0-9]*") if path.suffix == "")
        return is_held(folder / COMPOSER, lock=folder) or any(tasks)
    return True


def abandoned(results_dir: Path) -> list[Path]:
    """Returns the folders of jobs that no process will use."""
    return [folder for folder in job_folders(results_dir) if (folder / ORDER).is_file() and not is_in_use(folder)]


def boards_of_orphans(results_dir: Path) -> list[Path]:
    """Returns the boards of orphans."""
    boards = []
    for folder in job_folders(results_dir):
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):  # it is being removed, or is no job's
            order = json.loads(read_text(folder / ORDER))
            if not is_up(results_dir / str(order["board"] or "none")):
                boards += board_folders(folder)
    return boards
