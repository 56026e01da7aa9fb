"""Computes, from a profiler's trace, the time of a step with communication, and the exposed part of it.

Pure functions over the events of a trace in Chrome's format, as torch.profiler writes it: dicts of which `cat`, `name`,
`tid`, `ts` and `dur` (microseconds) are read. A *span* is a pair of times; *spans* are sorted and disjoint. A *step* is
the span of an event named STEP; the thread that has these is the *main thread*. The accounting, by device::

    device  a collective is in flight or running             computation
    cpu     gloo's works (gloo:*), a collective from where   the main thread runs an operator (aten::* and the like)
            it runs, a send or receive from where it is      that is not a collective, nor inside one
            issued to where it is waited for; and every
            collective's operator (c10d::*)
    cuda    a kernel of NCCL's runs on the device            any other kernel runs on the device

On a CPU the interpreter's time between two operators is not computation, nor are other threads, and a send that has
arrived is in flight until the program waits for it. So `exposed` compares strategies; `communication`, and with it the
hidden fraction, is at its maximum where slices are sent pairwise. On CUDA copies and memsets are neither (staging for a
collective is not work to hide one behind), and a kernel of NCCL's that waits for another rank is running.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

Event = Mapping[str, Any]
Span = tuple[float, float]

STEP = "zerobench: step"

COLLECTIVES = ("c10d::", "_c10d_functional::")
WRAPPERS = ("autograd::", "torch::autograd::")
"""Events around operators: other events within them (such as a hook that waits) are not computation."""


class Overlap(NamedTuple):
    """One step, in seconds: its length, the time with communication, and the part of that without computation."""

    step_s: float
    communication_s: float
    exposed_s: float


class TraceRule(NamedTuple):
    """Predicates on events: communication and computation; `main`: the main thread."""

    communicates: Callable[[Event], bool]
    computes: Callable[[Event, Any], bool]
    excluded: Callable[[Event, Any], bool]
    """Events during which nothing counts as computed."""


def read_trace(path: Path) -> list[Event]:
    """Reads the events of a trace, gzipped or not."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        events: list[Event] = json.load(file)["traceEvents"]
    return events


def overlaps(events: Iterable[Event], device: str) -> list[Overlap]:
    """Returns one Overlap per step of the trace, in order. `device`: cpu or cuda."""
    whole = [event for event in events if event.get("ph") == "X" and "cat" in event]
    steps = [event for event in whole if event["name"] == STEP and event["cat"] == "user_annotation"]
    if not steps:
        return []
    rule, main = RULES[device], steps[0]["tid"]
    communicating = spans(event for event in whole if rule.communicates(event))
    computing = subtract(
        spans(event for event in whole if rule.computes(event, main)),
        spans(event for event in whole if rule.excluded(event, main)),
    )
    return [_overlap(step, communicating, computing) for [step] in sorted(spans([event]) for event in steps)]


def _overlap(step: Span, communicating: list[Span], computing: list[Span]) -> Overlap:
    within = intersect([step], communicating)
    return Overlap(*(length(one) / 1e6 for one in ([step], within, subtract(within, computing))))


# -- which events are what ----------------------------------------------------------------------------------


def _runs_gloo(event: Event) -> bool:
    return event["name"].startswith("gloo:") or _is_collective(event)


def _is_collective(event: Event) -> bool:
    return event["cat"] == "cpu_op" and event["name"].startswith(COLLECTIVES)


def _is_operator(event: Event, main: Any) -> bool:
    """Returns True for operators, which have a namespace, unlike nodes of the autograd graph."""
    name = event["name"]
    return event["cat"] == "cpu_op" and event["tid"] == main and "::" in name and not name.startswith(WRAPPERS)


def _is_nccl(event: Event) -> bool:
    return event["cat"] == "kernel" and event["name"].startswith(("ncclDevKernel", "ncclKernel"))


RULES = {
    "cpu": TraceRule(_runs_gloo, _is_operator, lambda event, main: event["tid"] == main and _is_collective(event)),
    "cuda": TraceRule(
        _is_nccl, lambda event, _: event["cat"] == "kernel" and not _is_nccl(event), lambda event, _: False
    ),
}  # fmt: skip


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


def intersect(one: list[Span], other: list[Span]) -> list[Span]:
    """Returns the intersection of both."""
    found: list[Span] = []
    i = j = 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def subtract(one: list[Span], other: list[Span]) -> list[Span]:
    """Returns the part of the first outside of the second."""
    edges = [-float("inf"), *(edge for span in other for edge in span), float("inf")]
    return intersect(one, list(zip(edges[::2], edges[1::2], strict=True)))


def length(one: list[Span]) -> float:
    """Returns the total length."""
    return sum(end - begin for begin, end in one)
