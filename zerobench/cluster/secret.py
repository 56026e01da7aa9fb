"""A job's secret: known to its processes and to no one else. Values in the store are sealed with it.

way            how a process gets it
environment    ZEROBENCH_JOB_SECRET, if a user has set it, the same for every process
munge          rank 0 generates it and puts it into a credential for processes of the same user on the same cluster
file           rank 0 generates it and writes it to a file that all machines can access and only the user can read

Rank 0 posts an *offer*: the available ways, a session number, and the credential. A stranger can read and replace it,
so it is not trusted: a credential identifies its maker, and the file must belong to the user. At worst, a false offer
keeps processes from joining. A process that finds no way does not join.
"""

from __future__ import annotations

import os
import re
import secrets
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import munge
from .own_files import is_own_file, is_own_folder, make_own_folder

VARIABLE = "ZEROBENCH_JOB_SECRET"
LEAST_CHARS = 16
SECRET_BYTES = 32

FILE_S = 60.0
"""Seconds for a file to become visible on a shared file system."""

OLD_S = 86_400.0
"""Age in seconds from which a killed job's file is removed by a later job of the user."""

LIFETIME_S = 3600.0

ADVICE = f"set {VARIABLE} to one text, drawn at random, for all processes of the job"


class SecretError(RuntimeError):
    """Raised if a process cannot get the job's secret, with the message for the user."""


@dataclass(frozen=True)
class Offer:
    """Rank 0's offer, in clear text. `ways`: available ways. `session`: 32 hexadecimal digits, also the file's name."""

    ways: tuple[str, ...]
    session: str
    credential: str | None = None

    @classmethod
    def from_plain(cls, value: Any) -> Offer:
        """Parses an offer from the store, to which a stranger can write. Raises SecretError if it is invalid."""
        try:
            ways, session, credential = (value[name] for name in ("ways", "session", "credential"))
            well = re.fullmatch("[0-9a-f]{32}", session) and all(isinstance(one, str) for one in ways)
            if not well or not (credential is None or isinstance(credential, str)):
                raise ValueError(value)
        except (TypeError, KeyError, ValueError):
            raise SecretError("the offer of the job's secret is none of zerobench's: a stranger writes there") from None
        return cls(tuple(ways), session, credential)


def offer(environment: Mapping[str, str], munge_socket: str | None) -> tuple[Offer, bytes]:
    """Returns rank 0's offer and the secret. Raises SecretError if there is no way."""
    session = secrets.token_hex(16)
    if (given := _given(environment)) is not None:
        return Offer(("environment",), session), given
    secret = secrets.token_bytes(SECRET_BYTES)
    credential = munge.credential(f"{session} {secret.hex()}", LIFETIME_S, munge_socket)
    ways = [name for name, open_ in (("munge", credential is not None), ("file", _write(session, secret))) if open_]
    if not ways:
        folders = " or ".join(map(str, _folders(environment)))
        raise SecretError(f"no secret of the job can be had: nothing can be written to {folders}; {ADVICE}")
    return Offer(tuple(ways), session, credential), secret


def take(found: Offer, environment: Mapping[str, str], munge_socket: str | None) -> bytes:
    """Returns the secret on another rank. Raises SecretError if there is no way."""
    given = _given(environment)
    if (given is not None) != ("environment" in found.ways):
        here, there = ("here", "for rank 0") if given is not None else ("for rank 0", "here")
        raise SecretError(f"{VARIABLE} is set {here} and not {there}: {ADVICE}")
    if given is not None:
        return given
    if found.credential is not None:
        told = (munge.payload_of(found.credential, munge_socket) or "").split(" ")
        if told[0] == found.session and re.fullmatch("[0-9a-f]{64}", told[-1]):
            return bytes.fromhex(told[-1])
    deadline = time.monotonic() + FILE_S
    while "file" in found.ways:
        for folder in _folders(environment):
            if (secret := _read(folder / found.session)) is not None:
                return secret
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    folders = " nor in ".join(map(str, _folders(environment)))
    raise SecretError(
        f"rank 0's secret of the job is neither in {folders}, which this machine would share, nor by munge; {ADVICE}"
    )


def forget(session: str, environment: Mapping[str, str]) -> None:
    """Removes the file of a session, if it exists."""
    for folder in _folders(environment):
        with suppress(OSError):
            (folder / session).unlink()


def _given(environment: Mapping[str, str]) -> bytes | None:
    given = environment.get(VARIABLE)
    if given is not None and len(given) < LEAST_CHARS:
        raise SecretError(f"{VARIABLE} has {len(given)} characters: must have {LEAST_CHARS} or more, drawn at random")
    return given.encode() if given is not None else None


def _folders(environment: Mapping[str, str]) -> tuple[Path, Path]:
    """Returns the folders for the file: the user's cache, which machines may share, and this machine's own."""
    base = environment.get("XDG_CACHE_HOME")
    cache = Path(base) if base else Path(environment.get("HOME") or "/nonexistent") / ".cache"
    return cache / "zerobench" / "jobs", Path(tempfile.gettempdir()) / f"zerobench-{os.geteuid()}"


def _write(session: str, secret: bytes) -> bool:
    """Writes the file into the first folder where that succeeds. Returns False if none does."""
    for folder in _folders(os.environ):
        try:
            make_own_folder(folder)
            _sweep(folder)
            handle = os.open(folder / session, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(secret)
                os.fsync(file.fileno())
        except OSError:
            continue
        return True
    return False


def _read(path: Path) -> bytes | None:
    """Returns the secret in a file; None if it does not exist yet, or others can access it."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(handle, "rb") as file:
        if not is_own_file(handle) or not is_own_folder(path.parent):
            return None
        found = file.read(SECRET_BYTES + 1)
    return found if len(found) == SECRET_BYTES else None


def _sweep(folder: Path) -> None:
    for one in folder.iterdir():
        with suppress(OSError):  # another process sweeps as well
            if one.lstat().st_mtime < time.time() - OLD_S:
                one.unlink()
