"""Files and folders, in folders shared by all users, that no other user of the machine can have created or can change.

Anyone can take a name in the system's temporary folder beforehand, with a folder or a link.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

WRITABLE, ANY = 0o022, 0o077
"""Permissions that other users must not have: write permissions, or any at all."""


def make_own_folder(folder: Path) -> None:
    """Creates a folder that belongs only to this user. Raises OSError if the name is another user's or a link."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_own_folder(folder):
        raise PermissionError(f"{folder} is a link, another user's, or others can write to it")


def is_own_folder(folder: Path) -> bool:
    """Whether this is the user's folder and no other user can write to it. Raises OSError if it does not exist."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and _is_own(found, WRITABLE)


def is_own_file(descriptor: int) -> bool:
    """Whether this is the user's regular file and no other user can read or write it."""
    found = os.fstat(descriptor)
    return stat.S_ISREG(found.st_mode) and _is_own(found, ANY)


def _is_own(found: os.stat_result, forbidden: int) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & forbidden
