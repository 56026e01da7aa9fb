"""Folders that are marked as in use while they are being written, and folders in the system's temporary directory.

claimed     a folder with a lease next to it that is held. The lease is there before the folder, and
            stays where it is if the folder is renamed
abandoned   a folder whose lease is not held
lease       filelock's SoftFileLease: a file that names its process, which renews the file's time every BEAT_S
held        its process is alive, or runs on another machine or in another container and its lease is not old
old         not renewed for OLD_S, by this machine's clock. A process that waits for a lease takes it over earlier,
            SILENT_S after the last renewal that it has seen, if the file system can exchange two names (NFS cannot)

The kernel's locks (flock) would not do: some file systems refuse them, others grant them on each machine separately.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import LeaseSettingsMismatch, SoftFileLease, Timeout

from .files import is_ours

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
    lease = lease_at(lease_path(folder))
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


def lease_path(folder: Path) -> Path:
    """Returns the path of a folder's lease."""
    return folder.with_name(f"{folder.name}{LEASE}")


def is_claimed(folder: Path) -> bool:
    """Returns True if a living process, on any machine, is writing into this folder, or if that is unknown."""
    return is_held(lease_path(folder))


def remove(folder: Path) -> None:
    """Removes a folder, as far as possible, but renames it first: this client may still see an old name of a run that
    has been finished meanwhile, and then the server refuses to rename it.
    """
    hidden = folder.with_name(f"{PRUNED}{uuid.uuid4().hex[:8]}")
    with contextlib.suppress(OSError):
        folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


BEAT_S = 10.0
"""Seconds between two renewals of a lease."""

SILENT_S = 150.0
"""Seconds without a renewal after which a waiting process takes a lease over."""

OLD_S = 3600.0
"""Seconds without a renewal after which a lease is free for everyone; clocks of machines differ by less."""


def lease_at(path: Path) -> SoftFileLease:
    """Returns the lease whose file is `path`, for `acquire`."""
    return SoftFileLease(path, lease_duration=SILENT_S, heartbeat_interval=BEAT_S, thread_local=False)


def acquire(lease: SoftFileLease) -> bool:
    """Acquires a lease until its `release`, exclusively among all machines. Returns False if it is held; the same
    object, asked again and again, takes it over from a process that has become silent.

    Raises OSError if no file can be written there, and if the name is that of a pipe or a link.
    """
    for _ in range(2):
        try:
            lease.acquire(blocking=False)  # takes over from a dead process of this machine
            return True
        except (Timeout, LeaseSettingsMismatch):  # the latter if another program has set the duration
            try:
                if time.time() - os.lstat(lease.lock_file).st_mtime < OLD_S:
                    return False
            except FileNotFoundError:  # released just now
                continue
            lease.force_break()
    return False


def is_held(path: Path) -> bool:
    """Returns True if the lease `path` is held, or if that is unknown. A lease that is not held is removed."""
    try:
        if not os.path.lexists(path):
            return False
        lease = lease_at(path)
        if acquire(lease):
            lease.release()
            return False
    except OSError:  # another user's, or a read-only folder
        pass
    return True
