"""Rows of events from logs made by hand: what the harness does aside, resized storages, collectives, micro-batches."""

from typing import Any

from zerobench.probes.event_log import Happening, StepLog
from zerobench.probes.event_rows import event_rows
from zerobench.probes.intervals import ASIDE, Event, Interval, StorageRecord
from zerobench.records import EventRow


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
