"""Memory outside of torch: bytes that malloc has handed out beyond torch's allocator and MKL's buffers, to numpy and C
libraries.

Python's small objects are not included: they are in their own arenas. So the rest is steady to some tens of KiB if
nothing is kept. It is read between steps: allocations freed within one are not seen.

MKL keeps a buffer for its next matrix product in each thread that has computed one, mostly on Intel's processors: 5 MiB
for a product of two 512 x 512 matrices. It takes them directly from malloc; they are neither torch's nor caused by the
measured code. torch's wheels have MKL within libtorch_cpu, other builds (conda's) load it as a separate library;
`mkl_mem_stat` reports its buffers in both cases.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

from . import allocator_hook

PROBE_BYTES = 2**20


class _MallocInfo(ctypes.Structure):
    """glibc's struct mallinfo2, summed over all arenas."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
                     "keepcost")
    ]  # fmt: skip


class HeapGrowth:
    """Growth, since `begin`, of malloc's bytes outside of torch, if both malloc and torch's allocator report theirs."""

    def __init__(self) -> None:
        self._before: int | None = None
        self._most: int | None = None

    def begin(self) -> None:
        """Records the bytes at the start."""
        self._before = self._now()

    def most(self) -> int | None:
        """Returns the largest value of all calls."""
        now = self._now()
        if now is not None and self._before is not None:
            self._most = max(self._most or 0, now - self._before)
        return self._most

    @staticmethod
    def _now() -> int | None:
        hook, in_use = allocator_hook.install(), malloc_bytes()
        return None if hook is None or in_use is None else in_use - hook.live_bytes() - mkl_bytes()


def malloc_bytes() -> int | None:
    """Returns the bytes that malloc has handed out to this process, torch's included; None if it does not report
    them.
    """
    return _in_use() if _tells() else None


def _in_use() -> int:
    info = ctypes.CDLL(None).mallinfo2
    info.restype = _MallocInfo
    found = info()
    return int(found.uordblks + found.hblkhd)


@cache
def _tells() -> bool:
    """Returns True if this process uses the malloc that reports these numbers: a preloaded one may not."""
    try:
        before = _in_use()
    except (OSError, AttributeError):  # another libc, or one before 2.33
        return False
    probe = ctypes.create_string_buffer(PROBE_BYTES)
    tells = _in_use() - before >= PROBE_BYTES
    del probe
    return tells


# -- MKL -------------------------------------------------------------------------------------------


MKL_NAMES = ("mkl_serv_mem_stat", "MKL_Mem_Stat")
"""The function's name if MKL is part of libtorch_cpu, and if libtorch_cpu loads it."""


def mkl_bytes() -> int:
    """Returns the bytes of MKL's buffers in this process; 0 without MKL."""
    function = _mem_stat()
    return int(function(ctypes.byref(ctypes.c_int()))) if function is not None else 0


@cache
def _mem_stat() -> Any:
    """Returns MKL_Mem_Stat of MKL's reference (support functions, memory management), or None."""
    if not torch.backends.mkl.is_available():
        return None
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not library.is_file():
        return None
    loaded = ctypes.CDLL(str(library))
    function = next((found for name in MKL_NAMES if (found := getattr(loaded, name, None)) is not None), None)
    if function is not None:
        function.restype = ctypes.c_int64
    return function
