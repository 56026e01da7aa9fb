"""Row of the table `events`: one step, event by event, as each rank recorded it.

storage     a tensor's memory, or a file's bytes, numbered per rank
operation   one collective that the engine requests, numbered per rank: each physical operation of it is a `launch`,
            and the first `wait` that returns ends it
live        the storages at the step's begin; after each birth, free and label the sums equal the ledger's
"""

from __future__ import annotations

from dataclasses import dataclass

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
