"""Leftovers of killed processes in a results folder. Each sweep removes them when it begins, `zerobench prune` too.

abandoned   hidden, and no living process will finish it:
            partial runs, boards, turns   whose lease is free
            folders of a launcher's jobs  that no process will use (job_folders.py)
            unclaimed ones                folders before their lease or half removed, files before they replace another:
                                          nothing tells whose they are, so they count once they are an hour old
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..host.durable import PROBE, clock_of
from ..host.leases import BROKEN, DOUBT, is_held
from ..host.temporary import PRUNED, is_claimed, remove
from . import job_folders
from .board import board_folders, is_up
from .folders import PARTIAL, TURN
from .job_folders import JOBS
from .table_cache import ASIDE as CACHE
from .tables import SEARCHES

UNLEASED = ".claim-"
"""Prefix of a folder that is being claimed, for a few milliseconds: testing its lock could keep its owner from it."""

UNCLAIMED_AT_MOST_S = 3600.0

UNCLAIMED = tuple(f"{prefix}*" for prefix in (UNLEASED, PRUNED, PROBE, BROKEN, CACHE, f"{SEARCHES}/.", f"{JOBS}/."))
"""Patterns of unclaimed ones."""


def partials(where: Path) -> list[Path]:
    """Returns the folders in which runs are written, those of dead processes too."""
    return [path for path in sorted(where.glob(f"{PARTIAL}*")) if path.is_dir() and not path.is_symlink()]


def abandoned(where: Path) -> list[Path]:
    """Returns the leftovers of a results folder."""
    killed = [path for path in partials(where) if not is_claimed(path)]
    killed += [path for path in board_folders(where) if not is_up(path)]
    turns = [path for path in sorted(where.glob(f"{TURN}*")) if not path.name.endswith(DOUBT)]
    killed += [path for path in turns if not is_held(path)]
    killed += job_folders.abandoned(where)
    return killed + sorted(_unclaimed(where))


def _unclaimed(where: Path) -> Iterator[Path]:
    found = [path for pattern in UNCLAIMED for path in where.glob(pattern)]
    found += [path for path in where.glob(f"{TURN}*{DOUBT}") if not path.with_name(path.stem).exists()]
    now = clock_of(where) if found else None
    for path in found:
        with suppress(OSError):  # it has its name, or is gone
            own = not path.is_symlink() and not path.parent.is_symlink()
            if own and now is not None and path.stat().st_mtime < now - UNCLAIMED_AT_MOST_S:
                yield path


def tidy(where: Path) -> None:
    """Removes the leftovers, as far as they can be removed."""
    for path in abandoned(where):
        if path.parent.name == JOBS and job_folders.is_in_use(path):  # the job has begun since
            continue
        if path.is_dir():
            remove(path)
        else:
            with suppress(OSError):
                path.unlink()
    with suppress(OSError):  # there is none, or others' jobs are in it
        (where / JOBS).rmdir()
