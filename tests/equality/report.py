"""The table of differences for people: a line per cell."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from .compare import Difference


def summary(rows: Sequence[Difference]) -> str:
    """Returns what the rows say together, and a line per cell."""
    equal, cells = sum(row.is_none for row in rows), {row.cell for row in rows}
    off = [abs(row.fake_peak_bytes - row.real_peak_bytes) for row in rows]
    unseen = [row.unseen_bytes / row.allocated_bytes for row in rows if row.unseen_bytes and row.allocated_bytes]
    states = sum(row.real_states_bytes != row.fake_states_bytes for row in rows)
    wires = sum(row.real_wire_bytes != row.fake_wire_bytes for row in rows)
    told = [
        f"- {len(cells)} cells, {len(rows)} ranks of real worlds, each executed on fake tensors as well",
        f"- every row of memory and of traffic, phase by phase, equal to the byte: {equal} of {len(rows)} ranks",
        f"- states: {states} ranks differ; bytes on the wire: {wires} ranks differ",
        f"- peak: {sum(map(bool, off))} ranks differ, the most by {max(off, default=0)} bytes",
    ]
    if unseen:
        within = sum(one < 1e-3 for one in unseen) + sum(not row.unseen_bytes for row in rows)
        told.append(
            f"- the allocator's own total is within 0.1 % of the execution for {within} of {len(rows)} ranks, and at"
            f" most {100 * max(unseen):.1f} % above it"
        )
    return "\n".join([*told, "", *_table(rows), ""])


def _table(rows: Sequence[Difference]) -> list[str]:
    lines = [
        "| cell | ranks | world sizes | states off | peak off | wire off | rows off | unseen by the ledger, at most |",
        "| --- | --: | --- | --: | --: | --: | --: | --: |",
    ]
    for cell, group in groupby(sorted(rows, key=lambda row: row.cell), key=lambda row: row.cell):
        mine = list(group)
        sizes = ", ".join(str(size) for size in sorted({row.world_size for row in mine}))
        off = [
            max(abs(getattr(row, f"fake_{what}_bytes") - getattr(row, f"real_{what}_bytes")) for row in mine)
            for what in ("states", "peak", "wire")
        ]
        others = sum(row.memory_rows + row.traffic_rows for row in mine)
        unseen = max((row.unseen_bytes for row in mine if row.unseen_bytes is not None), default="-")
        lines.append(f"| {cell} | {len(mine)} | {sizes} | {off[0]} | {off[1]} | {off[2]:g} | {others} | {unseen} |")
    return lines
