"""The allocator's own total, the final reference for memory: the ledger names bytes, this shows if it saw all of them.

cuda       CUDA's caching allocator records its peaks itself
hook       on a CPU, every call of torch's allocator, in any thread (allocator_hook.py)
profiler   without a compiler: torch.profiler's memory events, in the threads that torch itself starts; only in the
           accounted pass, which it slows down
none       no source
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.autograd.profiler_util import MEMORY_EVENT_NAME
from torch.profiler import ProfilerActivity, profile, record_function

from . import allocator_hook, cuda_memory
from .allocator import PhasePeaks, nothing

CUDA, HOOK, PROFILER, NONE = "cuda", "hook", "profiler", "none"

_STEP = "zerobench.measured_step"


def take_allocated(device: torch.device) -> tuple[str, Callable[[], Mapping[str, int]]]:
    """Returns the source's name, and a function that returns the allocator's peaks by name since its last call. Call it
    before the rank allocates its first tensor.
    """
    if device.type == "cuda":
        return CUDA, cuda_memory.take_phase
    hook = allocator_hook.install()
    if hook is None:
        return NONE, nothing
    before = hook.live_bytes()
    return HOOK, lambda: {"allocated": hook.take_peak() - before}


class ProfiledPeak:
    """Replaces the hook by the profiler's memory events, summed at the end, of the measured steps only."""

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def start(self) -> None:
        """Starts recording events."""
        self._profile.start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Runs one measured step."""
        with record_function(_STEP):
            yield

    def finish(self, peaks: PhasePeaks) -> None:
        """Adds the largest sum of live bytes in the measured steps to `peaks`, as the step's."""
        self._profile.stop()
        results = self._profile.profiler.kineto_results if self._profile.profiler else None
        if results is None:
            return
        events = list(results.events())
        spans = [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() == _STEP]
        memory = [e for e in events if e.name() == MEMORY_EVENT_NAME]
        moved = sorted((e.start_ns(), e.nbytes()) for e in memory)  # type: ignore[attr-defined]  # its stub lacks it
        peaks.of["step"] = Counter(allocated=largest_within(moved, spans))


def largest_within(moved: list[tuple[int, int]], spans: list[tuple[int, int]]) -> int:
    """Returns the largest running sum of (time, bytes), in order of time, within any of the spans, including their
    begin.
    """
    live = most = 0
    to_come = sorted(spans)
    for at, size in moved:
        while to_come and at > to_come[0][1]:
            to_come.pop(0)
        if to_come and at >= to_come[0][0]:
            most = max(most, live, live + size)
        live += size
    return most
