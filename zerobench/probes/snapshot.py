"""Snapshots in torch's format for https://pytorch.org/memory_viz and torch.cuda._memory_viz: `snapshots/rankR.pickle`
in the run's folder, of plain dicts, lists, strings and integers. They are never read here.

On a CPU a snapshot is the ledger's step with the highest peak, on CUDA the allocator's own with our labels: its
segments and blocks and, if a history was recorded, every allocation since with its stack. torch's functions for CUDA
are private; only this module uses them.

category    colors a block in the page's timeline; "unknown" without a label, such as a kernel's workspace
frames      label, source line, module, phase, category: in torch's flame graphs the category is outermost
mark        an entry "snapshot", which changes no memory: one per category at the start, so that a color means the same
            in all files, and one at the beginning of each phase

In a snapshot of the ledger's step:
device      one of our tiers (device, host, nvme), by number; each has one segment
block       a storage from one change of its size or category to the next; a change is a free and an allocation
address     made up: no two live blocks overlap; blocks of equal size reuse addresses
The trace begins with an allocation of everything alive at the step's beginning: its category is known only there.

In a snapshot of CUDA's allocator each allocation gets the labels of the storage made in it, after torch's own frames:
entry       of `device_traces`: an allocation or a free, with its address and `time_us` of the wall clock
birth       a known storage, seen at its address after its allocation and before the next one there
            (probes/intervals.py)
"""

from __future__ import annotations

import pickle
import re
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..records import CATEGORIES, TIERS
from .intervals import ASIDE, ENTRIES, Birth, History, Interval, IntervalReplay, StorageRecord

Entry = dict[str, Any]

UNKNOWN = "unknown"
"""The page's category for blocks that have none; the page fails if categories exist without this one."""

SPACE = 1 << 44
"""Distance of the tiers' address spaces, in bytes; all addresses are exact in a float, as JavaScript's numbers are."""

SLACK_US = 50.0
"""Tolerated difference of the two clocks, in microseconds; an operator on a GPU takes at least as long."""

FOLDER = "snapshots"

PROTOCOL = 4
"""Pickle protocol: the newest that the page reads."""

_SOURCE = re.compile(r"(backward of )?(.*):(\d+) in (.*)")


def _frame(what: str, name: str) -> Entry:
    return {"filename": what, "line": 0, "name": name}


def _group_frames(stored: StorageRecord, category: str) -> list[Entry]:
    """Returns the outer frames of a storage: its module, its phase, and outermost its category."""
    return [_frame("module", stored.module or "none"), _frame("phase", stored.phase), _frame("category", category)]


def _labels_of(stored: StorageRecord, category: str) -> str:
    return " | ".join([category, stored.module or "no module", stored.phase, stored.name or "no label"])


def _mark(time_us: int, what: str, name: str) -> Entry:
    entry = {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "time_us": time_us}
    return entry | {"frames": [_frame(what, name)], "user_metadata": f"{what}: {name}"}


def legend() -> list[Entry]:
    """Returns a mark per category, in the order of the page's colors."""
    return [_mark(0, "category", category) | {"category": category} for category in (*CATEGORIES, UNKNOWN)]


# -- a step of the ledger -------------------------------------------------------------------------


class _Tier:
    """One tier: its trace, and its live blocks by storage, with their addresses."""

    def __init__(self, number: int) -> None:
        self.trace: list[Entry] = []
        self.live: dict[StorageRecord, Entry] = {}
        self.number, self._base = number, (number + 1) * SPACE
        self._end = self._base
        self._free: dict[int, list[int]] = defaultdict(list)

    def alloc(self, stored: StorageRecord, size: int, category: str, time_us: int) -> None:
        """Writes a storage's block."""
        if not self._free[size]:
            self._free[size].append(self._end)
            self._end += size
        frames = [_frame("label", stored.name)] if stored.name else []
        if line := _SOURCE.fullmatch(stored.source):
            frames.append({"filename": line[2], "line": int(line[3]), "name": f"{line[1] or ''}{line[4]}"})
        block = {
            "addr": self._free[size].pop(), "size": size, "stream": 0, "category": category,
            "frames": [*frames, *_group_frames(stored, category)], "user_metadata": _labels_of(stored, category),
        }  # fmt: skip
        self.live[stored] = block
        self.trace.append({"action": "alloc", "time_us": time_us, **block})

    def free(self, stored: StorageRecord, time_us: int) -> None:
        """Writes the end of a storage's block, if it has one."""
        block = self.live.pop(stored, None)
        if block is not None:
            self._free[block["size"]].append(block["addr"])
            self.trace += [
                {"action": f"free_{what}", "time_us": time_us, **block} for what in ("requested", "completed")
            ]

    def segments(self) -> list[Entry]:
        """Returns the one segment, with the live blocks and the gaps between them; none if it has no bytes."""
        blocks: list[Entry] = []
        address, live = self._base, 0
        for block in [*sorted(self.live.values(), key=lambda block: int(block["addr"])), None]:
            gap = (self._end if block is None else block["addr"]) - address
            if gap:
                blocks.append({"address": address, "size": gap, "requested_size": 0, "state": "inactive", "frames": []})
            if block is not None:
                shown = {name: block[name] for name in ("size", "frames", "user_metadata", "category")}
                blocks.append({
                    "address": block["addr"], "requested_size": block["size"], "state": "active_allocated", **shown,
                })  # fmt: skip
                address, live = block["addr"] + block["size"], live + block["size"]
        segment = {
            "device": self.number, "address": self._base, "total_size": self._end - self._base, "stream": 0,
            "allocated_size": live, "active_size": live, "requested_size": live, "segment_type": "large",
            "segment_pool_id": [0, 0], "is_expandable": False, "frames": [], "blocks": blocks,
        }  # fmt: skip
        return [segment] if blocks else []


def snapshot_of(interval: Interval) -> dict[str, Any]:
    """Returns the step as a snapshot; its live bytes equal the ledger's after each event, and never exceed them.

    For an interval without events the snapshot shows the storages alive at its beginning.
    """
    tiers, replay = {tier: _Tier(number) for number, tier in enumerate(TIERS)}, IntervalReplay(interval)
    trace, annotations = tiers[TIERS[0]].trace, list[Entry]()
    trace += legend()

    def write_changed(storages: Iterable[StorageRecord], time_us: int) -> None:
        """Writes the changed storages; frees first, so that no instant has more bytes than existed."""
        changed = []
        for stored in storages:
            block, (size, category) = tiers[stored.tier].live.get(stored), replay.now(stored)
            if (block is None and size) or (block and (block["size"], block["category"]) != (size, category)):
                changed.append(stored)
        for stored in changed:
            tiers[stored.tier].free(stored, time_us)
        for stored in changed:
            size, category = replay.now(stored)
            if size:
                tiers[stored.tier].alloc(stored, size, category, time_us)

    def annotate(phase: str, stage: str, time_us: int) -> None:
        if phase:
            annotations.append({"device": 0, "name": phase, "stage": stage, "time_us": time_us})

    begin = {stored: replay.now(stored) for stored in interval.sizes}
    write_changed(sorted(begin, key=lambda stored: (CATEGORIES.index(begin[stored][1]), -begin[stored][0])), 0)
    waiting: dict[StorageRecord, None] = {}
    phase, time_us = "", 0
    for event in interval.events:
        replay.take(event)
        time_us = round((event.at - interval.began) * 1e6)
        if event.stored is not None:
            waiting[event.stored] = None
        if event.phase == ASIDE:  # what the harness does aside is in no figure, but what it leaves is
            continue
        write_changed(waiting, time_us)
        waiting.clear()
        if event.stored is None and event.phase != phase:
            annotate(phase, "END", time_us)
            phase = event.phase
            trace.append(_mark(time_us, "phase", phase))
            annotate(phase, "START", time_us)
    annotate(phase, "END", time_us)
    used = [tier for tier in tiers.values() if tier.trace]
    return {
        "segments": [segment for tier in used for segment in tier.segments()],
        "device_traces": [tier.trace for tier in tiers.values()][: used[-1].number + 1],
        "allocator_settings": {f"device {tier.number}": f"tier {TIERS[tier.number]}" for tier in used},
        "external_annotations": annotations,
    }


# -- CUDA's allocator -----------------------------------------------------------------------------


def stamp(snapshot: dict[str, Any], births: Iterable[Birth], clock_us: float) -> int:
    """Writes labels into a snapshot as torch.cuda.memory._snapshot returns it; returns how many allocations got labels.

    `clock_us`: the wall clock minus the clock of the births, in microseconds. Without any births nothing is written.
    """
    by_address: dict[int, list[Birth]] = defaultdict(list)
    for birth in births:
        by_address[birth.address].append(birth)
    if not by_address:
        return 0
    traces, stamped = [trace for trace in snapshot["device_traces"] if trace], 0
    for trace in traces:
        times: dict[int, list[float]] = defaultdict(list)
        for entry in trace:
            if entry["action"] == "alloc":
                times[entry["addr"]].append(entry.get("time_us", 0.0))
        # the first birth of each allocation at an address, by its index there; 0 is before the history
        first: dict[tuple[int, int], Birth] = {}
        for address, born in by_address.items():
            for birth in born:
                turn = bisect_right(times[address], birth.at * 1e6 + clock_us + SLACK_US)
                if turn == 0 or (address, turn) not in first:  # of those before the history the last is freed within it
                    first[address, turn] = birth
        turns: dict[int, int] = defaultdict(int)
        for entry in trace:  # allocations, and each free like its allocation
            if entry["action"] not in ("alloc", "free_requested", "free_completed"):
                continue
            address, is_allocation = entry["addr"], entry["action"] == "alloc"
            turns[address] += is_allocation
            labeled = first.get((address, turns[address]))
            if labeled is None:
                entry["category"] = UNKNOWN
            else:
                _write_labels(entry, labeled)
                stamped += is_allocation
    for segment in snapshot["segments"]:
        next_address = segment["address"]
        for block in segment["blocks"]:
            address = block.get("address", next_address)
            if block["state"] != "inactive" and address in by_address:
                _write_labels(block, by_address[address][-1])
            next_address += block["size"]
    for trace in traces[:1]:
        trace[:0] = legend()
    return stamped


def _write_labels(entry: Entry, birth: Birth) -> None:
    stored, metadata = birth.stored, entry.get("user_metadata")
    entry["category"] = stored.category
    entry["user_metadata"] = " | ".join([
        *([str(metadata)] if metadata else []), _labels_of(stored, stored.category),
    ])  # fmt: skip
    # a new list: many entries share torch's
    entry["frames"] = [*entry.get("frames", ()), *_group_frames(stored, stored.category)]


# -- files ----------------------------------------------------------------------------------------


@contextmanager
def snapshots(folder: Path, rank: int, device: torch.device, requested: bool) -> Iterator[History | None]:
    """Writes a snapshot at the end of the context, if `requested`, and always when CUDA runs out of memory.

    Yields the history that the ledger is to fill, or None if none is requested. The error is passed on, with a note if
    a snapshot could not be written. A rank on a machine without access to the run's `folder` writes none.
    """
    cuda = device.type == "cuda"
    if not folder.is_dir() or not (requested or cuda):
        yield None
        return
    history = History() if requested else None
    with recorded(device, history):
        try:
            yield history
            if requested:
                write(folder, rank, take(device, history))
        except torch.OutOfMemoryError as error:
            try:
                if cuda:
                    write(folder, rank, take(device, history))
            except Exception as failure:  # of any kind: the run must end with its own error
                error.add_note(f"no snapshot of the allocator could be written: {failure}")
            raise


@contextmanager
def recorded(device: torch.device, history: History | None) -> Iterator[None]:
    """Makes CUDA's allocator record its history inside, if a `history` is kept."""
    if device.type != "cuda" or history is None:
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=ENTRIES, stacks="python")
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def take(device: torch.device, history: History | None) -> dict[str, Any] | None:
    """Returns the current snapshot; None if no step was measured."""
    if device.type != "cuda":
        return snapshot_of(history.step) if history is not None and history.step is not None else None
    taken: dict[str, Any] = torch.cuda.memory._snapshot()
    if history is not None:
        stamp(taken, history.births, (time.time() - time.perf_counter()) * 1e6)
    return taken


def write(folder: Path | None, rank: int, taken: dict[str, Any] | None) -> None:
    """Writes a snapshot into a run's folder that is present here; it gets its name once it is complete."""
    if taken is None or folder is None or not folder.is_dir():
        return
    target = folder / FOLDER / f"rank{rank}.pickle"
    target.parent.mkdir(exist_ok=True)
    incomplete = target.with_name(f".{target.name}")
    with incomplete.open("wb") as file:
        pickle.dump(taken, file, protocol=PROTOCOL)
    incomplete.replace(target)


def written(folder: Path) -> list[str]:
    """Returns the snapshots in a run's folder, as relative paths."""
    return sorted(f"{FOLDER}/{path.name}" for path in (folder / FOLDER).glob("rank*.pickle"))
