"""The allocator's peaks by phase, next to the ledger: read and reset at the beginning of each phase.

Its counters live on the host, CUDA's too, and change when a tensor is allocated or freed there, like the ledger, so a
phase is the same interval for both, whatever the device is still executing.

The allocator's own total is the final reference for memory: the ledger names bytes, this shows if it saw all of them.

cuda       CUDA's caching allocator records its peaks itself
hook       on a CPU, every call of torch's allocator, in any thread, gloo's included: a small C++ file replaces the
           allocator's deleter (allocator_hook.cpp explains how). It needs only torch's c10 headers, compiles in a
           second or two, and is cached in the user's cache folder by torch, compiler and source. Its cost is not
           measurable, and it does not change the figures: the same blocks have the same addresses
profiler   without a compiler (`CXX` names another one): torch.profiler's memory events, in the threads that torch
           itself starts; only in the accounted pass, which it slows down
none       no source

Probes read CUDA's memory statistics only here. A *segment* is memory that torch's caching allocator got from the
device, a *block* a piece of one. *allocated*: bytes in blocks that tensors use, *reserved*: in segments, *split*: in
free blocks next to used ones. The *host allocator* manages pinned memory in the same way. A *peak* is the maximum since
peaks were last taken or reset.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler_util import MEMORY_EVENT_NAME
from torch.profiler import profile

from ..records import ALLOCATOR, MemoryRow
from .intervals import ASIDE

IN_MEMORY = ("allocated", "outside_ledger")
"""Rows of ALLOCATOR that exist for a CPU's allocator, which has no cache."""


class PhasePeaks:
    """Peaks by phase. `take`: returns the peaks by name since its last call, "allocated" and on CUDA those of
    PEAKS and take_phase; `categories`: the rows that exist. `begin` and `end` bound an interval, as for the ledger;
    `of` has the largest peaks of each phase and of each whole interval, by name.
    """

    def __init__(self, take: Callable[[], Mapping[str, int]], categories: Sequence[str] = ALLOCATOR) -> None:
        self.of: dict[str, Counter[str]] = {}
        self._take, self._categories = take, categories
        self._phase = "init"
        self._stretch: dict[str, Counter[str]] = {}

    def enter_phase(self, phase: str) -> None:
        """Assigns the peaks until now to the previous phase, later ones to `phase`."""
        self._merge(self._stretch, self._phase, Counter(self._take()))
        self._phase = phase

    def begin(self) -> None:
        """Begins an interval: drops the peaks since the last one."""
        self._take()
        self._stretch = {}

    def end(self, whole: str) -> None:
        """Ends the interval: its phases are merged into `of`, and their maximum under `whole`."""
        self.enter_phase(self._phase)
        self._stretch.pop(ASIDE, None)
        for phase, peaks in self._stretch.items():
            self._merge(self.of, phase, peaks)
            self._merge(self.of, whole, peaks)

    @staticmethod
    def _merge(table: dict[str, Counter[str]], phase: str, peaks: Counter[str]) -> None:
        table[phase] = table.get(phase, Counter()) | peaks  # the elementwise maximum, by name

    def rows(self, rank: int, phase: str, ledger_peak: int) -> Iterator[MemoryRow]:
        """Yields the allocator's rows of a phase. `ledger_peak`: the ledger's peak bytes in the same memory."""
        peaks = self.of.get(phase)
        if not peaks:
            return
        sizes = Counter(peaks)  # a copy: `peaks` lacks the names that were 0 all the time
        sizes["outside_ledger"] = peaks["allocated"] - ledger_peak
        sizes["fragmentation"] = peaks["reserved"] - peaks["allocated"]
        for category in self._categories:
            yield MemoryRow(rank, phase, category, None, None, sizes[category])


CUDA, HOOK, PROFILER, NONE = "cuda", "hook", "profiler", "none"

MEASURED_STEP = "zerobench.measured_step"
"""Name of a measured step in a profiler's events."""


def take_allocated(device: torch.device) -> tuple[str, Callable[[], Mapping[str, int]]]:
    """Returns the source's name, and a function of the peaks since its last call. Call it before any tensor."""
    if device.type == "cuda":
        return CUDA, take_phase
    hook = install_hook()
    if hook is None:
        return NONE, dict  # no peaks
    before = hook.live_bytes()
    return HOOK, lambda: {"allocated": hook.take_peak() - before}


def profiled_peaks(stopped: profile) -> Counter[str]:
    """Returns the largest sum of live bytes in the measured steps, from a profiler's memory events; empty without."""
    results = stopped.profiler.kineto_results if stopped.profiler else None
    if results is None:
        return Counter()
    events = list(results.events())
    to_come = sorted((e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() == MEASURED_STEP)
    memory = [e for e in events if e.name() == MEMORY_EVENT_NAME]
    live = most = 0
    for at, size in sorted((e.start_ns(), e.nbytes()) for e in memory):  # type: ignore[attr-defined]  # its stub lacks it
        while to_come and at > to_come[0][1]:
            to_come.pop(0)
        if to_come and at >= to_come[0][0]:
            most = max(most, live, live + size)  # a step also has what was live when it began
        live += size
    return Counter(allocated=most)


# -- a CPU's allocator ------------------------------------------------------------------------------


SOURCE = Path(__file__).with_name("allocator_hook.cpp")
COMPILERS = ("c++", "g++", "clang++")
COMPILING_S = 120.0
PROBE_BYTES = 64 * 1024


class AllocatorHook(NamedTuple):
    """Counts live bytes, as requested, since its installation; installed once per process, permanently."""

    live_bytes: Callable[[], int]
    take_peak: Callable[[], int]
    """Returns the peak since the last call."""


@cache
def install_hook() -> AllocatorHook | None:
    """Installs this process's hook, which counts from the first call on; None if it is not available."""
    path = hook_library()
    if path is None:
        return None
    try:
        functions = ctypes.CDLL(str(path))
    except OSError:
        return None
    if not functions.zerobench_install():
        return None
    hook = AllocatorHook(functions.zerobench_live, functions.zerobench_take_peak)
    functions.zerobench_live.restype = functions.zerobench_take_peak.restype = ctypes.c_int64
    before = hook.live_bytes()
    probe = torch.empty(PROBE_BYTES, dtype=torch.uint8)
    counts = hook.live_bytes() - before == probe.nbytes
    del probe
    return hook if counts and hook.live_bytes() == before else None


def hook_library() -> Path | None:
    """Returns the compiled hook, from the cache or new; None without a compiler or if compiling fails. The compiler is
    the one that `CXX` names, or else the first one found. Several processes may compile concurrently: each writes a
    temporary file and renames it.
    """
    named = os.environ.get("CXX")
    compiler = next(filter(None, map(shutil.which, [named] if named else COMPILERS)), None)
    base = os.environ.get("XDG_CACHE_HOME")
    try:  # the user's cache, which other users cannot write to
        folder = (Path(base) if base else Path.home() / ".cache") / "zerobench"
    except RuntimeError:  # no home folder
        return None
    if compiler is None:
        return None
    root = Path(torch.__file__).parent
    facts = SOURCE.read_text(), torch.__version__, str(root), compiler, platform.machine()
    path = folder / f"allocator_hook-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.so"
    if path.is_file():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".compiling-") as temporary:
            compiled = Path(temporary) / "hook.so"
            command = [
                compiler, "-std=c++20", "-O2", "-fPIC", "-shared",
                f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
                f"-I{root / 'include'}", str(SOURCE), "-o", str(compiled), f"-L{root / 'lib'}", "-lc10",
            ]  # fmt: skip
            subprocess.run(command, capture_output=True, timeout=COMPILING_S, check=True)
            compiled.replace(path)
    except (OSError, subprocess.SubprocessError):  # such as a read-only cache, or an error of the compiler
        return None
    return path


# -- CUDA's allocator --------------------------------------------------------------------------------


PEAKS = {
    "allocated": "allocated_bytes.all.peak",
    "reserved": "reserved_bytes.all.peak",
    "split": "inactive_split_bytes.all.peak",
}
"""Our name for a peak -> its name in torch.cuda.memory_stats."""

COUNTS_FREED = "2.13"
"""The first release of torch that is known to take freed pinned memory off `active_bytes` (pytorch issues #169561,
#179380)."""


def take_peaks() -> dict[str, int]:
    """Returns the device allocator's peaks, by the names of PEAKS, and resets them."""
    torch.cuda.init()  # without it there are no statistics, and resetting them raises
    stats = torch.cuda.memory_stats()
    torch.cuda.reset_peak_memory_stats()
    return {name: stats.get(key, 0) for name, key in PEAKS.items()}


def take_phase() -> dict[str, int]:
    """Returns `take_peaks`, the host allocator's current bytes, and the device's bytes in use."""
    free, total = torch.cuda.mem_get_info()
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    return take_peaks() | {"pinned": pinned, "device_used": total - free}


def reset_peaks() -> None:
    """Resets the peaks of both allocators."""
    take_peaks()
    torch.cuda.reset_peak_host_memory_stats()


def process_memory(peaks: Mapping[str, int]) -> dict[str, int | None]:
    """Returns the CUDA columns of RunRow for this process. `peaks`: of the measured steps, from `take_peaks`."""
    host = torch.cuda.host_memory_stats()
    active = host.get("active_bytes.peak") if torch.__version__ >= COUNTS_FREED else None
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated_bytes": peaks["allocated"],
        "reserved_bytes": peaks["reserved"],
        "fragmentation_bytes": peaks["reserved"] - peaks["allocated"],
        "largest_free_block_bytes": largest_free_block(torch.cuda.memory_snapshot(), torch.cuda.current_device()),
        "split_bytes": peaks["split"],
        "alloc_retries": torch.cuda.memory_stats()["num_alloc_retries"],
        "device_used_bytes": total - free,
        "pinned_requested_bytes": active,
        "pinned_bytes": host.get("allocated_bytes.peak"),
    }


def largest_free_block(segments: Iterable[Mapping[str, Any]], device: int) -> int:
    """Returns the largest free block on `device`, or 0. `segments`: from torch.cuda.memory_snapshot."""
    blocks = (block for segment in segments if segment["device"] == device for block in segment["blocks"])
    return max((block["size"] for block in blocks if block["state"] == "inactive"), default=0)
