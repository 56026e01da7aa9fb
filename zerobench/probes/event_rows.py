"""Rows of the table `events` from a step's log: its events in order, storages and operations by numbers from 0.

The harness's own work within a step is left out: a storage that it changed is written where the next phase begins,
frees before births, so that no sum in between exceeds the ledger's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from ..records import STATES, EventRow
from ..records.long_rows import BIRTH, COMPUTE, FREE, LABEL, LATE, LAUNCH, LIVE, MOVE, ORDER, PHASE, UPDATE, WAIT
from .event_log import ROOT
from .intervals import ASIDE, Event, Interval, IntervalReplay, StorageRecord

FIRST_PHASE = "data"

SAME = ("operation", "collective", "unit", "operator", "group_size", "group", "control")
"""Columns that a wait copies from its launch."""


def event_rows(rank: int, interval: Interval, of_storages: bool = True) -> list[EventRow]:
    """Returns a rank's rows, in order. `of_storages`: with events of storages."""
    rows = list(_EventWriter(rank, interval, of_storages).rows())
    # numbers the micro-batches: data belong to the following forward, everything else to the one before
    number = -1
    waiting: list[EventRow] = []
    for row in rows:
        if row.kind == PHASE and row.name == "forward":
            number += 1
            for one in waiting:
                one.micro_batch = number
        if row.kind == PHASE:
            waiting = []
        row.micro_batch = max(number, 0)
        waiting += [row] if row.phase == FIRST_PHASE else []
    return rows


class _EventWriter:
    """Replays a step. `_shown`: size and category of each storage after the last row."""

    def __init__(self, rank: int, interval: Interval, of_storages: bool) -> None:
        self._rank, self._interval, self._of_storages = rank, interval, of_storages
        self._numbers: dict[StorageRecord, int] = {}
        self._operations: dict[int, int] = {}
        self._replay = IntervalReplay(interval)
        self._shown: dict[StorageRecord, tuple[int, str]] = {}
        self._aside: dict[StorageRecord, None] = {}
        self._phase = ""
        self._index, self._seconds = 0, 0.0
        self._launches: dict[int, dict[str, Any]] = {}
        self._orders = any(event.kind == COMPUTE for event in interval.log)
        units = {name for event in interval.log for name, _ in event.facts.get("by_unit", ())}
        units |= {event.facts.get("unit", "") for event in interval.log if not event.facts.get("control")}
        self._units = sorted(units - {"", ROOT}, key=len, reverse=True)
        self._rest = ROOT if ROOT in units else ""

    def rows(self) -> Iterator[EventRow]:
        """Yields the rows; to be called once."""
        if self._of_storages:
            yield from self._alive()
        for event in self._interval.log:
            yield from self._without_storage(event) if event.kind else self._change(event)

    def _alive(self) -> Iterator[EventRow]:
        """Yields the storages at the step's begin."""
        self._phase = FIRST_PHASE
        for stored, size in self._interval.sizes.items():
            self._shown[stored] = size, self._interval.categories[stored]
            if size:
                yield self._of_storage(LIVE, stored, self._interval.began, *self._shown[stored])
        self._phase = ""

    def _change(self, event: Event) -> Iterator[EventRow]:
        stored = event.stored if self._of_storages else None
        if stored is not None:
            self._replay.take(event)
        if event.phase == ASIDE:
            if stored is not None:
                self._aside[stored] = None
            return
        if event.phase != self._phase:
            yield from self._enter(event)
        if stored is not None:
            yield from self._settle(stored, event.at, event.source)

    def _enter(self, event: Event) -> Iterator[EventRow]:
        """Yields the beginning of a phase, after the changes that the harness made."""
        self._phase = event.phase
        for stored in sorted(self._aside, key=self._growth):
            yield from self._settle(stored, event.at, "")
        self._aside.clear()
        yield self._row(PHASE, event.at, name=event.phase)

    def _growth(self, stored: StorageRecord) -> int:
        """Returns the bytes that a storage has gained since its last row."""
        return self._replay.now(stored)[0] - self._shown.get(stored, (0, ""))[0]

    def _settle(self, stored: StorageRecord, at: float, source: str) -> Iterator[EventRow]:
        """Yields a storage's change of category, then of size."""
        now, then = self._replay.now(stored), self._shown.get(stored)
        size, category = then or (0, now[1])
        if category != now[1]:
            yield self._of_storage(LABEL, stored, at, size, now[1], previous=category)
        if now[0] > size:
            yield self._of_storage(BIRTH, stored, at, now[0] - size, now[1], source)
        elif now[0] < size:
            yield self._of_storage(FREE, stored, at, size - now[0], now[1], source)
        self._shown[stored] = now

    def _without_storage(self, event: Event) -> Iterator[EventRow]:
        """Yields an event without a storage; of the harness's own, only a thread's traffic for the step."""
        if event.phase == ASIDE and event.kind not in (LAUNCH, MOVE):
            return
        phase = self._phase if event.phase == ASIDE else event.phase
        common = {"module": event.module, "source": event.source, "phase": phase}
        if event.kind == UPDATE:
            yield from self._updates(event)
        elif event.kind != WAIT:
            facts = dict(event.facts)
            if event.kind == LAUNCH:
                facts["operation"] = self._operations.setdefault(facts["operation"], len(self._operations))
                self._launches[event.facts["operation"]] = {key: facts[key] for key in SAME}
            yield self._row(event.kind, event.at, **common, **facts)
        elif (same := self._launches.pop(event.facts["operation"], None)) is not None:
            yield self._row(WAIT, event.at, **common, **same, stream=event.facts.get("stream", 0))
        elif self._orders:  # of the step before, which only predictions of time ask for
            stream, unit = event.facts.get("stream", 0), event.facts.get("unit", "")
            yield self._row(ORDER, event.at, **common, operator=LATE, unit=unit, stream=stream)

    def _updates(self, event: Event) -> Iterator[EventRow]:
        """Yields one update per unit and tier, and one for parameters in no unit."""
        sums = Counter(event.facts.get("by_unit", {}))
        for (name, tier), size in event.facts.get("by_label", {}).items():
            sums[self._unit_of(name) or self._rest, tier] += size
        for (unit, tier), size in sums.items():
            yield self._row(UPDATE, event.at, phase=event.phase, source=event.source, unit=unit, tier=tier, bytes=size)

    def _of_storage(
        self, kind: str, stored: StorageRecord, at: float, size: int, category: str, source: str = "",
        previous: str = "",
    ) -> EventRow:  # fmt: skip
        number = self._numbers.setdefault(stored, len(self._numbers))
        unit = self._unit_of(stored.first_name) or self._unit_of(stored.name)
        unit = unit or (self._rest if category in STATES and stored.labeled else self._unit_of(stored.module))
        return self._row(
            kind, at, storage=number, bytes=size, category=category, previous=previous, name=stored.name, unit=unit,
            module=stored.module, source=source or stored.source, tier=stored.tier,
        )  # fmt: skip

    def _unit_of(self, name: str) -> str:
        """Returns the unit of a label or a module's path: the longest unit that it equals or begins with."""
        if name == self._rest:
            return name
        return next((unit for unit in self._units if name == unit or name.startswith((f"{unit}.", f"{unit} "))), "")

    def _row(self, kind: str, at: float, phase: str = "", **facts: Any) -> EventRow:
        self._index += 1
        self._seconds = max(self._seconds, at - self._interval.began)  # threads' clocks are read before they append
        return EventRow(self._rank, self._index - 1, self._seconds, phase or self._phase, kind, 0, **facts)
