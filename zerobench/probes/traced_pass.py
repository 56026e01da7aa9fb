"""The traced pass: the timed pass under torch.profiler, which slows it down: its times are reported separately.

Computes, from a profiler's trace, the time of a step with communication, and the exposed part of this time.

Pure functions over the events of a trace in Chrome's format, as torch.profiler writes it: dicts, whose `cat`, `name`,
`tid`, `ts` and `dur` (microseconds) are read. A *span* is a pair of times; *spans* are sorted and disjoint. A *step* is
the span of an event named STEP; the thread with these events is the *main thread*. The accounting, by device::

    device  a collective is in flight or running             computation
    cpu     gloo's works (gloo:*), a collective from its     the main thread runs an operator (aten::* and the like)
            start, a send or receive from its issue to its   that is not a collective, nor inside one
            wait; and every collective's operator (c10d::*)
    cuda    an NCCL kernel runs on the device                any other kernel runs on the device

On a CPU the interpreter's time between two operators is not computation, nor are other threads, and a send that has
arrived is in flight until the program waits for it. So `exposed` compares strategies; `communication`, and with it the
hidden fraction, is at its maximum if slices are sent pairwise. On CUDA copies and memsets count as neither (staging for
a collective is not work that hides one), and an NCCL kernel that waits for another rank counts as running.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from .probe import PassRecords
from .timed_pass import TimedPass

Event = Mapping[str, Any]
Span = tuple[float, float]

STEP = "zerobench: step"

COLLECTIVES = ("c10d::", "_c10d_functional::")
NCCL = ("ncclDevKernel", "ncclKernel")
WRAPPERS = ("autograd::", "torch::autograd::")
"""Events around operators: other events within them (such as a waiting hook) are not computation."""


class Overlap(NamedTuple):
    """One step, in seconds: its length, the time with communication, and the part of this time without computation."""

    step_s: float
    communication_s: float
    exposed_s: float


def read_trace(path: Path) -> list[Event]:
    """Reads the events of a trace, gzipped or not."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
        events: list[Event] = json.load(file)["traceEvents"]
    return events


def overlaps(events: Iterable[Event], device: str) -> list[Overlap]:
    """Returns one Overlap per step of the trace, in order. `device`: cpu or cuda."""
    whole = [event for event in events if event.get("ph") == "X" and "cat" in event]
    steps = [event for event in whole if event["name"] == STEP and event["cat"] == "user_annotation"]
    if not steps:
        return []
    if device == "cuda":
        kernels = [event for event in whole if event["cat"] == "kernel"]
        communicating = spans(event for event in kernels if event["name"].startswith(NCCL))
        computing = spans(event for event in kernels if not event["name"].startswith(NCCL))
    else:
        main = steps[0]["tid"]
        operators = [event for event in whole if event["cat"] == "cpu_op"]
        collectives = [event for event in operators if event["name"].startswith(COLLECTIVES)]
        communicating = spans([*(event for event in whole if event["name"].startswith("gloo:")), *collectives])
        # operators have a namespace, unlike nodes of the autograd graph
        named = [event for event in operators if event["tid"] == main and "::" in event["name"]]
        computing = subtract(
            spans(event for event in named if not event["name"].startswith(WRAPPERS)),
            spans(event for event in collectives if event["tid"] == main),
        )
    rows = []
    for step in sorted(spans([event]) for event in steps):
        within = intersect(step, communicating)
        rows.append(Overlap(*(length(union) / 1e6 for union in (step, within, subtract(within, computing)))))
    return rows


# -- spans --------------------------------------------------------------------------------------------------


def spans(events: Iterable[Event]) -> list[Span]:
    """Returns the union of the events' spans."""
    joined: list[Span] = []
    for begin, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def intersect(left: list[Span], right: list[Span]) -> list[Span]:
    """Returns the intersection of two lists of spans."""
    shared: list[Span] = []
    i = j = 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            shared.append((begin, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return shared


def subtract(left: list[Span], right: list[Span]) -> list[Span]:
    """Returns the parts of `left` outside of `right`."""
    edges = [-float("inf"), *(edge for span in right for edge in span), float("inf")]
    return intersect(left, list(zip(edges[::2], edges[1::2], strict=True)))


def length(union: list[Span]) -> float:
    """Returns the total length of the spans."""
    return sum(end - begin for begin, end in union)


FOLDER = "traces"


class TracedPass(TimedPass):
    """A timed pass whose measured steps run under a profiler."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._profile: profile | None = None

    def __exit__(self, *error: object) -> None:
        if self._profile is not None:
            self._profile.stop()

    @contextmanager
    def step(self, measured: bool) -> Iterator[None]:
        """Runs one whole step; the span of a measured step ends once the device has finished it."""
        if measured and self._profile is None:
            self._profile = profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA][: self._cuda]])
            self._profile.start()
        with record_function(STEP) if measured else nullcontext(), super().step(measured):
            yield
            if self._cuda:
                torch.cuda.synchronize()

    def records(self, rank: int, folder: Path) -> PassRecords:
        """Returns the times of the measured steps from the trace, with "communication" and "exposed". Writes rank 0's
        trace to traces/rank0.json.gz in the run's `folder`; the others' are read and dropped.
        """
        if self._profile is not None:
            with nullcontext(folder / FOLDER) if rank == 0 else tempfile.TemporaryDirectory(dir=folder) as parent:
                Path(parent).mkdir(exist_ok=True)
                path = Path(parent) / ("rank0.json.gz" if rank == 0 else "trace.json")
                self._profile.export_chrome_trace(str(path))
                steps = overlaps(read_trace(path), self._device.type)
            measured = self.results.times[len(self.results.times) - len(steps) :]
            for times, step in zip(measured, steps, strict=True):
                times |= {"step": step.step_s, "communication": step.communication_s, "exposed": step.exposed_s}
            self._profile = None
        return super().records(rank, folder)

    def _begin_measuring(self) -> None:
        """Reads no machine state: the values would include the profiler."""
