"""Reports a run's unexplained figures: deviations from predictions, and disagreements between two measurements.

Each message begins with the category or collective concerned. An unexplained byte is a bug in the theory, the probe or
the engine; the column `unexplained` of a run is empty if there is none.

Also the share of a model that was actually sent quantized, according to the measured traffic, not the options.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..records import COLLECTIVES, DATA_AXIS, LINKS, STATES, LineRow, MemoryRow, RunRow, TrafficRow
from ..theory.groups import Moved
from ..theory.layout import by_kind, by_unit
from ..theory.replay.states import Prediction
from ..theory.shapes import ParameterShape

STATES_SHARE = 0.01
"""Tolerance relative to a prediction: two gradients may briefly exist together, and their order decides which two."""

LINKS_SHARE = 0.05
"""Tolerance relative to a prediction: in a simulated world one rank represents all, whose padding differs."""

OUTSIDE_SHARE, OUTSIDE_BYTES = 0.01, 64 * 1024
"""Tolerance for kernels' scratch memory: a fraction of the peak, but at least this many bytes."""

OUTSIDE_BYTES_ELSE = 512 * 1024
"""Scratch in half precision: oneDNN repacks operands of a product, 0.2 MiB for 512 x 64 times 64 x 256."""

IMPOSSIBLE = "which cannot be: the ledger counts memory that the allocator does not hold, so it has missed a free"
"""Message about outside_ledger_bytes far below 0."""

RESET = "which cannot be: the ledger is as predicted, so the allocator's peak was reset, or not read in every phase"
"""The same, if predictions confirm the ledger's states and activations."""

WARM_UP = 1.5
"""If a measured step has this multiple of every other step's traffic, it includes a warm-up step's traffic."""

KEPT_BYTES = 4 * 1024
"""Tolerance for unlabeled flags and scalars that live as long as the engine, and for growth over a few steps."""

TIMED_SHARE = {True: 0.01, False: 0.15}
"""Fraction of the peak by which the passes of a run may differ: for our strategies (True), and for other libraries
(False), which free memory in threads. FSDP2 over gloo keeps one or two more units' gradients in the timed pass.
"""


@dataclass(frozen=True)
class Accounted:
    """The accounted pass: `memory` and `traffic` of all ranks; `steps`: their total number of steps. `kept`:
    description of the largest storage in kept_bytes; `lines`: of the rank with the largest growth_bytes. `saves_aside`:
    True if a thread saves checkpoints during the steps. `keeps_slots`: True if an arena keeps memory for the inputs of
    recomputed blocks.
    """

    memory: list[MemoryRow]
    traffic: list[TrafficRow]
    steps: int
    kept: str
    lines: list[LineRow]
    saves_aside: bool = False
    keeps_slots: bool = False


@dataclass(frozen=True)
class Expected:
    """Predictions for the run: the states, and the traffic by collective; empty for another library's strategy."""

    states: Prediction | None = None
    parts: Mapping[str, Moved] = field(default_factory=dict)


def unexplained(row: RunRow, seen: Accounted, expected: Expected) -> str:
    """Returns messages about a finished run, joined by "; "."""
    sent = [entry for entry in seen.traffic if not entry.control and entry.axis == DATA_AXIS]
    ledger = [*_states(row, seen.memory, expected.states)]
    traffic = [*_traffic(row, sent, seen.steps, expected.parts)]
    copied = _copied(row) if seen.saves_aside else 0
    sentences = [
        *_ranks(row, seen.memory), *ledger, *((traffic and [*_meter(seen.traffic, seen.steps)]) or traffic),
        *_other_traffic(row), *_allocator(row, not ledger and expected.states is not None, copied),
        *_growth(row, seen, copied),
        *(f"{entry.operator}: an operator that is not counted" for entry in sent if not entry.known),
    ]  # fmt: skip
    return "; ".join(dict.fromkeys(sentences))


def _copied(row: RunRow) -> int:
    """Returns a bound for the copy that an asynchronous save writes, which may be alive or freed at any instant of a
    step: this rank's states, since one save at a time is in flight.
    """
    return (row.states_bytes or 0) + (row.host_states_bytes or 0)


def _ranks(row: RunRow, memory: list[MemoryRow]) -> Iterator[str]:
    """Yields figures of the row that are below those of the rank with the most bytes."""
    whole = [m for m in memory if (m.phase, m.tier) == ("step", "device")]
    for name, category in (("peak", "total"), ("states", "states")):
        most = max((m for m in whole if m.category == category), key=lambda m: m.max_bytes, default=None)
        reported = getattr(row, f"{name}_bytes")
        if most is not None and reported is not None and reported < most.max_bytes:
            yield f"{name}: {reported:,} B in the row, and {most.max_bytes:,} B on rank {most.rank}: not of all ranks"


def _states(row: RunRow, memory: list[MemoryRow], expected: Prediction | None) -> Iterator[str]:
    for name, tier in (("states", "device"), ("host_states", "host")):
        measured, predicted = getattr(row, f"{name}_bytes"), getattr(row, f"predicted_{name}_bytes")
        if measured is None or predicted is None or abs(measured - predicted) <= STATES_SHARE * predicted:
            continue
        parts = expected.at_most_states(tier) if expected else {}
        category = _category(memory, tier, parts, above=measured > predicted)
        yield f"{category}: {_off(measured, predicted)} in the states{' in host memory' * (tier == 'host')}"
    measured, predicted = row.max_activations_bytes, row.predicted_activations_bytes
    if measured is not None and predicted is not None and abs(measured - predicted) > STATES_SHARE * predicted:
        yield f"activations: {_off(measured, predicted)}, which the model needs by itself"


def _category(memory: list[MemoryRow], tier: str, expected: Mapping[str, int], above: bool) -> str:
    """Returns the category that explains most of the states' deviation, on the rank and at the time of their largest
    sum; "states" if theory does not predict categories.
    """
    of_step = [m for m in memory if (m.phase, m.tier) == ("step", tier)]
    fullest = max((m for m in of_step if m.category == "states"), key=lambda m: m.max_bytes, default=None)
    parts = {m.category: m.at_states_peak_bytes or 0 for m in of_step if fullest and m.rank == fullest.rank}
    off = {name: parts[name] - expected[name] for name in STATES if name in parts and name in expected}
    return max(off, key=lambda name: off[name] if above else -off[name], default="states")


def _traffic(row: RunRow, traffic: list[TrafficRow], steps: int, parts: Mapping[str, Moved]) -> Iterator[str]:
    for name, value, unit in (("volume", "volume_elements", " elements"), ("wire", "wire_bytes", " B")):
        measured = sum(getattr(entry, value) for entry in traffic) / steps
        predicted = sum(_size(part, name) for part in parts.values())
        is_predicted = row.predicted_wire_bytes is not None
        if is_predicted and abs(measured - predicted) > max(1.0, 1e-6 * predicted):
            kinds = {kind: -_size(parts.get(kind, Moved()), name) for kind in (*COLLECTIVES, *parts)}
            for entry in traffic:
                kinds[entry.kind] = kinds.get(entry.kind, 0.0) + getattr(entry, value) / steps
            blamed = max(kinds, key=lambda kind: abs(kinds[kind]))
            yield f"{blamed}: {_off(round(measured), round(predicted), unit)} of {name}"
    control, expected = row.control_bytes, row.predicted_control_bytes
    if control is not None and expected is not None and control != expected:
        yield f"control: {_off(control, expected)}"


def _meter(traffic: list[TrafficRow], steps: int) -> Iterator[str]:
    """Yields contradictions within the meter's own figures, which explain a deviation of every collective."""
    sent = [entry for entry in traffic if entry.kind not in LINKS]
    names = dict.fromkeys(entry.dtype for entry in sent)
    for dtype in (name for name in names if isinstance(getattr(torch, name, None), torch.dtype)):
        size, same = getattr(torch, dtype).itemsize, [entry for entry in sent if entry.dtype == dtype]
        if all(entry.payload_bytes != entry.elements * size for entry in same if entry.elements):
            elements, payload = sum(entry.elements for entry in same), sum(entry.payload_bytes for entry in same)
            yield f"the meter: {payload:,} B for {elements:,} elements of {dtype}, which has {size} B: a wrong size"
    by_step: Counter[int] = Counter()
    for entry in sent:
        by_step[entry.step] += entry.payload_bytes
    each = steps // max(len({entry.rank for entry in sent}), 1)
    (most, size), (_, next_size) = (*by_step.most_common(2), (0, 0), (0, 0))[:2]
    if len(by_step) > each:
        yield f"the meter: traffic of {len(by_step)} steps, and {each} were measured: a warm-up step is counted"
    elif next_size and size > WARM_UP * next_size:
        yield f"the meter: step {most} has {size / next_size:.3g} × the bytes of any other: a warm-up step is counted"


def _other_traffic(row: RunRow) -> Iterator[str]:
    """Yields deviations of traffic outside of the volume: between tiers, and among the ranks that share a model."""
    tiers = [(link, link, LINKS_SHARE, "between tiers") for link in LINKS]
    axis = [
        (kind, f"tensor_axis_{kind}", 0, "among the ranks that share a model") for kind in ("all_reduce", "all_gather")
    ]
    for name, column, share, where in (*tiers, *axis):
        measured, predicted = getattr(row, f"{column}_bytes"), getattr(row, f"predicted_{column}_bytes")
        if measured is not None and predicted is not None and abs(measured - predicted) > share * predicted:
            yield f"{name}: {_off(measured, predicted)} {where}"


def _size(part: Moved, name: str) -> float:
    return part.volume if name == "volume" else part.within + part.between


def _allocator(row: RunRow, confirmed: bool, copied: int) -> Iterator[str]:
    """Yields disagreements with the allocator's total, in either direction, and between its totals in two passes.
    `confirmed`: the ledger is as predicted. `copied`: see _copied.
    """
    outside, peak, timed = row.outside_ledger_bytes, row.allocator_peak_bytes, row.timed_allocator_peak_bytes
    ours = row.predicted_states_bytes is not None  # memory of a peer's libraries is not predicted
    if peak is None:
        return
    scratch = OUTSIDE_BYTES if row.precision == "fp32" else OUTSIDE_BYTES_ELSE
    if copied:  # the thread's messages and headers of files are the allocator's alone
        scratch = max(scratch, OUTSIDE_BYTES_ELSE)
    if ours and outside is not None and outside > max(scratch, OUTSIDE_SHARE * peak):
        yield f"outside the ledger: {outside:,} B that the allocator alone has seen, of kernels or other threads"
    # inputs may be numpy arrays or a loader's shared memory, which are in no allocator
    if outside is not None and outside < -(OUTSIDE_BYTES + (row.max_inputs_bytes or 0)):
        yield f"outside the ledger: {outside:,} B, {RESET if confirmed else IMPOSSIBLE}"
    if timed is not None and timed - peak > max(OUTSIDE_BYTES, TIMED_SHARE[ours] * peak) + copied:
        yield f"timed pass: {timed - peak:,} B above the allocator's peak of {peak:,} B in the accounted pass"


def _growth(row: RunRow, seen: Accounted, copied: int) -> Iterator[str]:
    if row.growth_bytes is not None and row.growth_bytes > KEPT_BYTES + copied:
        grown = max((line for line in seen.lines if line.at == "growth"), key=lambda line: line.bytes, default=None)
        made = f", most of it made at {grown.source}" if grown and grown.source else ""
        category = grown.category if grown else "growth"
        yield f"{category}: {row.growth_bytes:,} B more after the measured steps than before them{made}"
    if row.kept_bytes is not None and row.kept_bytes > KEPT_BYTES + copied and not seen.keeps_slots:
        yield f"kept from step to step: {row.kept_bytes:,} B, {seen.kept}"


def _off(measured: int, predicted: int, unit: str = " B") -> str:
    by = measured - predicted
    return f"{abs(by):,}{unit} {'above' if by > 0 else 'below'} the prediction of {predicted:,}{unit}"


# -- quantized traffic -----------------------------------------------------------------------------


BYTES = "uint8"
"""dtype of quantized values; all other data in a unit's gathers and reductions is floating point."""


def coded_share(traffic: Sequence[TrafficRow], kind: str, units: dict[str, int]) -> float:
    """Returns the share of the parameters in `units` whose collectives of that kind sent uint8; 0 if there are none. A
    unit counts with all its trainable parameters; with secondary shards its gathers but the first are exact.
    """
    coded = {row.unit for row in traffic if row.kind == kind and row.dtype == BYTES and not row.control}
    return sum(numel for name, numel in units.items() if name in coded) / max(1, sum(units.values()))


def units_of(shapes: Sequence[ParameterShape], persistence_numel: int) -> dict[str, int]:
    """Returns the number of trainable parameters of each zero3 unit, by the name of its collectives."""
    small, groups = by_unit(shapes, persistence_numel)
    counts: dict[str, int] = {}
    for group, members in (("(kept)", small), *((name or "(root)", indices) for name, indices in groups.items())):
        for number, kind in enumerate(by_kind(shapes, members), 1):
            trained = sum(shapes[i].numel for i in kind if shapes[i].trainable)
            counts[group if number == 1 else f"{group} part {number}"] = trained
    return counts
