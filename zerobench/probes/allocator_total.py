"""The allocator's own total, which has the last word on memory: the ledger names bytes, this says if it saw them all.

cuda       CUDA's caching allocator keeps its peaks itself
hook       on a CPU, every call of torch's allocator, in whichever thread (allocator_hook.py)
profiler   without a compiler: torch.profiler's memory events, in the threads that torch itself starts; in the
           accounted pass alone, which it slows down
none       nothing tells
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
    """The witness's name, and what gives the allocator's peaks by name since its last call. Call it before the first
    tensor of the rank is made.
    """
    if device.type == "cuda":
        return CUDA, cuda_memory.take_phase
    hook = allocator_hook.install()
    if hook is None:
        return NONE, nothing
    before = hook.live_bytes()
    return HOOK, lambda: {"allocated": hook.take_peak() - before}


class ProfiledPeak:
    """Stands in for the hook: the profiler's memory events, added up when all is over. Of the measured steps alone."""

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def start(self) -> None:
        """From now on events are kept."""
        self._profile.start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """One measured step."""
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
    """The largest running sum of (time, bytes), in time's order, within any of the spans, at their begin included."""
    live = most = 0
    to_come = sorted(spans)
    for at, size in moved:
        while to_come and at > to_come[0][1]:
            to_come.pop(0)
        if to_come and at >= to_come[0][0]:
            most = max(most, live, live + size)
        live += size
    return most
