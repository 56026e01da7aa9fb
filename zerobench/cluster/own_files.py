"""Files and folders that no other user of the machine can have made or can change, below folders that all share.

A name in the system's temporary folder can be taken by anyone beforehand: by a folder or by a link.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

WRITABLE, ANY = 0o022, 0o077
"""Permissions that other users must not have: to write, or any at all."""


def make_own_folder(folder: Path) -> None:
    """Creates a folder that is the user's alone. Raises OSError if the name is that of another one or of a link."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_own_folder(folder):
        raise PermissionError(f"{folder} is a link, another user's, or others can write to it")


def is_own_folder(folder: Path) -> bool:
    """Returns True for a folder of the user's that no other can write to. Raises OSError if there is none."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and _is_own(found, WRITABLE)


def is_own_file(descriptor: int) -> bool:
    """Returns True for a regular file of the user's that no other can read or write."""
    found = os.fstat(descriptor)
    return stat.S_ISREG(found.st_mode) and _is_own(found, ANY)


def _is_own(found: os.stat_result, forbidden: int) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & forbidden
