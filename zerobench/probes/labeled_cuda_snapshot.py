"""Labels in torch's own snapshot of CUDA's allocator: each allocation gets those of the storage that was made in it.

entry    of `device_traces`: an allocation or a free, with its address and, since torch 2.1, `time_us` of the wall clock
birth    a storage of ours, met at its address after its allocation and before the next one there (probes/history.py)

A block that no birth belongs to, a kernel's workspace say, is of the category "unknown". torch's own frames stay the
inner ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from .history import Birth
from .memory_viz import UNKNOWN, Entry, group_frames, legend, words_of

SLACK_US = 50.0
"""Disagreement of the two clocks, in microseconds, that is allowed for; an operator takes no less on a GPU."""


def stamp(snapshot: dict[str, Any], births: Iterable[Birth], clock_us: float) -> int:
    """Writes labels into a snapshot as torch.cuda.memory._snapshot returns it; returns how many allocations got one.

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
    """Stamps allocations, and each free as the allocation that it ends."""
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
    """Returns the first birth of each allocation at an address, by its turn there; turn 0 is before the history."""
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
