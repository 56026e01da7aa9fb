"""Leases: locks on folders that several machines write to, independent of the file system's own locks.

lease   a file that names its process, which renews the file's time every BEAT_S: filelock's SoftFileLease
held    its process is alive, or runs on another machine or in another container and is not silent
silent  not renewed for SILENT_S, by the file system's clock

The kernel's locks (flock) would not do: NFS without lockd, Lustre without `flock` and many FUSE file systems refuse
them, and others (`nolock`, `local_lock`, `localflock`) grant them on each machine separately, invisibly to the others.

A lease's time is compared with that of a file written next to it now, never with this machine's clock. If clients stamp
files themselves (Lustre), their clocks must agree to within SILENT_S.
"""

from __future__ import annotations

import os
from pathlib import Path

from filelock import LeaseSettingsMismatch, SoftFileLease, Timeout

from .files import clock_of, open_small

BEAT_S = 10.0
"""Seconds between two renewals of a lease."""

SILENT_S = 150.0
"""Age, in seconds, at which a lease is silent: 15 beats, and more than twice as long as NFS caches a file's times."""


def take(path: Path) -> SoftFileLease | None:
    """Acquires the lease `path` until its `release`, exclusively among all machines; returns None if it is held.

    Raises OSError if no file can be written there, and if the name is that of a pipe, a link or a large file.
    """
    lease = SoftFileLease(path, lease_duration=SILENT_S, heartbeat_interval=BEAT_S, thread_local=False)
    for _ in range(2):
        try:
            lease.acquire(blocking=False)  # takes over from a dead process of this machine
            return lease
        except (Timeout, LeaseSettingsMismatch):  # the latter if another program has set the duration
            if not _is_silent(path):
                return None
            lease.force_break()  # filelock itself cannot on NFS, which does not exchange two names
    return None


def is_held(path: Path) -> bool:
    """Returns True if the lease `path` is held, or if that is unknown. A lease that is not held is removed."""
    try:
        if not os.path.lexists(path):
            return False
        lease = take(path)
    except OSError:  # another user's, or a read-only folder
        return True
    if lease is not None:
        lease.release()
    return lease is None


def _is_silent(path: Path) -> bool:
    """If nothing can be written next to it, no lease is silent."""
    now = clock_of(path.parent)
    try:
        with open_small(path) as file:  # opening asks the file server for the time, whereas `stat` may not
            return now is not None and now - os.fstat(file.fileno()).st_mtime >= SILENT_S
    except FileNotFoundError:  # released just now
        return True
