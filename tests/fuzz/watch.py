"""The watch over a case: all that it does to the process and the disk, and the state of both before and after.

Python reports to an audit hook each file that is opened, each process that is begun and each name that a pickle
imports; a hook stays for the life of the process, and listens while a case is watched. What C writes past Python
(parquet files) is seen by the listing of the folders.
"""

import contextlib
import gc
import os
import random
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

CANARY = "tests.fuzz.canary"
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate")
FORBIDDEN = (
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.startfile",
    "socket.connect", "socket.bind", "socket.getaddrinfo", "urllib.Request", "pickle.find_class",
)  # fmt: skip

MOST_S = 60.0
"""Seconds of a case."""

_heard: list[list[str]] = []
_room: list[str] = []


class HungError(BaseException):
    """A case that was ended by its time."""


@cache
def _listen() -> None:
    sys.addaudithook(_hear)


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if not _heard:
        return
    if event == "open" and not isinstance(args[0], int) and _is_write(args[1], args[2]):
        _note("writes", args[0])
    elif event in CHANGES:
        inside = f"/proc/self/fd/{args[-1]}" if isinstance(args[-1], int) and args[-1] >= 0 else ""  # a folder's handle
        _note(event, os.path.join(os.path.realpath(inside), os.fsdecode(args[0])) if inside else args[0])
    elif event == "subprocess.Popen" and str(args[0]).endswith("ldconfig"):
        return  # ctypes looks for a library, as transformers is imported
    elif event in FORBIDDEN or (event == "import" and str(args[0]).startswith(CANARY)):
        _heard[-1].append(f"{event} {args!r:.120}")


def _note(event: str, path: Any) -> None:
    name = os.path.abspath(os.fsdecode(path)) if isinstance(path, str | bytes | os.PathLike) else ""
    is_there = event == "os.mkdir" and os.path.isdir(name)
    if not is_there and not name.startswith(_room[-1]):
        _heard[-1].append(f"{event} {name}")


def _is_write(mode: Any, flags: Any) -> bool:
    return bool(set(mode) & set("wax+")) if isinstance(mode, str) else isinstance(flags, int) and bool(flags & WRITES)


@contextlib.contextmanager
def watched(room: Path, *folders: Path) -> Iterator[None]:
    """Watches a case; fails if it does what none may. Temporary files lie in `room`, the only folder that it may write
    to, and which is empty afterwards but for `folders`, whose files are as they were.
    """
    _listen()
    before, listing, events = _state(), {folder: _listing(folder) for folder in folders}, list[str]()
    there, temporary = set(room.iterdir()), tempfile.tempdir
    _room.append(str(room.resolve()))
    tempfile.tempdir = str(room)
    try:
        with warnings.catch_warnings(record=True), _bounded():
            warnings.simplefilter("always")  # pytest makes errors of them
            _heard.append(events)
            try:
                yield
            finally:
                _heard.pop()
        changed = [f"{name}: {was!r:.60} -> {now!r:.60}" for name, was, now in _differences(before, _state())]
        changed += [f"files of {folder.name}" for folder in folders if _listing(folder) != listing[folder]]
        # A name that was opened beside a folder's handle lies in that folder: here is none of that name.
        done = [one for one in dict.fromkeys(events) if not one.startswith("writes ") or os.path.lexists(one[7:])]
        left = [one.name for one in room.iterdir() if one not in there]
        assert (done, changed, left) == ([], [], [])
    finally:
        _room.pop()
        tempfile.tempdir = temporary
        _restore(before)


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    def end(number: int, frame: Any) -> None:
        raise HungError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, MOST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _state() -> dict[str, Any]:
    return {
        "cwd": os.getcwd(), "argv": list(sys.argv), "environment": dict(os.environ),
        "streams": (sys.stdout, sys.stderr), "random numbers": random.getstate(), "path": list(sys.path),
        "canary": [name for name in sys.modules if CANARY in name], "recursion": sys.getrecursionlimit(),
        "open files": len(os.listdir("/proc/self/fd")),
    }  # fmt: skip


def _differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    if after["open files"] > before["open files"]:
        gc.collect()
        after["open files"] = len(os.listdir("/proc/self/fd"))
    for name, was in before.items():
        if after[name] != was and not (name == "open files" and after[name] < was):
            yield name, was, after[name]


def _restore(before: dict[str, Any]) -> None:
    """So that a finding of one case is none of the next."""
    os.chdir(before["cwd"])
    sys.argv[:] = before["argv"]
    random.setstate(before["random numbers"])
    os.environ.pop("ZEROBENCH_CANARY", None)


def _listing(folder: Path) -> list[tuple[str, int, int]]:
    found = [os.path.join(where, name) for where, _, names in os.walk(folder) for name in names]
    return sorted((name, os.lstat(name).st_size, os.lstat(name).st_mtime_ns) for name in found)
