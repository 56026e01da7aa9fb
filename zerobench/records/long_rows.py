"""Rows of the long tables, many a run: steps, memory, timeline, tensors, traffic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StepRow:
    """One step on one rank in one pass ("timed", "accounted" or "traced"). Warm-up steps are kept and marked."""

    rank: int
    mode: str
    step: int
    warmup: bool
    loss: float
    """Mean over the rank's micro-batches."""
    seconds: float | None
    """Without the drawing of its batch, as the phases that follow."""
    forward_s: float | None
    backward_s: float | None
    update_s: float | None
    grad_norm: float | None = None
    """Global 2-norm of the unscaled mean gradients before clipping, from the tensors themselves; in the accounted pass
    of every step, in the timed pass of the warm-up, in the traced pass of none; None for DeepSpeed."""
    loss_scale: float = 1.0
    """What the step's losses were multiplied by; 1 without loss scaling."""
    skipped: bool = False
    """The gradients overflowed, and no rank updated its parameters."""
    communication_s: float | None = None
    """Traced pass only, as the next: see RunRow."""
    exposed_s: float | None = None
    grad_squares: float | None = None
    """What this rank adds to grad_norm²: the sum of the squares of the gradients that it holds."""
    clip_norm: float | None = None
    """What clipping returned: the norm before, of the order that the key `clip_norm` says; None: no clipping."""


@dataclass
class MemoryRow:
    """One category in one phase on one rank, over all measured steps ("init": before the first step).

    `phase` "step" is the whole step. `at_peak_bytes`: the category's part at the phase's peak instant;
    `at_states_peak_bytes`: at the instant when the sum of the states is largest.
    `max_bytes`: its own maximum. `predicted_bytes`: what theory expects of `max_bytes`, where it says anything.
    The category "total" is the sum of all, "states" of the states. Each tier that holds anything has rows of its own.
    Of the whole step on the device: `allocations`, how often memory was asked for in a step, the most of any, what a
    backend takes for a moment included, so that gloo's differs from a simulated world's;
    `lasting`, those of them that outlived the phase they were made in, and so lay between what came and went later.

    Each phase has rows more, which are not the ledger's and have only `max_bytes`: "allocated", the allocator's own
    peak in the phase; "outside_ledger", that less the ledger's peak in the same memory: rounding, kernels, libraries
    (as a difference of two peaks it may be below zero). On CUDA also "reserved"; "fragmentation", the
    reserved peak less the allocated one; and at the phase's end "pinned", what the host's allocator holds, and
    "device_used", what is in use on the device, whoever uses it.
    """

    rank: int
    phase: str
    category: str
    at_peak_bytes: int | None
    at_states_peak_bytes: int | None
    max_bytes: int
    predicted_bytes: int | None = None
    tier: str = "device"
    allocations: int | None = None
    lasting: int | None = None


@dataclass
class TimelineRow:
    """Live bytes by category at one instant of the last measured step of the accounted pass, on one rank.

    Instants are thinned out to a few hundred; each stretch keeps the one where the sum is largest.
    `seconds` since the step began is the accounted pass's own time, which the instrument slows down.
    """

    rank: int
    instant: int
    """The number of the event among all of the step's."""
    seconds: float
    phase: str
    parameters_bytes: int
    gradients_bytes: int
    master_bytes: int
    optimizer_bytes: int
    communication_bytes: int
    activations_bytes: int
    inputs_bytes: int
    temporary_bytes: int
    host_bytes: int = 0
    """What lies in host memory; the ones before are the device's."""
    nvme_bytes: int = 0


@dataclass
class TensorRow:
    """One of the largest storages alive at the peak instant of the measured steps."""

    rank: int
    bytes: int
    category: str
    name: str
    module: str
    phase: str
    """The phase in which it was made."""
    tier: str = "device"


@dataclass
class TrafficRow:
    """Like operations of one measured step and phase, summed over `calls`. Units: probes/traffic.py."""

    rank: int
    step: int
    phase: str
    operator: str
    collective: str
    """The logical collective that the engine says they make up, or empty."""
    kind: str
    """What the volume is counted under, one of COLLECTIVES; for what moves between tiers one of LINKS, whose bytes are
    payload alone: they are no traffic between ranks."""
    unit: str
    dtype: str
    group_size: int
    calls: int
    elements: int
    payload_bytes: int
    wire_bytes: float
    volume_elements: float
    control: bool
    known: bool
    """False for an operator that the probe has no formula for: listed, not counted."""
    within_bytes: float = 0.0
    """The part of wire_bytes inside a node of `node_size` ranks."""
    between_bytes: float = 0.0
    """The part between nodes."""
