"""Compares two executions of a rank: everything that is recorded of its steps, but not of its construction.

memory    (tier, phase, category) -> bytes at the peak instant and most bytes; the step is one of the phases
traffic   every operation with its bytes; a transfer to or from a file without its phase, which the disk chooses
unseen    bytes of the allocator's total above the peak that was predicted: what backends allocate in their own threads
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from zerobench.worker import RankRecord

ALLOCATOR = ("allocated", "outside_ledger")
FILES = ("read", "write")

Memory = dict[tuple[str, str, str], tuple[int | None, int]]


@dataclass(frozen=True)
class Difference:
    """One rank of one cell, real beside fake. `memory_rows`, `traffic_rows`: how many differ. `unseen_bytes`: None
    where the machine has no compiler for the allocator's hook.
    """

    cell: str
    strategy: str
    world_size: int
    rank: int
    real_states_bytes: int
    fake_states_bytes: int
    real_peak_bytes: int
    fake_peak_bytes: int
    real_wire_bytes: float
    fake_wire_bytes: float
    memory_rows: int
    traffic_rows: int
    allocated_bytes: int | None
    unseen_bytes: int | None

    @property
    def is_none(self) -> bool:
        """True where not a byte differs."""
        return not self.memory_rows and not self.traffic_rows


def compare(cell: str, strategy: str, world_size: int, real: RankRecord, fake: RankRecord) -> Difference:
    """Returns what differs between a rank and its execution on fake tensors."""
    theirs, ours = _memory(real), _memory(fake)
    different = sum(theirs.get(key, (0, 0)) != ours.get(key, (0, 0)) for key in theirs.keys() | ours.keys())
    sent, expected = _traffic(real), _traffic(fake)
    allocated = next((row.max_bytes for row in real.memory if (row.phase, row.category) == ("step", "allocated")), None)
    in_memory = sum(_most(ours, "total", tier) for tier in ("device", "host"))
    return Difference(
        cell, strategy, world_size, real.rank,
        _most(theirs, "states"), _most(ours, "states"), _most(theirs, "total"), _most(ours, "total"),
        _wire(real), _wire(fake), different, (sent - expected).total() + (expected - sent).total(),
        allocated, None if allocated is None else allocated - in_memory,
    )  # fmt: skip


def _memory(record: RankRecord) -> Memory:
    return {
        (row.tier, row.phase, row.category): (row.at_peak_bytes, row.max_bytes)
        for row in record.memory
        if row.phase != "init" and row.category not in ALLOCATOR
    }


def _most(memory: Memory, category: str, tier: str = "device") -> int:
    return memory.get((tier, "step", category), (0, 0))[1]


def _traffic(record: RankRecord) -> Counter[tuple[tuple[str, Any], ...]]:
    counts: Counter[tuple[tuple[str, Any], ...]] = Counter()
    for row in record.traffic:
        one = asdict(row)
        calls = one.pop("calls")
        if row.kind in FILES:  # rows of two phases are one, by the size of a transfer
            one |= {"phase": "", "step": 0}
            one |= {key: one[key] / calls for key in ("elements", "payload_bytes", "wire_bytes", "volume_elements")}
        else:
            one["calls"] = calls
        counts[tuple(sorted(one.items()))] += calls if row.kind in FILES else 1
    return counts


def _wire(record: RankRecord) -> float:
    return sum(row.wire_bytes for row in record.traffic)
