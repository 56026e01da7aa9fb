"""Snapshots for torch's viewer (https://pytorch.org/memory_viz): `snapshots/rankR.pickle` in the run's folder.

On a CPU a snapshot is the ledger's step with the highest peak (probes/memory_viz.py). On CUDA it is the allocator's
own: its segments and blocks and, if a history was recorded, every allocation since with its stack and our labels.

Snapshots are never read here. torch's functions for CUDA are private; only this module uses them.

Labels in torch's own snapshot of CUDA's allocator: each allocation gets the labels of the storage made in it.

entry    of `device_traces`: an allocation or a free, with its address and, since torch 2.1, `time_us` of the wall clock
birth    a known storage, seen at its address after its allocation and before the next one there (probes/intervals.py)

A block without a birth, such as a kernel's workspace, has the category "unknown". torch's own frames stay the inner
ones.
"""

from __future__ import annotations

import pickle
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .intervals import ENTRIES, Birth, History
from .memory_viz import UNKNOWN, Entry, group_frames, legend, snapshot_of, words_of

SLACK_US = 50.0
"""Tolerated difference of the two clocks, in microseconds; an operator on a GPU takes at least as long."""


def stamp(snapshot: dict[str, Any], births: Iterable[Birth], clock_us: float) -> int:
    """Writes labels into a snapshot as torch.cuda.memory._snapshot returns it; returns how many allocations got labels.

    `clock_us`: the wall clock minus the clock of the births, in microseconds. Without any births nothing is written.
    """
    by_address: dict[int, list[Birth]] = defaultdict(list)
    for birth in births:
        by_address[birth.address].append(birth)
    if not by_address:
        return 0
    traces = [trace for trace in snapshot["device_traces"] if trace]
    stamped = sum(_stamp_trace(trace, by_address, clock_us) for trace in traces)
    for segment in snapshot["segments"]:
        place = segment["address"]
        for block in segment["blocks"]:
            address = block.get("address", place)
            if block["state"] != "inactive" and address in by_address:
                _write(block, by_address[address][-1])
            place += block["size"]
    for trace in traces[:1]:
        trace[:0] = legend()
    return stamped


def _stamp_trace(trace: list[Entry], by_address: dict[int, list[Birth]], clock_us: float) -> int:
    """Stamps allocations, and each free like its allocation."""
    times: dict[int, list[float]] = defaultdict(list)
    for entry in trace:
        if entry["action"] == "alloc":
            times[entry["addr"]].append(entry.get("time_us", 0.0))
    found = {address: _by_turn(times[address], born, clock_us) for address, born in by_address.items()}
    turn: dict[int, int] = defaultdict(int)
    stamped = 0
    for entry in trace:
        if entry["action"] not in ("alloc", "free_requested", "free_completed"):
            continue
        address = entry["addr"]
        turn[address] += entry["action"] == "alloc"
        birth = found.get(address, {}).get(turn[address])
        stamped += birth is not None and entry["action"] == "alloc"
        if birth is None:
            entry["category"] = UNKNOWN
        else:
            _write(entry, birth)
    return stamped


def _by_turn(times: list[float], births: list[Birth], clock_us: float) -> dict[int, Birth]:
    """Returns the first birth of each allocation at an address, by its index there; 0 is before the history."""
    found: dict[int, Birth] = {}
    for birth in births:
        turn = bisect_right(times, birth.at * 1e6 + clock_us + SLACK_US)
        if turn == 0 or turn not in found:  # of those before the history the last one is freed within it
            found[turn] = birth
    return found


def _write(place: Entry, birth: Birth) -> None:
    stored = birth.stored
    theirs = place.get("user_metadata")
    place["category"] = stored.category
    place["user_metadata"] = " | ".join([*([str(theirs)] if theirs else []), words_of(stored, stored.category)])
    place["frames"] = [
        *place.get("frames", ()),
        *group_frames(stored, stored.category),
    ]  # torch's list is in many places


FOLDER = "snapshots"

PROTOCOL = 4
"""Pickle protocol: the newest that the page reads."""


@contextmanager
def snapshots(folder: Path, rank: int, device: torch.device, asked: bool) -> Iterator[History | None]:
    """Writes a snapshot at the end of the context, if `asked` for, and always when CUDA runs out of memory.

    Yields the history that the ledger is to fill, or None if none is asked for. The error is passed on, with a note if
    a snapshot could not be written. A rank on a machine without access to the run's `folder` writes none.
    """
    cuda = device.type == "cuda"
    if not folder.is_dir() or not (asked or cuda):
        yield None
        return
    history = History() if asked else None
    with recorded(device, history):
        try:
            yield history
            if asked:
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
    """Writes a snapshot into a run's folder, if both exist and this machine has access; the file gets its name once it
    is complete.
    """
    if taken is None or folder is None or not folder.is_dir():
        return
    target = folder / FOLDER / f"rank{rank}.pickle"
    target.parent.mkdir(exist_ok=True)
    aside = target.with_name(f".{target.name}")
    with aside.open("wb") as file:
        pickle.dump(taken, file, protocol=PROTOCOL)
    aside.replace(target)


def written(folder: Path) -> list[str]:
    """Returns the snapshots in a run's folder, as relative paths."""
    return sorted(f"{FOLDER}/{path.name}" for path in (folder / FOLDER).glob("rank*.pickle"))
