"""The process that owns a lease, in words that tell other processes, on this machine and on others, if it lives.

machine   a kernel from its boot to its end, and a namespace of process ids on it
started   the time at which a process started, in ticks since the boot: a pid is given again, the two together are not
"""

from __future__ import annotations

import os
import platform
import uuid
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Owner:
    """A process, so that processes on this machine and on others can tell whether it lives."""

    host: str
    boot: str
    namespace: int
    pid: int
    started: int | None

    @staticmethod
    def me() -> Owner:
        """Returns this process."""
        return Owner(platform.node(), *machine(), os.getpid(), _started(os.getpid()))

    @classmethod
    def from_plain(cls, value: dict[str, Any]) -> Owner:
        """Reads an owner from an untrusted file. Raises TypeError or ValueError where it is none."""
        found = cls(**value)
        if not isinstance(found.pid, int) or not 0 < found.pid < 2**31:
            raise ValueError(f"{found.pid!r:.60} is no process id")
        return found

    def lives(self) -> bool | None:
        """Returns True or False where that can be known: on the same kernel, in the same namespace of pids."""
        if (self.boot, self.namespace) != machine():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's
            pass
        found = _started(self.pid)
        return None if self.started is None else found in (self.started, None)


@cache
def machine() -> tuple[str, int]:
    """Returns what tells this kernel from all others until it ends, and the namespace of this process's pid. Elsewhere
    than on Linux the machine stands for its kernel.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return f"{uuid.getnode():x}", 0


def _started(pid: int) -> int | None:
    """Returns the time at which a process started, in ticks since the boot, 0 for one that has ended and was not waited
    for; None where that cannot be read.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None
