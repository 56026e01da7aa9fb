"""Events made by hand: a trace's communication, and what is exposed of it; rows of a log of events."""

import gzip
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from zerobench.probes.event_log import Happening, StepLog
from zerobench.probes.event_rows import event_rows
from zerobench.probes.intervals import ASIDE, Event, Interval, StorageRecord
from zerobench.probes.traced_pass import STEP, Overlap, intersect, length, overlaps, read_trace, spans, subtract
from zerobench.records import EventRow

MAIN, OTHER, STREAM = 11, 12, 7


def event(cat: str, name: str, begin: float, end: float, tid: int = MAIN) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": begin, "dur": end - begin}


def step(begin: float, end: float) -> dict[str, Any]:
    return event("user_annotation", STEP, begin, end)


def in_us(one: Overlap) -> tuple[float, ...]:
    return tuple(round(value * 1e6, 3) for value in one)


def test_spans_are_sets_of_instants() -> None:
    """Against sets of whole numbers, on many random spans: joined, nested, touching, empty."""
    drawn = random.Random(0)
    for _ in range(300):
        sets, found = [], []
        for _ in range(2):
            events = [
                event("cpu_op", "x", b := drawn.randrange(40), b + drawn.randrange(9))
                for _ in range(drawn.randrange(7))
            ]
            found.append(spans(events))
            sets.append({t for e in events for t in range(e["ts"], e["ts"] + e["dur"])})
        one, other = found
        assert length(one) == len(sets[0])
        assert length(intersect(one, other)) == len(sets[0] & sets[1])
        assert length(subtract(one, other)) == len(sets[0] - sets[1])
        assert all(a[1] < b[0] for a, b in pairwise(one))


def test_on_a_cpu_the_main_threads_operators_hide_what_gloo_does() -> None:
    trace = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0},
        step(0, 100),
        step(100, 200),
        event("user_annotation", "gloo:all_reduce", 10, 50, OTHER),
        event("user_annotation", "gloo:all_reduce", 30, 60, OTHER + 1),  # two at a time are one
        event("cpu_op", "c10d::allreduce_", 8, 10),  # its launch is communication
        event("cpu_op", "aten::mm", 20, 40),
        event("cpu_op", "aten::addmm", 20, 45),  # nested: not twice
        event("cpu_op", "aten::mm", 50, 60, OTHER),  # not the main thread's
        event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 8, 100),  # a wrapper computes nothing
        event("cpu_op", "AddmmBackward0", 8, 100),
        event("user_annotation", "gloo:send", 90, 130),  # from one step into the next
        event("cpu_op", "c10d::send", 88, 92),
        event("cpu_op", "aten::clone", 89, 91),  # within a collective's operator
        event("cpu_op", "aten::mm", 120, 125),
    ]
    first, second = overlaps(trace, "cpu")
    assert in_us(first) == (100, 52 + 12, 52 - 25 + 12)
    assert in_us(second) == (100, 30, 25)


def test_on_cuda_other_kernels_hide_nccls_and_copies_do_not() -> None:
    trace = [
        step(0, 100),
        event(
            "kernel", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 10, 40, STREAM
        ),
        event("kernel", "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*)", 60, 70, STREAM),
        event("kernel", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", 20, 25, STREAM + 1),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 30, 40, STREAM + 1),
        event("gpu_memset", "Memset (Device)", 60, 62, STREAM + 1),
        event("gpu_user_annotation", "nccl:all_reduce", 0, 100, STREAM),
        event("cpu_op", "c10d::_reduce_scatter_base_", 0, 5),
        event("cpu_op", "aten::mm", 0, 100),
        event("kernel", "ncclDevKernel_AllReduce", 150, 160, STREAM),  # after the step
    ]
    [found] = overlaps(trace, "cuda")
    assert in_us(found) == (100, 40, 35)


def test_a_trace_without_steps_or_without_communication() -> None:
    assert overlaps([event("cpu_op", "aten::mm", 0, 5)], "cpu") == []
    assert [in_us(one) for one in overlaps([step(0, 9), event("cpu_op", "aten::mm", 0, 5)], "cpu")] == [(9, 0, 0)]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_is_read_gzipped_or_not(tmp_path: Path, name: str) -> None:
    text = json.dumps({"traceEvents": [step(0, 1)]}).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    assert read_trace(tmp_path / name) == [step(0, 1)]


def storage(name: str, category: str = "activations") -> StorageRecord:
    return StorageRecord(0, category, name, "block.0", "forward", source="a.py:1 in f", first_name=name)


def happening(place: int, phase: str, kind: str, **facts: Any) -> Happening:
    return Happening(place, place + 0.5, phase, kind, "", "b.py:2 in g", facts)


def rows_of(
    sizes: dict[StorageRecord, int], events: list[Event], *happenings: Happening, first: dict[Any, str] | None = None
) -> list[EventRow]:
    every = [*sizes, *(event.stored for event in events if event.stored is not None)]
    categories = {one: one.category for one in every} | (first or {})
    interval = Interval(0.0, sizes, categories, events)
    return event_rows(3, StepLog(interval, list(happenings), {2: "c.py:3 in h"}))


def short(rows: list[EventRow]) -> list[tuple[str, str, int, str]]:
    return [(row.phase, row.kind, row.bytes, row.name) for row in rows if row.kind != "phase"]


def test_what_the_harness_leaves_is_told_where_the_next_phase_begins() -> None:
    gone, left, old = storage("gone"), storage("left"), storage("old", "gradients")
    rows = rows_of(
        {old: 8},
        [
            Event("backward", 1.0), Event(ASIDE, 2.0), Event(ASIDE, 2.1, gone, grown=64),
            Event(ASIDE, 2.2, left, grown=4), Event(ASIDE, 2.3, gone, grown=-64), Event(ASIDE, 2.4, old, grown=-8),
            Event("update", 3.0),
        ],
        happening(3, ASIDE, "launch", collective="all_reduce", operation=1, unit="", operator="allreduce_",
                  group_size=2, group="", control=True),
        happening(3, ASIDE, "module", name="block.0"),
    )  # fmt: skip
    assert short(rows) == [
        ("data", "live", 8, "old"), ("backward", "launch", 0, ""),
        ("update", "free", 8, "old"), ("update", "birth", 4, "left"),
    ]  # fmt: skip
    assert [row.name for row in rows if row.kind == "phase"] == ["backward", "update"]
    assert {row.rank for row in rows} == {3}


def test_a_storage_that_is_resized_and_labeled_keeps_its_number() -> None:
    one = storage("unit", "parameters")
    rows = rows_of(
        {one: 0},
        [
            Event("forward", 1.0), Event("forward", 1.1, one, grown=10), Event("forward", 1.2, one, grown=-4),
            Event("forward", 1.3, one, moved=("temporary", "parameters")), Event("forward", 1.4, one, grown=-6),
        ],
        first={one: "temporary"},
    )  # fmt: skip
    assert [(row.kind, row.bytes, row.category, row.previous) for row in rows if row.kind != "phase"] == [
        ("birth", 10, "temporary", ""), ("free", 4, "temporary", ""), ("label", 6, "parameters", "temporary"),
        ("free", 6, "parameters", ""),
    ]  # fmt: skip
    assert {row.storage for row in rows if row.kind != "phase"} == {0}
    assert [row.source for row in rows if row.kind == "free"] == ["c.py:3 in h", "a.py:1 in f"]


def test_a_wait_has_what_its_launch_has_and_the_first_counts() -> None:
    launch: dict[str, Any] = {"collective": "all_gather", "unit": "block.0", "operator": "send", "group_size": 2,
                              "group": "0", "control": False}  # fmt: skip
    rows = rows_of(
        {}, [Event("forward", 0.0)],
        happening(1, "forward", "wait", operation=40), happening(1, "forward", "launch", operation=41, **launch),
        happening(1, "forward", "launch", operation=41, **launch), happening(1, "forward", "wait", operation=41),
        happening(1, "forward", "wait", operation=41),
    )  # fmt: skip
    told = [(row.kind, row.operation, row.unit, row.collective) for row in rows if row.kind != "phase"]
    assert told == [("launch", 0, "block.0", "all_gather")] * 2 + [("wait", 0, "block.0", "all_gather")]


def test_data_belong_to_the_micro_batch_that_follows() -> None:
    one = storage("batch", "inputs")
    phases = ("data", "forward", "backward", "data", "forward", "backward", "data", "update")
    rows = rows_of({}, [event for at, name in enumerate(phases)
                        for event in (Event(name, float(at)), Event(name, at + 0.1, one, grown=1))])  # fmt: skip
    told = [(row.phase, row.micro_batch) for row in rows if row.kind == "birth"]
    assert told == [("data", 0), ("forward", 0), ("backward", 0), ("data", 1), ("forward", 1), ("backward", 1),
                    ("data", 1), ("update", 1)]  # fmt: skip
    assert [row.seconds for row in rows] == sorted(row.seconds for row in rows)
