"""Leftovers of killed processes in a results folder. Each sweep removes them when it begins, and so does `zerobench
prune`.

abandoned   hidden, and no living process will finish it:
            partial runs                  whose lease (host/leases.py) is not held
            folders of a launcher's jobs  whose lease, of the composing process, is not held; a job that begins without
                                          its folder ends immediately
            unclaimed ones                folders that are half written or half removed, files that are about to
                                          replace another: their owner is unknown, so they count after an hour

A lease that is not held is removed by the look at it, without a question.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from ..host.files import is_ours
from ..host.leases import is_held
from ..host.temporary import LEASE, PRUNED, is_claimed, remove
from .folders import PARTIAL
from .tables import SEARCHES

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
