"""The timed pass: start and end of each phase of a step, and the allocator's total, which costs nothing.

Drawing a step's batch is not part of its time, nor is the harness's reading of gradients in the warm-up. Python's
garbage is collected between measured steps, not within them; objects from before the first are excluded. The wall time
from the first measured step to the last, from which tokens/s are computed, includes batches and garbage collection.

On CUDA nothing in a step, or between steps, waits for the device: marks are events, which are read at the end. A step
lasts until the next one begins on the device, and the last one until its work is done: gathers that overlap the next
forward are part of a step's time.

Other figures of the machine are read before the first measured step and after the last: memory as reported by the
system and CUDA's allocator, the GPU's clocks, and counters of energy. On CUDA the ranks synchronize before they start,
so that none waits in a step for another's reading. Bytes on the loopback interface are read before the warm-up and
after the last step's work, because only then no gather is in flight.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from ..host.environment import loopback_bytes, reset_resident_peak, resident_peak_bytes
from . import allocator
from .energy import EnergyMeter, read_state
from .intervals import ASIDE
from .probe import PassRecords, Probe

UNTIMED = ("data", ASIDE)
"""Phases within a step that are not part of its time."""


class TimedPass(Probe):
    """A clock: marks at the edges of phases, perf_counter on CPU and events on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._marks: dict[str, list[tuple[Any, Any]]] = {}
        self._steps: list[dict[str, list[tuple[Any, Any]]]] = []
        self._first: int | None = None  # the number of the first measured step
        self._loopback: int | None = None  # bytes carried before the first step
        self._holds_garbage = False
        self._take_allocated: Callable[[], Mapping[str, int]] = dict
        self._energy = EnergyMeter(device)
        self.results = PassRecords(process_memory={})
        """Filled in as the steps run."""

    def __enter__(self) -> Self:
        if not self._cuda:  # CUDA's peaks are process_memory's
            self._take_allocated = allocator.take_allocated(self._device)[1]
        return self

    def __exit__(self, *error: object) -> None:
        if self._holds_garbage:
            gc.unfreeze()
            gc.enable()
        self.results.process_memory["resident_bytes"] = resident_peak_bytes()
        if self._cuda and error[0] is None:  # after an error of the device it would raise another
            self.results.process_memory |= allocator.process_memory(allocator.take_peaks())
            self._read_gpu()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a phase of a step, or "init"; a repeated phase adds to its time."""
        begin = self._mark()
        yield
        self._marks.setdefault(name, []).append((begin, self._mark()))

    @contextmanager
    def step(self, measured: bool) -> Iterator[None]:
        if not self._steps:
            self._loopback = loopback_bytes()
        if measured and self._first is None:
            self._first = len(self._steps)
            self._begin_measuring()
        self._energy.follow()
        self._marks = {}
        self._steps.append(self._marks)
        with self.phase("step"):
            yield
        if self._holds_garbage:
            gc.collect()

    def end_steps(self) -> None:
        """Converts marks to times once the last step's work has completed."""
        before, after, memory = self._loopback, loopback_bytes(), self.results.process_memory
        memory["loopback_bytes"] = None if before is None or after is None else after - before
        memory["timed_allocator_peak_bytes"] = self._take_allocated().get("allocated")
        if self._cuda and self._steps:
            begins = [marks["step"][0][0] for marks in self._steps]
            for marks, begin, end in zip(self._steps, begins, [*begins[1:], self._mark()], strict=True):
                marks["step"] = [(begin, end)]
            torch.cuda.synchronize()
        self.results.energy_j = self._energy.end()
        self.results.times = [self._times(marks) for marks in self._steps]
        if self._first is not None:
            begin, end = self._steps[self._first]["step"][0][0], self._steps[-1]["step"][0][1]
            self.results.wall_s = self._between(begin, end)

    def _times(self, marks: dict[str, list[tuple[Any, Any]]]) -> dict[str, float]:
        """Returns the seconds of each phase, and of the step without the phases that are not part of it."""
        times = {name: sum(self._between(*pair) for pair in pairs) for name, pairs in marks.items()}
        return times | {"step": times["step"] - sum(times.get(name, 0.0) for name in UNTIMED)}

    @property
    def may_wait(self) -> bool:
        """False on CUDA, because reading a value between steps would wait for the device."""
        return not self._cuda

    def may_read_gradients(self, measured: bool) -> bool:
        """Returns True if the harness may read gradients before the update: not in a measured step."""
        return not measured

    @property
    def peak_bytes(self) -> int | None:
        """The allocator's peak so far, if it records one itself: on CUDA."""
        return torch.cuda.max_memory_allocated() if self._cuda else None

    def records(self, rank: int, folder: Path) -> PassRecords:
        """Returns the times, and the machine's state around the measured steps."""
        return self.results

    def _begin_measuring(self) -> None:
        gc.collect()
        gc.freeze()
        gc.disable()
        self._holds_garbage = True
        if self._cuda:
            self._read_gpu()
            dist.barrier()
            torch.cuda.synchronize()
            allocator.reset_peaks()
        self._take_allocated()
        reset_resident_peak()
        self._energy.begin()

    def _read_gpu(self) -> None:
        state = read_state(self._device)
        if state is not None:
            self.results.gpu_states.append(state)

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1000 if self._cuda else end - begin
