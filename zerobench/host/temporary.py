"""Folders that a lock marks as somebody's while they are written, and folders among the system's temporary files.

The lock is the kernel's (flock): it goes with its process, so nothing stale is left, and neither another machine
nor another container on the same folder takes a living process's folder for a dead one's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TEMPORARY = "zerobench-tmp-"
"""What the names of our folders among the system's temporary files begin with."""


@dataclass
class Aside:
    """A hidden folder in which a run comes to be. It is ours as long as `lock` is open."""

    path: Path
    lock: int

    def release(self) -> None:
        """No longer ours: renamed, or to be removed by whoever comes next."""
        os.close(self.lock)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder among the system's temporary files, gone at the end; what killed commands left there goes first."""
    aside = claim(Path(tempfile.gettempdir()), ".zerobench-claim-", TEMPORARY, str(os.getpid()))
    try:
        yield aside.path
    finally:
        shutil.rmtree(aside.path, ignore_errors=True)
        aside.release()


def claim(parent: Path, before: str, marker: str, name: str, mode: int = 0o700) -> Aside:
    """A new folder in `parent` whose name begins with `marker`; those like it that nobody holds are removed.

    `before`: what its name begins with until it is locked, so that nobody takes it for an abandoned one.
    """
    for left in parent.glob(f"{marker}*"):
        if not is_claimed(left):
            shutil.rmtree(left, ignore_errors=True)
    unique = f"{name}-{uuid.uuid4().hex[:8]}"
    unlocked = parent / f"{before}{unique}"
    unlocked.mkdir(mode)
    lock = os.open(unlocked, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a file system without locks: nobody can take it from us either
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    aside = parent / f"{marker}{unique}"  # only now is it looked at by others
    unlocked.rename(aside)
    return Aside(aside, lock)


def is_claimed(partial: Path) -> bool:
    """Whether a process that lives, anywhere, writes in this folder. Where locks do not work: yes."""
    try:
        descriptor = os.open(partial, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:  # another user's
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
