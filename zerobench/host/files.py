"""Text files that others wrote, read so that an error names the file, nothing is waited for and memory is bounded.

A pipe would be waited for and a device has no end, also behind a link, so only regular files are read.
"""

from __future__ import annotations

import errno
import os
import stat
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
    """Returns True where `open_small` would open it. Raises OSError where it does not exist."""
    return not _problem(path.lstat(), SMALL_BYTES)


def _problem(found: os.stat_result, most: int) -> str:
    if not stat.S_ISREG(found.st_mode):
        return "it is no file"
    return f"it has {found.st_size:,} bytes; at most {most:,} are read" if found.st_size > most else ""
