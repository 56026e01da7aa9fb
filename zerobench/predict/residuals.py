"""The unexplained figures of a run, in words: each figure against its prediction, and disagreements of two witnesses.

A sentence begins with the category or collective concerned. An unexplained byte is a bug in the theory, the probe or
the engine; the column `unexplained` of a run is empty where there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ..records import COLLECTIVES, LINKS, STATES, MemoryRow, RunRow, TrafficRow
from ..theory.groups import Moved

STATES_SHARE = 0.01
"""Relative to a prediction: a gradient may exist beside another for a moment, and order decides which two."""

LINKS_SHARE = 0.05
"""In a simulated world one rank stands for all, whose shards hold more or less padding."""

OUTSIDE_SHARE, OUTSIDE_BYTES = 0.01, 64 * 1024
"""Kernels' scratch: a fraction of the peak, and at least so many bytes."""

KEPT_BYTES = 4 * 1024
"""Flags and scalars that live as long as the engine and that nothing labels."""

HEAP_BYTES = {"fp32": 4 * 2**20}
HEAP_BYTES_ELSE = 16 * 2**20
"""Memory that Python and libraries allocate as they are used; oneDNN keeps its kernels for half precision."""

HEAP_SHARE = 0.05
"""Fraction of the peak: Python's own memory for a larger model's modules, units and graph."""

OWN_DATA = ("text", "synthetic")
"""Data that keep nothing outside of torch; a user's may."""


def unexplained(
    row: RunRow, memory: Iterable[MemoryRow], traffic: Iterable[TrafficRow], steps: int, parts: Mapping[str, Moved],
    kept: str,
) -> str:  # fmt: skip
    """Returns sentences on a finished run, joined by "; ". `traffic`: of one rank; `parts`: theory's traffic by
    collective;
    `kept`: the largest storage of kept_bytes, in words.
    """
    mine = [one for one in traffic if not one.control]
    sentences = [
        *_states(row, list(memory)), *_activations(row), *_traffic(row, mine, steps, parts), *_links(row),
        *_witnesses(row, kept),
        *(f"{one.operator}: an operator that is not counted" for one in mine if not one.known),
    ]  # fmt: skip
    return "; ".join(dict.fromkeys(sentences))


def _states(row: RunRow, memory: list[MemoryRow]) -> Iterator[str]:
    where = {"states": "device", "host_states": "host"}
    for name, tier in where.items():
        measured, predicted = getattr(row, f"{name}_bytes"), getattr(row, f"predicted_{name}_bytes")
        if measured is None or predicted is None or abs(measured - predicted) <= STATES_SHARE * predicted:
            continue
        where_of = " in host memory" * (tier == "host")
        yield f"{_category(memory, tier)}: {_off(measured, predicted)} in the states{where_of}"


def _activations(row: RunRow) -> Iterator[str]:
    measured, predicted = row.max_activations_bytes, row.predicted_activations_bytes
    if measured is not None and predicted is not None and abs(measured - predicted) > STATES_SHARE * predicted:
        yield f"activations: {_off(measured, predicted)}, which the model needs by itself"


def _category(memory: list[MemoryRow], tier: str) -> str:
    """Returns the category that is furthest from its prediction; "states" where theory has none for categories."""
    mine = [m for m in memory if (m.phase, m.tier) == ("step", tier) and m.category in STATES]
    off = {m.category: abs(m.max_bytes - m.predicted_bytes) for m in mine if m.predicted_bytes is not None}
    return max(off, key=lambda name: off[name], default="states")


def _traffic(row: RunRow, traffic: list[TrafficRow], steps: int, parts: Mapping[str, Moved]) -> Iterator[str]:
    for name, value, unit in (("volume", "volume_elements", " elements"), ("wire", "wire_bytes", " B")):
        measured = sum(getattr(one, value) for one in traffic) / steps
        predicted = sum(_size(part, name) for part in parts.values())
        known = row.predicted_wire_bytes is not None
        if known and abs(measured - predicted) > max(1.0, 1e-6 * predicted):
            kinds = {kind: -_size(parts.get(kind, Moved()), name) for kind in (*COLLECTIVES, *parts)}
            for one in traffic:
                kinds[one.kind] = kinds.get(one.kind, 0.0) + getattr(one, value) / steps
            blamed = max(kinds, key=lambda kind: abs(kinds[kind]))
            yield f"{blamed}: {_off(round(measured), round(predicted), unit)} of {name}"
    control, expected = row.control_bytes, row.predicted_control_bytes
    if control is not None and expected is not None and control != expected:
        yield f"control: {_off(control, expected)}"


def _links(row: RunRow) -> Iterator[str]:
    for link in LINKS:
        measured, predicted = getattr(row, f"{link}_bytes"), getattr(row, f"predicted_{link}_bytes")
        if measured is not None and predicted is not None and abs(measured - predicted) > LINKS_SHARE * predicted:
            yield f"{link}: {_off(measured, predicted)} between tiers"


def _size(part: Moved, name: str) -> float:
    return part.volume if name == "volume" else part.within + part.between


def _witnesses(row: RunRow, kept: str) -> Iterator[str]:
    outside, peak = row.outside_ledger_bytes, row.allocator_peak_bytes
    ours = row.predicted_states_bytes is not None  # memory of a peer's libraries is not predicted
    if ours and outside is not None and peak is not None and outside > max(OUTSIDE_BYTES, OUTSIDE_SHARE * peak):
        yield f"outside the ledger: {outside:,} B that the allocator alone has seen, of kernels or other threads"
    if row.kept_bytes is not None and row.kept_bytes > KEPT_BYTES:
        yield f"kept from step to step: {row.kept_bytes:,} B, {kept}"
    most = HEAP_BYTES.get(row.precision, HEAP_BYTES_ELSE) + HEAP_SHARE * (peak or 0)
    if ours and row.data in OWN_DATA and row.heap_bytes is not None and row.heap_bytes > most:
        yield f"not torch's: {row.heap_bytes:,} B of the heap, numpy's or a library's"


def _off(measured: int, predicted: int, unit: str = " B") -> str:
    by = measured - predicted
    return f"{abs(by):,}{unit} {'above' if by > 0 else 'below'} the prediction of {predicted:,}{unit}"
