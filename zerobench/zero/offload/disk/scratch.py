"""Folders for a rank's files, which are useless once the rank has ended.

parent    where the user wants files: `offload.path`, or a run's own folder
scratch   a rank's folder in it, NAME-*, with a file LOCK that names its machine. The lock is the kernel's (flock) and
          ends with the process, in every case
sweep     removes the scratch folders of a parent whose processes have ended: a killed rank cannot clean up itself.
          Other machines' folders stay: their locks may be invisible here (NFS with `nolock`, Lustre with `localflock`),
          and so do all in a file system without locks
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .direct_io import ALIGN_BYTES, DiskError, free_bytes

NAME = "zerobench-scratch-"
LOCK = "lock"


class Scratch:
    """A new folder in `parent`, removed with its content when it is garbage-collected or its interpreter ends.

    Leftovers of ended processes in `parent` are removed first. Raises DiskError if no folder can be created there.
    """

    def __init__(self, parent: Path | str) -> None:
        home, name = Path(parent), uuid.uuid4().hex[:12]
        sweep(home)
        unlocked = home / f".{NAME}{name}"
        self.path = home / f"{NAME}{name}"
        try:
            unlocked.mkdir(0o700)
            lock = hold(unlocked / LOCK)
            unlocked.rename(self.path)  # only now do others look at it
        except OSError as error:
            words = f"no folder can be made in {home}: {os.strerror(error.errno or 0)}"
            raise DiskError(words, error.errno) from error
        self._end = at_end(self, _remove, self.path, lock)


def hold(lock: Path) -> int:
    """Makes a file that names this machine and is locked until its descriptor, which is returned, is closed."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(descriptor, platform.node().encode())
    return descriptor


def sweep(parent: Path | str) -> list[Path]:
    """Removes scratch folders in `parent` whose processes have ended, and returns them."""
    own = f"{NAME}{'[0-9a-f]' * 12}"  # others are a user's
    gone = [folder for folder in Path(parent).glob(own) if not is_held(folder / LOCK)]
    for folder in gone:
        shutil.rmtree(folder, ignore_errors=True)
    return gone


def problems_of_path(path: str) -> list[str]:
    """Returns an error message if files cannot be stored in the folder `path` on this machine."""
    home = Path(path).expanduser()
    if not os.path.exists(home):  # a name that is too long is none either
        return [f"{path}: there is no such folder; make it, or name another"]
    if not home.is_dir():
        return [f"{path}: is no folder; name one on the disk to be used"]
    try:
        with tempfile.NamedTemporaryFile(dir=home, prefix=f".{NAME}") as file:
            file.write(bytes(ALIGN_BYTES))
            file.flush()
    except OSError as error:
        free = f" ({free_bytes(home)} bytes are free)"
        return [f"{path}: cannot be written to: {os.strerror(error.errno or 0)}{free}; name another folder"]
    return []


def is_held(file: Path) -> bool:
    """Returns True if a running process holds this lock, or if that cannot be determined."""
    try:
        lock = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # its owner, or another process, is removing it
        return False
    except OSError:  # another user's
        return True
    try:
        if os.read(lock, 4096) not in (b"", platform.node().encode()):  # another machine's
            return True
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # it is held, or there are no locks
        return True
    finally:
        os.close(lock)
    return False


def at_end(owner: object, act: Callable[..., None], *arguments: Any) -> weakref.finalize[..., object]:
    """weakref.finalize for resources of this process only: a forked child ends with copies of its parent's objects."""
    return weakref.finalize(owner, _act_in, os.getpid(), act, *arguments)


def _act_in(process: int, act: Callable[..., None], *arguments: Any) -> None:
    if os.getpid() == process:
        act(*arguments)


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
