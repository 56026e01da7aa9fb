"""Reads text and yaml files from other writers, and writes files that survive a crash of the machine.

Reading: errors name the file, nothing blocks, and memory is bounded. Reading a pipe would block and a device has no
end, even behind a link, so only regular files are read.

Writing: a rename may reach the disk before the file's bytes do, so after a power loss a folder can have its final name
and files of zero bytes. Here the bytes are on the disk (fsync) before the name is.

A server's reply may get lost. The client then retries, and the rename, already done, fails because its source is gone.
A client may also cache for a minute that a name was free. So after a failure the target is checked, for a while.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
import uuid
from pathlib import Path
from typing import Any

import yaml

LARGEST_BYTES = 2**28
"""Largest file that is read, in bytes: a sparse file may claim any size."""


def read_text(path: Path, errors: str = "strict") -> str:
    """Returns the text of a file. `errors`: as for `open`. Raises OSError, or ValueError for a pipe, a folder, a file
    that is too large and bytes that are not UTF-8; every message names the file.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: it is no file")
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), encoding="utf-8", errors=errors) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{path}: it is no file")
            if status.st_size > LARGEST_BYTES:
                raise ValueError(f"{path}: it has {status.st_size:,} bytes; at most {LARGEST_BYTES:,} are read")
            return file.read()
    except OSError as error:  # in the midst of reading, which names no file
        raise OSError(error.errno, error.strerror, str(path)) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: it is no text: {error}") from error


class OnceLoader(yaml.SafeLoader):
    """yaml's safe loader, except that a duplicate key is an error instead of replacing the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [key for number, key in enumerate(keys) if key in keys[:number]]
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]} is given twice", node.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def read_yaml(path: Path) -> Any:
    """Returns the content of a file. Raises ValueError or OSError."""
    text = read_text(path)
    try:
        return yaml.load(text, Loader=OnceLoader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: it is no yaml: {' '.join(str(error).split())[:200]}") from error


SEEN_WITHIN_S = 60.0
"""Seconds after which a client's cache of a folder has expired: `acdirmax` of NFS."""

LATE = (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.EIO, errno.ETIMEDOUT, errno.ESTALE)
"""Errors of a rename that may have succeeded anyway, or whose target this client may not see yet."""


def is_ours(path: Path) -> bool:
    """Returns True if the name ends in a number, as those of our temporary files and folders: others are a user's."""
    return re.search(r"[-.][0-9a-f]{8,16}\Z", path.name) is not None


def replace_text(path: Path, text: str) -> None:
    """Rewrites a file atomically: readers see the old or the new text, even after a crash of the machine."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")
    try:
        aside.write_text(text, encoding="utf-8")
        sync(aside)
        aside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk, as far as this file system supports it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EBADF, errno.EOPNOTSUPP):  # it has no such thing
            raise
    finally:
        os.close(descriptor)


def sync_files(folder: Path) -> None:
    """Waits until the files directly in a folder, and their names, are on the disk."""
    for path in folder.iterdir():
        if path.is_file() and not path.is_symlink():
            sync(path)
    sync(folder)


def rename_new(source: Path, target: Path) -> None:
    """Renames to a unique name: if the target exists afterwards, the rename succeeded."""
    try:
        source.rename(target)
    except OSError as error:
        deadline = time.monotonic() + SEEN_WITHIN_S
        while not os.path.lexists(target):  # until it can be seen
            if error.errno not in LATE or time.monotonic() > deadline or not target.parent.is_dir():
                raise
            with contextlib.suppress(OSError):
                os.listdir(target.parent)  # makes a client ask again for what is in the folder
            time.sleep(0.2)
