"""One start of a command line: its processes, and whether they still make progress."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zerobench.cluster.store import JOIN_S
from zerobench.host.durable import PROBE
from zerobench.host.leases import BROKEN

PATIENCE_S = JOIN_S + 120.0
"""A start that has written nothing for so long hangs: a fault. The processes of a job are waited for, for JOIN_S, where
one was killed before it had come; as long waits torchrun's agent at its end for another.
"""

LOOK_S = 10.0
"""Interval at which a start is looked at for that."""

LEASES = ("lease-", ".lease", PROBE, BROKEN)
"""How names of leases begin, and of the files by which a file server's clock is read."""


@dataclass
class Running:
    """The processes of one start."""

    processes: list[subprocess.Popen[bytes]]
    where: Path

    def wait_all(self, on_hang: Callable[[], None]) -> int:
        """Waits for all; returns the exit code of the first. Calls `on_hang` where the folder stands still."""
        last, since = -1.0, time.monotonic()
        look = since
        while any(process.poll() is None for process in self.processes):
            time.sleep(0.1)
            if time.monotonic() < look:
                continue
            look = time.monotonic() + LOOK_S
            now = newest(self.where)
            if now != last:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > PATIENCE_S:
                on_hang()
                since = time.monotonic()
        return self.processes[0].returncode


def begin(line: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Starts a process of a start, which heeds Ctrl-C whatever its parent does."""

    def heed_ctrl_c() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    with log.open("ab") as out:
        return subprocess.Popen(
            line, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            preexec_fn=heed_ctrl_c, cwd=Path(__file__).parents[2],
        )  # fmt: skip


def newest(where: Path) -> float:
    """Returns the time of the last change in a results folder, of a run or of a file in the hidden folders. Leases do
    not count, which a thread renews whatever the sweep does.
    """
    changes = [0.0]
    for entry in os.scandir(where):
        with suppress(OSError):  # it is removed meanwhile
            changes.append(0.0 if entry.name.startswith(".") else entry.stat().st_ctime)
    for hidden in where.glob(".*"):
        for at, _, names in os.walk(hidden):
            for name in names:
                with suppress(OSError):
                    path = os.path.join(at, name)
                    changes.append(0.0 if name.startswith(LEASES) else os.stat(path).st_mtime)
    return max(changes)
