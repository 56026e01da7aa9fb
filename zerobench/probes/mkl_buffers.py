"""Buffers that MKL keeps for its next matrix product: one for each thread that has had one, of some MiB.

MKL takes them from malloc by itself, mostly on Intel's processors: 5 MiB per thread for a product of two 512 x 512
matrices. They are neither torch's nor due to the code that is measured. torch's wheels have MKL within libtorch_cpu,
other builds (conda's) load it as a library of its own; `mkl_mem_stat` tells of its buffers in both.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

NAMES = ("mkl_serv_mem_stat", "MKL_Mem_Stat")
"""Name of the function where MKL is part of libtorch_cpu, and where libtorch_cpu loads it."""


def live_bytes() -> int:
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
    function = next((found for name in NAMES if (found := getattr(loaded, name, None)) is not None), None)
    if function is not None:
        function.restype = ctypes.c_int64
    return function
