"""Folders that are marked as in use while they are being written, and folders in the system's temporary directory.

claimed     a folder that contains a lease (host/leases.py) whose process is alive, as far as can be known
abandoned   a folder whose lease is free. A folder without a lease was written by an earlier zerobench, and the kernel's
            lock (flock) decides; on a file system without locks it counts as claimed
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .files import is_ours, rename_new
from .leases import Lease, is_held, is_locked, lease_in

TEMPORARY = "zerobench-tmp-"
"""Prefix of our folders in the system's temporary directory."""

LEASE = ".lease"
"""The file in a claimed folder that names its owner."""

PRUNED = ".pruned-"
"""Prefix of a folder's name while it is being removed."""


@dataclass
class Aside:
    """A hidden folder in which a run is written. It is ours until `release`."""

    path: Path
    lease: Lease

    def release(self) -> None:
        """Gives up the folder: it has been renamed, or a later process may remove it."""
        self.lease.release()


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yields a temporary folder, removed at the end; first removes those of killed commands."""
    mine = os.getpid()
    aside = claim(Path(tempfile.gettempdir()), ".zerobench-claim-", TEMPORARY, str(mine))
    try:
        yield aside.path
    finally:
        if os.getpid() == mine:  # a fork of this process ends the block, too, when its copy is collected
            shutil.rmtree(aside.path, ignore_errors=True)
            aside.release()


def claim(parent: Path, before: str, marker: str, name: str, mode: int = 0o700) -> Aside:
    """Creates a folder in `parent` whose name begins with `marker`, and removes abandoned ones with that prefix.

    `before`: prefix of its name until it has its lease, so that no other process considers it abandoned.
    """
    for left in parent.glob(f"{marker}*"):
        if is_ours(left) and not left.is_symlink() and not is_claimed(left):
            remove(left)
    unique = f"{name}-{uuid.uuid4().hex[:8]}"
    unlocked, aside = parent / f"{before}{unique}", parent / f"{marker}{unique}"  # others look for the latter only
    with contextlib.suppress(FileExistsError):  # a server that was asked twice; the name is used nowhere else
        unlocked.mkdir(mode)
    try:
        lease = lease_in(unlocked, LEASE)
        try:
            rename_new(unlocked, aside)
        except BaseException:
            lease.release()
            raise
    except BaseException:
        shutil.rmtree(unlocked, ignore_errors=True)
        raise
    return Aside(aside, lease)


def is_claimed(partial: Path) -> bool:
    """Returns True if a living process, on any machine, is writing into this folder, or if that is unknown."""
    lease = partial / LEASE
    try:
        lease.stat()
    except FileNotFoundError:
        return is_locked(partial)
    except OSError:  # of another user
        return True
    return is_held(lease, lock=partial)


def remove(folder: Path) -> None:
    """Removes a folder, as far as possible. The server first renames it by its current name: an old name that this
    client still sees may belong to a run that has been finished meanwhile.
    """
    hidden = folder.with_name(f"{PRUNED}{uuid.uuid4().hex[:8]}")
    with contextlib.suppress(OSError):
        folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
