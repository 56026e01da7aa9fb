"""Reserved bytes by cause, of simulated cells and of torch's snapshots, and the lines that filled the device.

A snapshot (torch.cuda.memory._dump_snapshot) is a pickle of dicts, lists, text and numbers; a file that names anything
else is refused before that is imported. If a history was recorded, it is replayed through the simulated allocator with
other settings, beginning with older blocks; `replayed`, with default settings, shows how far to trust them.
"""

from __future__ import annotations

import pickle
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..fake.as_gpu import DEFAULT, EXPANDABLE, Allocations, DeviceMemory
from ..fake.caching_allocator import by_cause
from ..fake.observers import Growth, IntervalMark
from ..host.terminal import stdout_console
from ..results.grid import Grid
from ..sizes import show_bytes
from ..zero import labels

Entry = dict[str, Any]

LINES = 10
"""Number of lines that are listed."""

NOT_THE_USERS = re.compile(r"(site|dist)-packages/(torch|zerobench)/|/lib/python3\.\d+/(?!(site|dist)-packages)")
"""Files of torch, this package and the standard library."""


def saving_of(memory: DeviceMemory) -> str:
    """Returns the setting with which the simulated allocator reserves least, and how much less; empty if none helps."""
    setting = min(memory.by_setting, key=lambda name: memory.by_setting[name], default=DEFAULT)
    if setting == DEFAULT:
        return ""
    return f"{setting}, {show_bytes(memory.reserved_by_default - memory.by_setting[setting])} less"


def reserved_table(memories: Mapping[str, DeviceMemory]) -> Grid:
    """Returns a table with a row per name: reserved bytes, their causes, the last growth, and what settings save."""
    rows = []
    for name, memory in memories.items():
        reserved, replayed = sum(memory.causes.values()), memory.by_setting.get(DEFAULT)
        sizes = {"reserved": reserved, **memory.causes, "replayed": None if replayed == reserved else replayed}
        texts = {heading: show_bytes(size) for heading, size in sizes.items()}
        expandable = show_bytes(memory.by_setting.get(EXPANDABLE))
        rows.append(
            {"": name}
            | texts
            | {"expandable": expandable, "saves most": saving_of(memory), "grew last": memory.grew_last}
        )
    shown = [heading for heading in rows[0] if any(row[heading] not in ("", "–", "0 B") for row in rows)]
    return Grid(shown, [[row[heading] for heading in shown] for row in rows], ("", "saves most", "grew last"))


class PlainUnpickler(pickle.Unpickler):
    """Loads dicts, lists, tuples, text and numbers, and runs nothing."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Raises pickle.UnpicklingError."""
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which was not loaded")


def show_snapshots(paths: Sequence[Path]) -> None:
    """Prints the reserved bytes of snapshots, and the lines that filled their devices. Raises OSError, or ValueError
    for any other file.
    """
    import pandas as pd  # which no estimate needs

    memories, lines = dict[str, DeviceMemory](), dict[str, Counter[str]]()
    for path in paths:
        try:
            with path.open("rb") as file:
                snapshot = PlainUnpickler(file).load()
            if not snapshot["segments"]:
                raise ValueError("it has no segments")
            # a step on a CPU (probes/snapshot.py) has invented addresses
            is_ours = any(str(text).startswith("tier ") for text in snapshot.get("allocator_settings", {}).values())
            for device in sorted({segment["device"] for segment in snapshot["segments"]}):
                segments = [segment for segment in snapshot["segments"] if segment["device"] == device]
                name = f"{path} device {device}" if device else str(path)
                lines[name] = lines_in(segments)
                if not is_ours:
                    memories[name] = memory_of(segments, dict(enumerate(snapshot["device_traces"])).get(device, []))
        except OSError:
            raise
        except Exception as error:  # a damaged pickle raises errors of many kinds
            what = f"{type(error).__name__}: {error}"
            raise ValueError(f"{path}: is no snapshot of torch's allocator, or a damaged one: {what}") from error
    console = stdout_console()
    if memories:
        console.print(reserved_table(memories))
    sizes = pd.DataFrame(lines).fillna(0).astype("int64")
    most = sizes.max(axis="columns").nlargest(LINES)
    holders = sizes.loc[most.index].idxmax(axis="columns")
    rows = [[line, show_bytes(size), name] for line, size, name in zip(most.index, most, holders, strict=True)]
    header = [f"the {len(rows)} of {len(sizes)} lines with the most at the end", "bytes", "on"]
    console.print(Grid(header, rows, left=(header[0], "on")))


def memory_of(segments: Sequence[Entry], trace: Sequence[Entry]) -> DeviceMemory:
    """Returns the memory of one device at the end of a snapshot. The main stream is the one with the most alive."""
    alive, states, requested, free = Counter[Any](), Counter[str](), Counter[str](), []
    for segment in segments:
        pool = segment["stream"], segment.get("segment_pool_id")
        for block in segment["blocks"]:
            states[block["state"]] += block["size"]
            requested[block["state"]] += block["requested_size"]
            alive[pool] += block["size"] * (block["state"] != "inactive")
            if block["state"] == "inactive":
                free.append((pool, segment["segment_type"] == "small", len(segment["blocks"]) == 1, block["size"]))
    main = max(alive, key=lambda pool: alive[pool])
    allocated = states["active_allocated"]
    waiting = states.total() - allocated - states["inactive"]
    causes = by_cause(
        requested["active_allocated"], allocated, ((pool == main, *rest) for pool, *rest in free), waiting
    )
    grown = [n for n, entry in enumerate(trace) if entry["action"] in ("segment_alloc", "segment_map", "oom")]
    grew_last = ""
    if grown:
        last = trace[grown[-1]]
        grew_last = f"{last['action']} of {show_bytes(last['size'])} at entry {grown[-1] + 1:,} of {len(trace):,}"
    by_setting = allocations_of(segments, trace, main[0]).memory().by_setting if trace else {}
    return DeviceMemory(allocated, causes, grew_last, by_setting)


def allocations_of(segments: Sequence[Entry], trace: Sequence[Entry], main: int) -> Allocations:
    """Returns the allocations of a history, after those of older blocks. `main`: the stream of compute."""
    streams, alive = {main: 0}, dict[int, Growth]()
    older, log = list[tuple[Growth | IntervalMark, int]](), list[tuple[Growth | IntervalMark, int]]()

    def allocate(target: list[tuple[Growth | IntervalMark, int]], size: int, stream: int) -> Growth:
        growth = Growth(SimpleNamespace(tier=labels.DEVICE), size)
        target.append((growth, streams.setdefault(stream, len(streams))))
        return growth

    for entry in trace:
        if entry["action"] == "alloc":
            alive[entry["addr"]] = allocate(log, entry["size"], entry["stream"])
        elif entry["action"] == "free_completed":
            growth = alive.pop(entry["addr"], None) or allocate(older, entry["size"], entry["stream"])
            log.append((Growth(growth.stored, -growth.grown), 0))
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] != "inactive" and block["address"] not in alive:
                allocate(older, block["requested_size"], segment["stream"])
    return Allocations(0, [*older, *log, (IntervalMark("end", "step"), 0)])


def lines_in(segments: Sequence[Entry]) -> Counter[str]:
    """Returns line -> bytes of the live blocks that it made: the innermost line outside of torch, else the innermost;
    without lines of Python, the labels of the harness.
    """
    sizes: Counter[str] = Counter()
    for block in (block for segment in segments for block in segment["blocks"] if block["state"] != "inactive"):
        frames = [*block.get("frames", ()), *block.get("forward_frames", ())]
        lines = [frame for frame in frames if frame["line"] and ".py" in frame["filename"]]
        lines = [frame for frame in lines if not NOT_THE_USERS.search(frame["filename"])] or lines
        named = [f"{frame['filename']}:{frame['line']} in {frame['name']}" for frame in lines[:1]]
        sizes[(*named, str(block.get("user_metadata") or "no line of Python"))[0]] += block["size"]
    return sizes
