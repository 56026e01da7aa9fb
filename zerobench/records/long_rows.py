"""Rows of the long tables, many per run: steps, memory, timeline, tensors, lines, traffic, and events. Each has the
run's id.

In `events`, one step event by event as each rank recorded it:

storage     a tensor's memory, or a file's bytes, numbered per rank
operation   one collective that the engine requests, numbered per rank: each physical operation of it is a `launch`,
            and the first `wait` that returns ends it
live        the storages at the step's begin; after each birth, free and label the sums equal the ledger's
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StepRow:
    """One step on one rank in one pass. Warm-up steps are kept and marked."""

    rank: int
    """The rank that measured it, from 0."""
    mode: str
    """The pass: timed, accounted or traced."""
    step: int
    """Number of the step, warm-up included, from 0."""
    warmup: bool
    """True for a step before the measured ones."""
    loss: float
    """Mean over the rank's micro-batches."""
    seconds: float | None
    """Time of the step without the drawing of its batch, as the phases that follow."""
    forward_s: float | None
    """Time of its forwards."""
    backward_s: float | None
    """Time of its backwards."""
    update_s: float | None
    """Time of its update."""
    grad_norm: float | None = None
    """Global 2-norm of the unscaled mean gradients before clipping, from the tensors themselves; in the accounted pass
    of every step, in the timed pass of the warm-up, in the traced pass of none; None for DeepSpeed."""
    loss_scale: float = 1.0
    """Factor that the step's losses were multiplied by; 1 without loss scaling."""
    skipped: bool = False
    """True if gradients overflowed, and no rank updated its parameters."""
    communication_s: float | None = None
    """Traced pass only: time in which a collective is in flight or running."""
    exposed_s: float | None = None
    """Traced pass only: the part of communication_s in which nothing is computed."""
    grad_squares: float | None = None
    """Part of this rank in grad_norm²: the sum of the squares of the gradients that it holds."""
    clip_norm: float | None = None
    """Norm before clipping, of the order that the key `clip_norm` says, as clipping returned it; None: no clipping."""
    save_s: float | None = None
    """Timed pass: time for which a save of a checkpoint at its end held the loop, a part of `seconds`; None without."""
    save_done_s: float | None = None
    """Timed pass: time from the beginning of that save until the checkpoint was complete."""
    save_in_flight: bool = False
    """Timed pass: True if a checkpoint was copied or written during the step."""


@dataclass
class MemoryRow:
    """One category in one phase on one rank, over all measured steps.

    The category "total" is the sum of all, "states" of the states. Each tier that holds anything has rows of its own.

    Each phase has rows more, which are not the ledger's and have only `max_bytes`: "allocated", the allocator's own
    peak in the phase; "outside_ledger", that less the ledger's peak in the same memory: rounding, kernels, libraries
    (as a difference of two peaks it may be below zero). On CUDA also "reserved"; "fragmentation", the
    reserved peak less the allocated one; and at the phase's end "pinned", what the host's allocator holds, and
    "device_used", what is in use on the device by all of its processes.
    """

    rank: int
    """The rank that measured it, from 0."""
    phase: str
    """init (before the first step), forward, backward, update, save (with `measure.save`), between (the instants at
    which steps end), or step: the whole step; data: the rest of a step, in which the batch is drawn and between the
    other phases, so that a forward's activations are in it, too."""
    category: str
    """A category of the ledger, total, states, or a figure of the allocator."""
    at_peak_bytes: int | None
    """The category's part at the phase's peak instant."""
    at_states_peak_bytes: int | None
    """The category's part at the instant when the sum of the states is largest."""
    max_bytes: int
    """The category's own maximum in the phase."""
    predicted_bytes: int | None = None
    """max_bytes as the theory has it; None if it says nothing."""
    tier: str = "device"
    """device, host or nvme."""
    allocations: int | None = None
    """Allocations on the device in a step, at most; with short-lived ones of the backend, so that gloo differs from a
    simulated world."""
    lasting: int | None = None
    """The part of `allocations` that outlived their phase, and so lay between later short-lived ones."""


@dataclass
class TimelineRow:
    """Live bytes by category at one instant of the last measured step of the accounted pass, on one rank.

    Instants are thinned out to a few hundred; each stretch keeps the one where the sum is largest.
    """

    rank: int
    """The rank that measured it, from 0."""
    instant: int
    """Number of the event among all of the step's."""
    seconds: float
    """Time since the step began, in the accounted pass, which the instrument slows down."""
    phase: str
    """forward, backward or update."""
    parameters_bytes: int
    """Parameters on the device, as the following categories are."""
    gradients_bytes: int
    """Gradients."""
    master_bytes: int
    """fp32 master weights."""
    optimizer_bytes: int
    """Optimizer states."""
    communication_bytes: int
    """Communication buffers."""
    activations_bytes: int
    """Activations."""
    inputs_bytes: int
    """Batches and the model's buffers."""
    temporary_bytes: int
    """All else."""
    host_bytes: int = 0
    """All categories in host memory."""
    nvme_bytes: int = 0
    """All categories in files."""


@dataclass
class TensorRow:
    """One of the largest storages alive at the peak instant of the measured steps."""

    rank: int
    """The rank that measured it, from 0."""
    bytes: int
    """Size of the storage."""
    category: str
    """Its category in the ledger."""
    name: str
    """Its label: a parameter's name, a unit, or the operator that made it."""
    module: str
    """The module that ran when it was made, or the thread."""
    phase: str
    """The phase in which it was made."""
    tier: str = "device"
    """device, host or nvme."""
    source: str = ""
    """The line that made it, "train.py:12 in step", or "backward of" the line whose gradient made it; empty if no
    line of Python did."""
    shape: str = ""
    """Shape of the first tensor that used this storage, "4x1024x768"."""


@dataclass
class LineRow:
    """Storages on the device that one line of code made, in one module and category, on one rank.

    Without a module a row has the storages of one label.

    All rows "peak" of a rank add up to its peak, "growth" to its growth_bytes, "states" (of a world of fake tensors
    alone) to its states_bytes.
    """

    rank: int
    """The rank that measured it, from 0."""
    at: str
    """peak: live bytes at the peak instant of the measured steps; growth: bytes that live after these steps and did not
    before, minus bytes that lived before and do not after; states: the states when their sum is largest."""
    category: str
    """Their category in the ledger."""
    module: str
    """The module that ran when they were made, or the thread."""
    source: str
    """The line that made them, as in the table of tensors."""
    bytes: int
    """Sum of their sizes."""
    storages: int
    """Number of storages."""
    name: str = ""
    """Label of the largest of them."""
    shape: str = ""
    """Sizes of the largest of them, as in the table of tensors."""
    kept_by: str = ""
    """growth: the list, dict or attribute that keeps the largest of them alive, and the line that adds to it, as far as
    Python's garbage collector can tell."""


@dataclass
class TrafficRow:
    """Like operations of one measured step and phase, summed over `calls`; units as probes of traffic count them."""

    rank: int
    """The rank that issued them, from 0."""
    step: int
    """Number of the measured step, from 0."""
    phase: str
    """forward, backward or update."""
    operator: str
    """The c10d operator, or a copy between tiers."""
    collective: str
    """The logical collective that the engine says they make up, or empty."""
    kind: str
    """Kind under which the volume is counted: all_reduce, reduce_scatter, all_gather or other; for bytes between tiers
    down, up, read or write, which are payload alone: they are no traffic between ranks."""
    unit: str
    """The engine's unit that they belong to, or empty."""
    dtype: str
    """dtype of the elements that were sent."""
    group_size: int
    """Ranks of the process group."""
    calls: int
    """Number of operations."""
    elements: int
    """Elements of the logical tensors."""
    payload_bytes: int
    """elements × element size."""
    wire_bytes: float
    """Bytes that one rank sends by the ring optimum, mean over the group."""
    volume_elements: float
    """Elements by the paper's convention: an all-reduce counts 2, reduce-scatter and all-gather 1."""
    control: bool
    """True for flags, scalars, buffers and start-up, which are outside the volume."""
    known: bool
    """False for an operator that the probe has no formula for: listed, not counted."""
    within_bytes: float = 0.0
    """The part of wire_bytes inside a node of `node_size` ranks."""
    between_bytes: float = 0.0
    """The part of wire_bytes between nodes."""
    group: str = ""
    """Name of the process group in torch.distributed; empty for transfers between tiers."""
    axis: str = "data"
    """tensor for traffic among the ranks that share one model (tensor_parallel), which is outside of the volume; data
    for all else."""


@dataclass
class CertificateRow:
    """One check of a watched loop with `verify`: the finding, the expectation and its reason, and the verdict."""

    check: str
    """dtypes, update, finite, accumulation, partition, data, norm, scaling, reference or knob."""
    subject: str
    """What is checked: a property of the loop, and the parameters or collectives that have it."""
    found: str
    """The value in this loop."""
    expected: str
    """The expected value; empty if nothing is expected."""
    why: str
    """Why this is expected, or why it cannot be told; with the bound, if the check has one."""
    verdict: str
    """same, different, unusual or cannot be told."""
    source: str = ""
    """The line that made the tensors, if they were made while the loop was watched."""


LIVE, BIRTH, FREE, LABEL = "live", "birth", "free", "label"
LAUNCH, WAIT, MOVE = "launch", "wait", "move"
LATE = "late"
"""Operator of an `order` event: a wait for the previous step's collective of the named unit."""
MODULE, MODULE_END, UNIT_GATHERED, UNIT_FREED = "module", "module_end", "unit_gathered", "unit_freed"
UPDATE, PHASE, COMPUTE, ORDER = "update", "phase", "compute", "order"

OF_STORAGES = (LIVE, BIRTH, FREE, LABEL)
"""Kinds that change the sums of live bytes."""

EVENTS = (
    *OF_STORAGES, LAUNCH, WAIT, MOVE, MODULE, MODULE_END, UNIT_GATHERED, UNIT_FREED, UPDATE, PHASE, COMPUTE, ORDER,
)  # fmt: skip
"""Kinds of events."""


@dataclass
class EventRow:
    """One event of the last measured step of the accounted pass on one rank, where measure.events=true asks for it.

    Replayed in order, the storages' events give the live bytes of every tier and category after each event: their
    largest sums are those of the table of memory, to the byte. Bytes of the step's launches add up to its traffic.
    The harness's own work within a step (its reading of gradients) is in no row; what it leaves behind is born, or
    freed, where the next phase begins.
    """

    rank: int
    """The rank that recorded it, from 0."""
    index: int
    """Number of the event on its rank, from 0."""
    seconds: float
    """Time since the step began, in the accounted pass, which the instrument slows down."""
    phase: str
    """data, forward, backward or update."""
    kind: str
    """live (lives as the step begins); birth, free (a storage gets memory, or gives it back); label (its category
    changes); launch, wait (a collective is issued, has been waited for); move (bytes go to another tier); module,
    module_end (a module's forward or backward begins, its forward ends); unit_gathered, unit_freed (a unit's full
    parameters are there, are given back); update (a shard is about to be updated); phase (a phase begins); compute (an
    operator runs), order (an event is recorded in a stream, a stream waits, or, late, a collective of the step before
    has been waited for): in predictions of time alone."""
    micro_batch: int
    """Number of the step's micro-batch, from 0; of the update the last."""
    storage: int | None = None
    """Number of the storage on its rank; None for an event without one."""
    operation: int | None = None
    """Number of the collective on its rank, which pairs its launches and its wait; None for other events."""
    bytes: int = 0
    """live, label: size of the storage. birth, free: bytes that it gained, or gave back. launch: elements × element
    size of the logical tensors. move: bytes that moved. update: the part of the unit's parameters that is here."""
    category: str = ""
    """The storage's category in the ledger from this event on."""
    previous: str = ""
    """label: its category before."""
    name: str = ""
    """The storage's label, the phase, or the path of the module in the model."""
    unit: str = ""
    """The engine's unit that it belongs to, or empty."""
    module: str = ""
    """The module that ran, or the thread; of a storage the one that ran when it was made."""
    source: str = ""
    """The line that did it, "train.py:12 in step"; of a live storage, and of a label, the line that made it; empty
    if no line of Python did."""
    tier: str = ""
    """The tier of the storage, or the destination of a move: device, host or nvme."""
    collective: str = ""
    """The logical collective of a launch, or its kind if no engine names it; for a move: down, up, read or write."""
    operator: str = ""
    """The c10d operator of a launch, of a move copy_, read or write; of a module forward or backward."""
    dtype: str = ""
    """dtype of the elements that are sent or moved."""
    group_size: int = 0
    """Ranks of the process group of a launch."""
    group: str = ""
    """Name of that process group in torch.distributed."""
    calls: int = 0
    """Operations that a launch represents: more than one if one send of a simulated world represents several."""
    elements: int = 0
    """Elements of a launch's or a move's tensors."""
    wire_bytes: float = 0.0
    """Bytes that one rank sends for a launch, by the ring optimum, as in the table of traffic."""
    between_bytes: float = 0.0
    """The part of wire_bytes that goes between nodes."""
    stride: int = 0
    """Least distance between two ranks of that process group: 1 if they are neighbors."""
    flops: int = 0
    """Floating-point operations of a compute event."""
    sizes: str = ""
    """Shape of a compute event: "bxmxnxk" for a matrix product, "bxheadsxqueriesxkeysxhead" for an attention."""
    stream: int = 0
    """Number of the stream of a compute event, a launch, a wait; 0 is the one that the model runs on."""
    control: bool = False
    """True for a launch of flags, scalars or buffers, which is outside of the volume."""
