"""Reads text files that others wrote, and writes files that survive a crash of the machine.

Reading: an error names the file, nothing is waited for and memory is bounded. A pipe would be waited for and a device
has no end, also behind a link, so only regular files are read.

Writing: a file's bytes reach the disk when the system finds time, a rename may before them: after a loss of power a
folder can have its final name and files of zero bytes. What is written here is on the disk (fsync) before its name is.

A server's answer may get lost. The client asks again, and the rename that was done fails: its source is gone. And a
client may remember for a minute that a name was free. So after a failure the target is looked at, and waited for.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
import uuid
from pathlib import Path
from typing import TextIO

LARGEST_BYTES = 2**28
"""Size, in bytes, up to which a file is read: a sparse file may claim any."""

SMALL_BYTES = 2**16
"""Size, in bytes, up to which a file is a small one."""


def read_text(path: Path, errors: str = "strict") -> str:
    """Returns the text of a file. `errors`: as for `open`. Raises OSError, or ValueError for a pipe or a folder,
    for a file that is too large and for bytes that are no UTF-8, each with the file's name.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: it is no file")
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), encoding="utf-8", errors=errors) as file:
            if problem := _problem(os.fstat(file.fileno()), LARGEST_BYTES):
                raise ValueError(f"{path}: {problem}")
            return file.read()
    except OSError as error:  # in the midst of reading, which names no file
        raise OSError(error.errno, error.strerror, str(path)) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: it is no text: {error}") from error


def open_small(path: Path | str, folder: int | None = None) -> TextIO:
    """Opens a small file for reading, `folder`: relative to that descriptor. Raises OSError for a link, for what is not
    a regular file, and for a file of more than SMALL_BYTES.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=folder)
    if problem := _problem(os.fstat(descriptor), SMALL_BYTES):
        os.close(descriptor)
        raise OSError(errno.EINVAL, problem, str(path))
    return os.fdopen(descriptor, encoding="utf-8", errors="replace")


def is_small(path: Path) -> bool:
    """Returns True if `open_small` would open it. Raises OSError if it does not exist."""
    return not _problem(path.lstat(), SMALL_BYTES)


def _problem(found: os.stat_result, most: int) -> str:
    if not stat.S_ISREG(found.st_mode):
        return "it is no file"
    return f"it has {found.st_size:,} bytes; at most {most:,} are read" if found.st_size > most else ""


SEEN_WITHIN_S = 60.0
"""Seconds after which a client has forgotten what it remembered of a folder: `acdirmax` of NFS."""

LATE = (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.EIO, errno.ETIMEDOUT, errno.ESTALE)
"""Errors of a rename that may have been done all the same, or whose target is one that this client does not see yet."""


PROBE = ".now-"
"""Prefix of a file that exists for a moment and has the file system's time."""


def replace_text(path: Path, text: str) -> None:
    """Writes a file again: readers see the old text or the new one, after a crash of the machine too."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")
    try:
        aside.write_text(text)
        sync(aside)
        aside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk; as well as this file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EBADF, errno.EOPNOTSUPP):  # it has no such thing
            raise
    finally:
        os.close(descriptor)


def sync_files(folder: Path) -> None:
    """Waits until the files of a folder, without those in folders in it, and their names are on the disk."""
    for path in folder.iterdir():
        if path.is_file() and not path.is_symlink():
            sync(path)
    sync(folder)


def rename_new(source: Path, target: Path) -> None:
    """Renames to a name that is used nowhere else: where the target is there afterwards, it was done."""
    try:
        source.rename(target)
    except OSError as error:
        if not is_there(target, error):
            raise


def is_there(target: Path, error: OSError) -> bool:
    """Returns True if the target of a rename exists that has failed with this error; waits until it can be seen."""
    deadline = time.monotonic() + SEEN_WITHIN_S
    while not os.path.lexists(target):
        if error.errno not in LATE or time.monotonic() > deadline or not target.parent.is_dir():
            return False
        with contextlib.suppress(OSError):
            os.listdir(target.parent)  # makes a client ask again for what is in the folder
        time.sleep(0.2)
    return True


def clock_of(folder: Path) -> float | None:
    """Returns the time, in seconds, by the clock of the file system; None if nothing can be written there."""
    probe = folder / f"{PROBE}{uuid.uuid4().hex[:12]}"
    try:
        probe.touch()
        try:
            os.utime(probe)
            return probe.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)
    except OSError:
        return None
