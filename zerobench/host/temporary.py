"""Folders that are marked as in use while they are being written, and folders in the system's temporary directory.

claimed     a folder with a lease (host/leases.py) next to it that is held. The lease is there before the folder, and
            stays where it is if the folder is renamed
abandoned   a folder whose lease is not held
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

from filelock import SoftFileLease

from .files import is_ours
from .leases import acquire, is_held, lease_at

TEMPORARY = "zerobench-temp-"
"""Prefix of our folders in the system's temporary directory."""

LEASE = ".lease"
"""Suffix of the lease of a claimed folder."""

PRUNED = ".pruned-"
"""Prefix of a folder's name while it is being removed."""


@dataclass
class Aside:
    """A hidden folder in which a run is written. It is ours until `release`."""

    path: Path
    lease: SoftFileLease

    def release(self) -> None:
        """Gives up the folder: it has been renamed, or a later process may remove it."""
        self.lease.release()


@contextlib.contextmanager
def temporary_folder(parent: str | None = None) -> Iterator[Path]:
    """Yields a temporary folder, removed at the end; first removes those of killed commands. `parent`: default, the
    system's temporary directory.
    """
    owner = os.getpid()
    aside = claim(Path(parent or tempfile.gettempdir()), TEMPORARY, str(owner))
    try:
        yield aside.path
    finally:
        if os.getpid() == owner:  # a fork of this process ends the block, too, when its copy is collected
            shutil.rmtree(aside.path, ignore_errors=True)
            aside.release()


def claim(parent: Path, marker: str, name: str, mode: int = 0o700) -> Aside:
    """Creates a folder in `parent` whose name begins with `marker`, and removes abandoned ones with that prefix.

    Raises OSError if nothing can be written there.
    """
    for left in parent.glob(f"{marker}*"):
        folder = left.with_suffix("") if left.suffix == LEASE else left
        if is_ours(folder) and not folder.is_symlink() and not is_claimed(folder):
            remove(folder)
    folder = parent / f"{marker}{name}-{uuid.uuid4().hex[:8]}"
    lease = lease_at(lease_of(folder))
    if not acquire(lease):
        raise FileExistsError(f"{folder}: another process has its lease")
    aside = Aside(folder, lease)
    try:
        with contextlib.suppress(FileExistsError):  # a server that was asked twice; the name is used nowhere else
            folder.mkdir(mode)
    except BaseException:
        aside.release()
        raise
    return aside


def lease_of(folder: Path) -> Path:
    """Returns the path of a folder's lease."""
    return folder.with_name(f"{folder.name}{LEASE}")


def is_claimed(folder: Path) -> bool:
    """Returns True if a living process, on any machine, is writing into this folder, or if that is unknown."""
    return is_held(lease_of(folder))


def remove(folder: Path) -> None:
    """Removes a folder, as far as possible. The server first renames it by its current name: an old name that this
    client still sees may belong to a run that has been finished meanwhile.
    """
    hidden = folder.with_name(f"{PRUNED}{uuid.uuid4().hex[:8]}")
    with contextlib.suppress(OSError):
        folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
