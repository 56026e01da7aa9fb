"""Leases on folders that several machines write to: filelock's SoftFileLease, with a rule for old ones.

lease   a file that names its process, which renews the file's time every BEAT_S
held    its process is alive, or runs on another machine or in another container and its lease is not old
old     not renewed for OLD_S, by this machine's clock. A process that waits for a lease takes it over earlier, SILENT_S
        after the last renewal that it has seen, if the file system can exchange two names (NFS cannot)

The kernel's locks (flock) would not do: some file systems refuse them, others grant them on each machine separately.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from filelock import LeaseSettingsMismatch, SoftFileLease, Timeout

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
