"""Leases: locks on folders that several machines write to, independent of the file system's own locks.

owner   a process: host, boot, pid namespace, pid, and its start time
lease   a file that names its owner; the owner renews the file's time every BEAT_S. It is
        held    if its owner is alive, or cannot be checked and is not silent
        free    if it does not exist, its owner is dead, or it is silent
silent  not renewed for STALE_S, nor within CONFIRM_S after another process recorded a doubt about it

On its own machine a dead owner is noticed immediately: by the kernel's lock (flock), if the file system granted one,
else by its pid. On other machines only silence shows it. Locks alone would not do: NFS without lockd, Lustre without
`flock` and many FUSE file systems refuse flock, and others (`nolock`, `local_lock`, `localflock`) grant it on each
machine separately, invisibly to the other machines.

Times are the file system's: a lease's time is compared with that of a file written next to it now, never with this
machine's clock. If clients stamp files themselves (Lustre), their clocks must agree to within STALE_S.

An owner is described so that any process, on this machine or another, can check whether it is alive:

machine   a kernel from boot to shutdown, and a pid namespace on it
started   the start time of a process, in ticks since boot: pids are reused, but not together with their start time
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from .files import clock_of, is_small, open_small

TASK_LEASE = "lease-"
"""Prefix of the leases in a job's folder: one per task, plus the composer's."""

BEAT_S = 10.0
"""Seconds between two renewals of a lease."""

STALE_S = 300.0
"""Age, in seconds, at which a lease is doubted: 30 beats, and five times as long as NFS caches a file's times."""

CONFIRM_S = 30.0
"""Seconds for which a doubted lease must stay unchanged: a machine or server that was asleep may come back."""

DOUBT = ".doubt"
"""Suffix of the file that records the time of a doubted lease."""

WRITE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW

NO_LEASE = (ValueError, TypeError, KeyError, RecursionError)
"""Errors of parsing a text that is not a lease."""


@dataclass(eq=False)
class Lease:
    """A lease that this process holds until `release`. `token`: unique. `folder`: descriptor of the folder that
    contains it, which may be renamed meanwhile. `lock`: descriptor for the kernel's lock, whether granted or not.
    """

    name: str
    token: str
    folder: int
    lock: int

    def beat(self) -> None:
        os.utime(self.name, dir_fd=self.folder)

    def release(self) -> None:
        """Removes the lease, unless the folder was removed or another process took the lease over."""
        _HEART.remove(self)
        with contextlib.suppress(OSError, *NO_LEASE):
            if _said(_text(self.name, self.folder)[0])[1] == self.token:
                os.unlink(self.name, dir_fd=self.folder)
                os.unlink(f"{self.name}{DOUBT}", dir_fd=self.folder)  # of a process that was late to judge
        for descriptor in {self.folder, self.lock}:
            os.close(descriptor)


def lease_in(folder: Path, name: str) -> Lease:
    """Creates a lease in a folder that no other process knows yet; the kernel's lock is on the folder. Raises OSError
    if no file can be written there.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    return _write(name, descriptor, descriptor)


def take(path: Path) -> Lease | None:
    """Acquires the lease `path`, exclusively among all machines; returns None while another process holds it.

    Exclusive creation decides (O_EXCL, which NFS supports since version 3). Raises OSError if no file can be written
    there, and if the name is that of a pipe or a link, which is never released.
    """
    for _ in range(2):
        parent = os.open(path.parent, os.O_RDONLY)
        try:
            file = os.open(path.name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=parent)
        except OSError as error:
            os.close(parent)
            if not isinstance(error, FileExistsError) or _is_foreign(path):
                raise
            if is_held(path) or not _break(path):
                return None
            continue
        return _write(path.name, parent, file)
    return None


def is_held(path: Path, lock: Path | None = None) -> bool:
    """Returns True if the lease `path` is held. `lock`: the path with the kernel's lock, by default the lease."""
    try:
        text, stamp = _text(path)
    except FileNotFoundError:
        return False
    except OSError:  # another user's
        return True
    try:
        owner, token, device = _said(text)
    except NO_LEASE:  # being written, or cut off
        return not _is_silent(path, stamp, (lock or path).parent)
    if owner == Owner.me():
        return _HEART.has(token)
    locked = _is_locked(lock or path, device) if owner.boot == machine()[0] and device is not None else None
    lives = owner.lives() if locked is None else locked
    return not _is_silent(path, stamp, (lock or path).parent) if lives is None else lives


def is_locked(path: Path) -> bool:
    """Returns True if a process has the kernel's lock on `path`, or the file system gives no locks."""
    return _is_locked(path) is not False


def _write(name: str, folder: int, lock: int) -> Lease:
    """Writes the owner and, if the kernel's lock was granted, the number of the file system as `device`."""
    lease = Lease(name, uuid.uuid4().hex, folder, lock)
    _HEART.add(lease)
    try:
        device = None
        with contextlib.suppress(OSError):  # a file system without locks, or a process that tests this one right now
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            device = os.fstat(lock).st_dev
        said = {"owner": asdict(Owner.me()), "token": lease.token, "device": device}
        with os.fdopen(os.open(name, WRITE, 0o666, dir_fd=folder), "w") as out:
            json.dump(said, out)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)
        lease.release()
        raise
    return lease


def _text(path: Path | str, folder: int | None = None) -> tuple[str, float]:
    """Returns a lease's text and its time in seconds; opening it asks the file server, whereas `stat` may not."""
    with open_small(path, folder) as file:
        return file.read(), os.fstat(file.fileno()).st_mtime


def _said(text: str) -> tuple[Owner, str, Any]:
    """Returns a lease's owner, token and device. Raises one of NO_LEASE if the text is not a lease."""
    said = json.loads(text)
    return Owner.from_plain(said["owner"]), str(said["token"]), said["device"]


def _is_foreign(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return not is_small(path)
    return False


def _break(path: Path) -> bool:
    """Removes a lease that is free; returns False if another process was faster."""
    judged = _text_or_none(path)
    aside = path.with_name(f"{BROKEN}{uuid.uuid4().hex[:12]}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return True
    ours = _text_or_none(aside) == judged
    if not ours:  # a new one, of the process that was faster: it goes back
        with contextlib.suppress(OSError):
            aside.rename(path)
            return False
    for gone in (aside, _doubt_of(path)):
        gone.unlink(missing_ok=True)
    return ours


def _text_or_none(path: Path) -> str | None:
    try:
        return _text(path)[0]
    except OSError:
        return None


def _is_locked(path: Path, device: int | None = None) -> bool | None:
    """Tries the kernel's lock. None if inconclusive: no locks, or a different mount from the owner's `device`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:  # another user's
        return None
    try:
        if device not in (None, os.fstat(descriptor).st_dev):
            return None
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False


BROKEN = ".broken-"
"""Prefix of a lease's name while it is being removed."""

_LOOKED: dict[Path, tuple[float, float, bool]] = {}
"""Lease -> its time, when this process last judged it (monotonic, in seconds), and the result, so that a polling
process does not write to the file server each time.
"""


def _is_silent(path: Path, stamp: float, beside: Path) -> bool:
    seen, when, silent = _LOOKED.get(path, (None, 0.0, False))
    if seen != stamp or time.monotonic() - when >= BEAT_S:
        silent = _judge(path, stamp, beside)
        _LOOKED[path] = (stamp, time.monotonic(), silent)
    return silent


def _judge(path: Path, stamp: float, beside: Path) -> bool:
    """Doubts a lease, or confirms an earlier doubt, by the clock of the folder `beside`. If nothing can be written
    there, no lease is silent.
    """
    now = clock_of(beside)
    if now is None or now - stamp < STALE_S:
        return False
    doubt = _doubt_of(path)
    with contextlib.suppress(OSError):
        if _text_or_none(doubt) == repr(stamp):
            return now - _text(doubt)[1] >= CONFIRM_S
        doubt.unlink(missing_ok=True)
        with doubt.open("x") as file:  # a new one: what was there may be a link to a file of the user's
            file.write(repr(stamp))
    return False


def _doubt_of(path: Path) -> Path:
    return path.with_name(f"{path.name}{DOUBT}")


@dataclass
class _Heart:
    """The thread that renews the leases of this process, as long as there are any."""

    leases: list[Lease] = field(default_factory=list)
    guard: threading.Lock = field(default_factory=threading.Lock)
    pid: int = 0
    """The process that the thread is in: a forked child does not share its parent's leases."""
    wake: threading.Event = field(default_factory=threading.Event)

    def add(self, lease: Lease) -> None:
        with self._mine():
            self.leases.append(lease)
            if len(self.leases) == 1:
                self.wake = threading.Event()
                threading.Thread(target=self._renew, args=(self.wake,), name="leases", daemon=True).start()

    def remove(self, lease: Lease) -> None:
        with self._mine():
            if lease in self.leases:
                self.leases.remove(lease)
                if not self.leases:
                    self.wake.set()

    def has(self, token: str) -> bool:
        with self._mine():
            return any(lease.token == token for lease in self.leases)

    @contextlib.contextmanager
    def _mine(self) -> Iterator[None]:
        if self.pid != os.getpid():
            self.leases, self.guard, self.pid = [], threading.Lock(), os.getpid()
        with self.guard:
            yield

    def _renew(self, ended: threading.Event) -> None:
        while not ended.wait(BEAT_S):
            with self._mine():
                leases = list(self.leases)
            for lease in leases:
                with contextlib.suppress(OSError):  # the server is away: the next beat may reach it
                    lease.beat()


_HEART = _Heart()


@dataclass(frozen=True)
class Owner:
    """A process, described so that processes on this and other machines can check whether it is alive."""

    host: str
    boot: str
    namespace: int
    pid: int
    started: int | None

    @staticmethod
    def me() -> Owner:
        return Owner(platform.node(), *machine(), os.getpid(), _started(os.getpid()))

    @classmethod
    def from_plain(cls, value: dict[str, Any]) -> Owner:
        """Parses an owner from an untrusted file. Raises TypeError or ValueError if it is not one."""
        found = cls(**value)
        if not isinstance(found.pid, int) or not 0 < found.pid < 2**31:
            raise ValueError(f"{found.pid!r:.60} is no process id")
        return found

    def lives(self) -> bool | None:
        """Returns whether it is alive, if on the same kernel and in the same pid namespace; None if that is unknown."""
        if (self.boot, self.namespace) != machine():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's
            pass
        found = _started(self.pid)
        return None if self.started is None else found in (self.started, None)


@cache
def machine() -> tuple[str, int]:
    """Returns an identifier of the running kernel, and the namespace of this process's pid. On systems other than
    Linux, the machine's identifier stands in for the kernel's.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return f"{uuid.getnode():x}", 0


def _started(pid: int) -> int | None:
    """Returns the start time of a process, in ticks since boot; 0 for a zombie or dead process; None if it cannot be
    read.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None
