"""Memory that is not torch's: what malloc has handed out beyond torch's allocator, numpy's arrays and C libraries'.

Python's small objects are not among it, they lie in arenas of their own, so that what is left is steady to some tens of
KiB where nothing is kept. Read between steps: what came and went within one is not seen.
"""

from __future__ import annotations

import ctypes
from functools import cache

from . import allocator_hook

PROBE_BYTES = 2**20


class _MallocInfo(ctypes.Structure):
    """glibc's struct mallinfo2, of all arenas."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
                     "keepcost")
    ]  # fmt: skip


class HeapGrowth:
    """What malloc has handed out to others than torch since `begin`, where both it and torch's allocator tell."""

    def __init__(self) -> None:
        self._before: int | None = None
        self._most: int | None = None

    def begin(self) -> None:
        """The probe is entered."""
        self._before = self._now()

    def most(self) -> int | None:
        """The most that there was whenever this was asked for."""
        now = self._now()
        if now is not None and self._before is not None:
            self._most = max(self._most or 0, now - self._before)
        return self._most

    @staticmethod
    def _now() -> int | None:
        hook, in_use = allocator_hook.install(), malloc_bytes()
        return None if hook is None or in_use is None else in_use - hook.live_bytes()


def malloc_bytes() -> int | None:
    """Bytes that malloc has handed out to this process, torch's included; None where it does not tell."""
    return _in_use() if _tells() else None


def _in_use() -> int:
    info = ctypes.CDLL(None).mallinfo2
    info.restype = _MallocInfo
    found = info()
    return int(found.uordblks + found.hblkhd)


@cache
def _tells() -> bool:
    """Whether the malloc of this process is the one that keeps these numbers: a preloaded one may not."""
    try:
        before = _in_use()
    except (OSError, AttributeError):  # another libc, or one before 2.33
        return False
    probe = ctypes.create_string_buffer(PROBE_BYTES)
    tells = _in_use() - before >= PROBE_BYTES
    del probe
    return tells
