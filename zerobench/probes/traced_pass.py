"""The traced pass: the timed pass under torch.profiler, which slows it down: its times are reported separately."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from .probe import PassRecords
from .timed_pass import TimedPass
from .trace import STEP, Overlap, overlaps, read_trace

FOLDER = "traces"


class TracedPass(TimedPass):
    """A timed pass whose measured steps run under a profiler."""

    def __init__(self, device: torch.device, node_size: int | None = None) -> None:
        super().__init__(device, node_size)
        self._profile: profile | None = None

    def __exit__(self, *error: object) -> None:
        if self._profile is not None:
            self._profile.stop()

    @contextmanager
    def step(self, measured: bool) -> Iterator[None]:
        """Runs one whole step; the span of a measured one ends once the device has finished it."""
        if measured and self._profile is None:
            self._profile = self._start()
        with record_function(STEP) if measured else nullcontext(), super().step(measured):
            yield
            if self._cuda:
                torch.cuda.synchronize()

    def found(self, rank: int, folder: Path) -> PassRecords:
        """Times as the trace has them."""
        self._finish(folder, rank)
        return super().found(rank, folder)

    def _finish(self, folder: Path, rank: int) -> None:
        """Adds "communication" and "exposed" to the times of the measured steps, which become the trace's own.

        Writes rank 0's trace to traces/rank0.json.gz in `folder`, the run's; others' are read and dropped.
        """
        if self._profile is None:
            return
        if rank == 0:
            (folder / FOLDER).mkdir(exist_ok=True)
            found = self._read(folder / FOLDER / "rank0.json.gz")
        else:
            with tempfile.TemporaryDirectory(dir=folder) as aside:  # removed with the run's folder
                found = self._read(Path(aside) / "trace.json")
        measured = self.times[len(self.times) - len(found) :]
        for times, one in zip(measured, found, strict=True):
            times |= {"step": one.step_s, "communication": one.communication_s, "exposed": one.exposed_s}
        self._profile = None

    def _begin_measuring(self) -> None:
        """Reads nothing of the machine: the values would include the profiler."""

    def _start(self) -> profile:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        started = profile(activities=activities)
        started.start()
        return started

    def _read(self, path: Path) -> list[Overlap]:
        assert self._profile is not None
        self._profile.export_chrome_trace(str(path))
        return overlaps(read_trace(path), self._device.type)
