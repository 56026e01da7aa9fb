"""A step of the ledger as a snapshot in torch's format, which https://pytorch.org/memory_viz and torch.cuda._memory_viz
display: plain dicts, lists, strings and integers.

device      one of our tiers (device, host, nvme), by number; each has one segment
block       a storage from one change of its size or category to the next; a change is a free and an allocation
address     made up: no two live blocks overlap; blocks of equal size reuse addresses
category    colors a block in the page's timeline
frames      label, source line, module, phase, category: in torch's flame graphs the category is outermost
mark        an entry "snapshot", which changes no memory: one per category at the start, so that a color means the same
            in all files, and one at the beginning of each phase

The trace begins with an allocation of everything alive at the step's beginning: its category is known only there.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from ..records import CATEGORIES, TIERS
from .intervals import ASIDE, Event, Interval, IntervalReplay, StorageRecord

Entry = dict[str, Any]

UNKNOWN = "unknown"
"""The page's category for blocks that have none; the page fails if categories exist without this one."""

SPACE = 1 << 44
"""Distance of the tiers' address spaces, in bytes; all addresses are exact in a float, as JavaScript's numbers are."""

_SOURCE = re.compile(r"(backward of )?(.*):(\d+) in (.*)")


def snapshot_of(interval: Interval) -> dict[str, Any]:
    """Returns the step as a snapshot; its live bytes equal the ledger's after each event, and never exceed them.

    For an interval without events the snapshot shows the storages alive at its beginning.
    """
    return _SnapshotWriter(interval).snapshot()


def words_of(stored: StorageRecord, category: str) -> str:
    """Returns a storage's labels in one line."""
    return " | ".join([category, stored.module or "no module", stored.phase, stored.name or "no label"])


def group_frames(stored: StorageRecord, category: str) -> list[Entry]:
    """Returns the outer frames of a storage: its module, its phase, and outermost its category."""
    return [_frame("module", stored.module or "none"), _frame("phase", stored.phase), _frame("category", category)]


def frames_of(stored: StorageRecord, category: str) -> list[Entry]:
    """Returns a storage's frames, innermost first: its label and the line that made it, then its group's frames."""
    label = [_frame("label", stored.name)] if stored.name else []
    line = _SOURCE.fullmatch(stored.source)
    made = [{"filename": line[2], "line": int(line[3]), "name": f"{line[1] or ''}{line[4]}"}] if line else []
    return [*label, *made, *group_frames(stored, category)]


def legend() -> list[Entry]:
    """Returns a mark per category, in the order of the page's colors."""
    return [_mark(0, "category", category) | {"category": category} for category in (*CATEGORIES, UNKNOWN)]


def _frame(what: str, name: str) -> Entry:
    return {"filename": what, "line": 0, "name": name}


def _mark(time_us: int, what: str, name: str) -> Entry:
    entry = {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "time_us": time_us}
    return entry | {"frames": [_frame(what, name)], "user_metadata": f"{what}: {name}"}


class _Device:
    """One tier: its trace, and its live blocks by storage, with their addresses."""

    def __init__(self, number: int) -> None:
        self.trace: list[Entry] = []
        self.number, self._base = number, (number + 1) * SPACE
        self._end = self._base
        self._live: dict[StorageRecord, Entry] = {}
        self._free: dict[int, list[int]] = defaultdict(list)

    def shows(self, stored: StorageRecord, size: int, category: str) -> bool:
        """Returns True if the storage's block is written with this size and category; without bytes it has no block."""
        block = self._live.get(stored)
        return not size if block is None else (block["size"], block["category"]) == (size, category)

    def alloc(self, stored: StorageRecord, size: int, category: str, time_us: int) -> None:
        """Writes a storage's block."""
        if not self._free[size]:
            self._free[size].append(self._end)
            self._end += size
        block = {
            "addr": self._free[size].pop(), "size": size, "stream": 0, "category": category,
            "frames": frames_of(stored, category), "user_metadata": words_of(stored, category),
        }  # fmt: skip
        self._live[stored] = block
        self.trace.append({"action": "alloc", "time_us": time_us, **block})

    def free(self, stored: StorageRecord, time_us: int) -> None:
        """Writes the end of a storage's block, if it has one."""
        block = self._live.pop(stored, None)
        if block is not None:
            self._free[block["size"]].append(block["addr"])
            self.trace += [
                {"action": f"free_{what}", "time_us": time_us, **block} for what in ("requested", "completed")
            ]

    def segments(self) -> list[Entry]:
        """Returns the one segment, with the live blocks and the gaps between them; none if it has no bytes."""
        blocks: list[Entry] = []
        place = self._base
        for block in sorted(self._live.values(), key=lambda one: int(one["addr"])):
            blocks += [_gap(place, block["addr"] - place)] if block["addr"] > place else []
            blocks.append(_block(block))
            place = block["addr"] + block["size"]
        blocks += [_gap(place, self._end - place)] if self._end > place else []
        live = sum(block["size"] for block in self._live.values())
        segment = {
            "device": self.number, "address": self._base, "total_size": self._end - self._base, "stream": 0,
            "allocated_size": live, "active_size": live, "requested_size": live, "segment_type": "large",
            "segment_pool_id": [0, 0], "is_expandable": False, "frames": [], "blocks": blocks,
        }  # fmt: skip
        return [segment] if blocks else []


def _block(block: Entry) -> Entry:
    shown = {name: block[name] for name in ("size", "frames", "user_metadata", "category")}
    return {"address": block["addr"], "requested_size": block["size"], "state": "active_allocated", **shown}


def _gap(address: int, size: int) -> Entry:
    return {"address": address, "size": size, "requested_size": 0, "state": "inactive", "frames": []}


class _SnapshotWriter:
    """Replays an interval."""

    def __init__(self, interval: Interval) -> None:
        self._interval = interval
        self._devices = {tier: _Device(number) for number, tier in enumerate(TIERS)}
        self._replay = IntervalReplay(interval)
        self._phase = ""
        self._annotations: list[Entry] = []

    def snapshot(self) -> dict[str, Any]:
        """Returns the snapshot; to be called once."""
        first = self._devices[TIERS[0]].trace
        first += legend()
        begin = {stored: self._replay.now(stored) for stored in self._interval.sizes}
        self._settle(sorted(begin, key=lambda stored: (CATEGORIES.index(begin[stored][1]), -begin[stored][0])), 0)
        aside: dict[StorageRecord, None] = {}
        for event in self._interval.events:
            self._replay.take(event)
            if event.stored is not None:
                aside[event.stored] = None
            if event.phase != ASIDE:  # what the harness does aside is in no figure, but what it leaves is
                self._settle(aside, self._time(event))
                aside.clear()
                self._enter(event, first)
        self._end_phase(self._time(self._interval.events[-1]) if self._interval.events else 0)
        devices = [one for one in self._devices.values() if one.trace]
        return {
            "segments": [segment for one in devices for segment in one.segments()],
            "device_traces": [one.trace for one in self._devices.values()][: devices[-1].number + 1],
            "allocator_settings": {f"device {one.number}": f"tier {TIERS[one.number]}" for one in devices},
            "external_annotations": self._annotations,
        }

    def _time(self, event: Event) -> int:
        return round((event.at - self._interval.began) * 1e6)

    def _settle(self, storages: Iterable[StorageRecord], time_us: int) -> None:
        """Writes the changed storages; frees first, so that no instant has more bytes than existed."""
        changed = [one for one in storages if not self._devices[one.tier].shows(one, *self._replay.now(one))]
        for stored in changed:
            self._devices[stored.tier].free(stored, time_us)
        for stored in changed:
            size, category = self._replay.now(stored)
            if size:
                self._devices[stored.tier].alloc(stored, size, category, time_us)

    def _enter(self, event: Event, trace: list[Entry]) -> None:
        if event.stored is None and event.phase != self._phase:
            self._end_phase(self._time(event))
            self._phase = event.phase
            trace.append(_mark(self._time(event), "phase", event.phase))
            self._annotate("START", self._time(event))

    def _end_phase(self, time_us: int) -> None:
        if self._phase:
            self._annotate("END", time_us)

    def _annotate(self, stage: str, time_us: int) -> None:
        self._annotations.append({"device": 0, "name": self._phase, "stage": stage, "time_us": time_us})
