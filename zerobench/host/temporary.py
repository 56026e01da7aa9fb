"""Folders that a lock marks as in use while they are written, and folders among the system's temporary files.

The lock is the kernel's (flock): it ends with its process, so no stale lock remains, and neither another machine nor
another container on the same folder takes a living process's folder for an abandoned one.
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
"""Prefix of our folders' names among the system's temporary files."""


@dataclass
class Aside:
    """A hidden folder in which a run is written. It is ours as long as `lock` is open."""

    path: Path
    lock: int

    def release(self) -> None:
        """Gives up the folder: it was renamed, or a later process may remove it."""
        os.close(self.lock)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Creates a folder among the system's temporary files and removes it at the end; first removes those of killed
    commands.
    """
    aside = claim(Path(tempfile.gettempdir()), ".zerobench-claim-", TEMPORARY, str(os.getpid()))
    try:
        yield aside.path
    finally:
        shutil.rmtree(aside.path, ignore_errors=True)
        aside.release()


def claim(parent: Path, before: str, marker: str, name: str, mode: int = 0o700) -> Aside:
    """Creates a folder in `parent` whose name begins with `marker`, and removes similar ones that no process has
    locked.

    `before`: prefix of its name until it is locked, so that no other process takes it for an abandoned one.
    """
    for left in parent.glob(f"{marker}*"):
        if not is_claimed(left):
            shutil.rmtree(left, ignore_errors=True)
    unique = f"{name}-{uuid.uuid4().hex[:8]}"
    unlocked = parent / f"{before}{unique}"
    unlocked.mkdir(mode)
    lock = os.open(unlocked, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a file system without locks: then no other process can lock it either
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    aside = parent / f"{marker}{unique}"  # only this name is looked for by others
    unlocked.rename(aside)
    return Aside(aside, lock)


def is_claimed(partial: Path) -> bool:
    """Returns True where a living process, on any machine, writes in this folder. Where locks do not
    work: always True.
    """
    try:
        descriptor = os.open(partial, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:  # of another user
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
