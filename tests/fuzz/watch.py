"""The watch over a case: all that it does to the process and the disk, and the state of both before and after.

Python tells an audit hook each file that is opened, each process that is begun and each name that a pickle imports; a
hook stays for the life of the process, and listens while a case is watched. What C writes past Python (parquet files)
is seen by the listing of the folders.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton

CANARY = "tests.fuzz.canary"
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = (
    "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate",
)  # fmt: skip
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.startfile")
NETWORK = ("socket.connect", "socket.bind", "socket.getaddrinfo", "urllib.Request")

WRITES_TO = "writes "

TRIED = re.compile(r"/tmp(/\.zerobench-scratch-\w+)?")
"""A file for a moment, by which offload.path=/tmp is tried."""

MOST_SECONDS = 60.0
"""Of a case, of the processor's time: others may use the machine."""


@dataclass
class Watched:
    """`told`: findings, a sentence each; `seconds`: of the processor."""

    told: list[str] = field(default_factory=list)
    seconds: float = 0.0


_heard: list[list[str]] = []
_may_write: list[str] = []


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if not _heard:
        return
    if event == "open" and not isinstance(args[0], int) and _is_write(args[1], args[2]):
        _note(f"{WRITES_TO}{os.fsdecode(args[0])}", args[0])
    elif event in CHANGES:
        inside = (
            f"/proc/self/fd/{args[-1]}" if isinstance(args[-1], int) and args[-1] >= 0 else ""
        )  # of a folder's handle
        _note(
            f"{event} {args[0]!r}", os.path.join(os.path.realpath(inside), os.fsdecode(args[0])) if inside else args[0]
        )
    elif event == "subprocess.Popen" and str(args[0]).endswith("ldconfig"):
        return  # ctypes looks for a library, as transformers is imported
    elif event in STARTS or event in NETWORK or event == "pickle.find_class":
        _heard[-1].append(f"{event} {args!r:.120}")
    elif event == "import" and str(args[0]).startswith(CANARY):
        _heard[-1].append(f"imports {args[0]}")


def _note(words: str, path: Any) -> None:
    name = os.path.abspath(os.fsdecode(path)) if isinstance(path, str | bytes | os.PathLike) else ""
    if words.startswith("os.mkdir") and os.path.isdir(name):
        return
    if not name.startswith((*_may_write, "/dev/null")) and not TRIED.fullmatch(name):
        _heard[-1].append(words)


def _is_write(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return bool(set(mode) & set("wax+"))
    return isinstance(flags, int) and bool(flags & WRITES)


def begin(room: Path) -> None:
    """Prepares this process for cases: temporary files lie in `room`, the only folder that a case may write to."""
    room.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(room)
    _may_write[:] = [str(room.resolve()), "/dev/shm/"]
    sys.dont_write_bytecode = True
    sys.addaudithook(_hear)


@contextlib.contextmanager
def watched(room: Path, *folders: Path) -> Iterator[Watched]:
    """Watches a case. `folders` must be afterwards as they were, and `room` empty but for them."""
    watch, events = Watched(), list[str]()
    before, listing = _state(), {folder: _listing(folder) for folder in folders}
    there = set(room.iterdir())
    begun = time.process_time()
    _heard.append(events)
    try:
        with warnings.catch_warnings():
            yield watch
    finally:
        _heard.pop()
        watch.seconds = time.process_time() - begun
        # A name that was opened beside a folder's handle lies in that folder: here is none of that name.
        elsewhere = [one for one in events if one.startswith(WRITES_TO) and not os.path.lexists(one[len(WRITES_TO) :])]
        watch.told += [one for one in dict.fromkeys(events) if one not in elsewhere or one[len(WRITES_TO)] == "/"]
        watch.told += [
            f"changes {name}: {was!r:.60} -> {now!r:.60}" for name, was, now in _differences(before, _state())
        ]
        watch.told += [
            f"changes the files of {folder.name}" for folder in folders if _listing(folder) != listing[folder]
        ]
        left = [one.name for one in room.iterdir() if one not in there]
        watch.told += [f"leaves {', '.join(left[:3])}"] if left else []
        watch.told += [f"takes {watch.seconds:.0f} s"] if watch.seconds > MOST_SECONDS else []
        _restore(before)


def _state() -> dict[str, Any]:
    log = logging.getLogger()
    hydra, config = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
    return {
        "cwd": os.getcwd(), "argv": list(sys.argv), "environment": dict(os.environ),
        "streams": (sys.stdout, sys.stderr),
        "handlers": list(log.handlers), "level": log.level, "Hydra": hydra, "Hydra's config": config,
        "random numbers": random.getstate(), "temporary folder": tempfile.tempdir, "path": list(sys.path),
        "timer": signal.getitimer(signal.ITIMER_REAL)[0], "canary": [name for name in sys.modules if CANARY in name],
        "limits": resource.getrlimit(resource.RLIMIT_DATA), "recursion": sys.getrecursionlimit(), "open files": _open(),
    }  # fmt: skip


def _open() -> int:
    return len(os.listdir("/proc/self/fd"))


def _differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    if after["open files"] > before["open files"]:
        gc.collect()
        after["open files"] = _open()
    for name, was in before.items():
        if after[name] != was and not (name == "open files" and after[name] < was):
            yield name, was, after[name]


def _restore(before: dict[str, Any]) -> None:
    """So that a finding of one case is none of the next."""
    os.chdir(before["cwd"])
    sys.argv[:] = before["argv"]
    random.setstate(before["random numbers"])
    Singleton._instances[GlobalHydra].hydra = before["Hydra"]
    Singleton._instances[HydraConfig].cfg = before["Hydra's config"]
    os.environ.pop("ZEROBENCH_CANARY", None)


def _listing(folder: Path) -> list[tuple[str, int, int]]:
    found = []
    for where, _, names in os.walk(folder):
        for name in names:
            state = os.lstat(os.path.join(where, name))
            found.append((os.path.join(where, name), state.st_size, state.st_mtime_ns))
    return sorted(found)
