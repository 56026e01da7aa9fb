"""Counts torch's CPU allocations beneath every strategy and in every thread, gloo's included.

A small C++ file replaces the allocator's deleter (allocator_hook.cpp explains how). It needs only torch's c10 headers,
compiles in a second or two, and is cached in the user's cache folder by torch, compiler and source. Its cost is not
measurable, and it does not change the figures: the same blocks have the same addresses. Without a compiler (`CXX` names
another one) there is no hook, and runs work without it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("allocator_hook.cpp")
COMPILERS = ("c++", "g++", "clang++")
COMPILING_S = 120.0
PROBE_BYTES = 64 * 1024


class AllocatorHook:
    """Counts live bytes, as requested, since its installation; installed once per process, permanently."""

    def __init__(self, functions: ctypes.CDLL) -> None:
        self._live, self._take_peak = functions.zerobench_live, functions.zerobench_take_peak
        for function in (self._live, self._take_peak):
            function.restype = ctypes.c_int64

    def live_bytes(self) -> int:
        """Returns the current live bytes."""
        return int(self._live())

    def take_peak(self) -> int:
        """Returns the peak since the last call."""
        return int(self._take_peak())


@cache
def install() -> AllocatorHook | None:
    """Installs this process's hook, which counts from the first call on; None if it is not available."""
    path = library()
    if path is None:
        return None
    try:
        functions = ctypes.CDLL(str(path))
    except OSError:
        return None
    if not functions.zerobench_install():
        return None
    hook = AllocatorHook(functions)
    before = hook.live_bytes()
    probe = torch.empty(PROBE_BYTES, dtype=torch.uint8)
    counts = hook.live_bytes() - before == probe.nbytes
    del probe
    return hook if counts and hook.live_bytes() == before else None


def library() -> Path | None:
    """Returns the compiled hook, from the cache or new; None without a compiler or if compiling fails. The
    compiler is the one that `CXX` names, or else the first one found.

    Several processes may compile concurrently: each writes a temporary file and renames it.
    """
    named = os.environ.get("CXX")
    paths = map(shutil.which, [named] if named else COMPILERS)
    compiler, folder = next(filter(None, paths), None), _cache_folder()
    if compiler is None or folder is None:
        return None
    root = Path(torch.__file__).parent
    facts = SOURCE.read_text(), torch.__version__, str(root), compiler, platform.machine()
    path = folder / f"allocator_hook-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.so"
    if path.is_file():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".compiling-") as aside:
            return _compile(compiler, root, Path(aside) / "hook.so", path)
    except OSError:  # such as a read-only cache
        return None


def _compile(compiler: str, root: Path, made: Path, path: Path) -> Path | None:
    command = [
        compiler, "-std=c++20", "-O2", "-fPIC", "-shared",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{root / 'include'}", str(SOURCE), "-o", str(made), f"-L{root / 'lib'}", "-lc10",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, timeout=COMPILING_S, check=False)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        return None
    made.replace(path)
    return path


def _cache_folder() -> Path | None:
    """Returns the folder of compiled hooks in the user's cache, which other users cannot write to."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "zerobench"
    except RuntimeError:  # no home folder
        return None
