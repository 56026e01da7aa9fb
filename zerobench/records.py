"""Row types of the tables: columns, units, meaning. Bytes are integers, times are seconds.

A *run* is one launch of a cell; `measure.repeats` asks for several. Its folder holds run.json (one RunRow) and a
parquet file for each of the other tables, whose rows carry the run's id.
"""

from __future__ import annotations

from dataclasses import dataclass

SCHEMA_VERSION = 4

STATES = ("parameters", "gradients", "master", "optimizer", "communication")
"""Categories that make up the model states and what is in flight; the formulas bind their sum."""

CATEGORIES = (*STATES, "activations", "inputs", "temporary")

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "other")
"""What the volume is split into: logical collectives where the engine names them, physical ones elsewhere."""


@dataclass
class RunRow:
    """One row a run. What a failed run could not measure is None."""

    run_id: str
    cell_id: str
    """Hash of the config less what does not change a measurement."""
    repeat: int
    """Which launch of its cell this is, from 0."""
    status: str
    """ok, crash, oom, timeout, invalid or interrupted; `reason` says why it is not ok."""
    reason: str
    strategy: str
    model: str
    world_size: int
    device: str
    backend: str
    precision: str
    """The dtype of the model, and of gradients and traffic where they have another."""
    optimizer: str
    """Its name and implementation, and at what norm gradients are clipped, if they are."""
    micro_batch: int
    """Sequences on one rank in one forward."""
    accumulation: int
    """Micro-batches a step."""
    batch: int
    """Sequences a step over all ranks: micro_batch · accumulation · world_size."""
    sequence: int
    seed: int
    threads: int
    data: str
    text_hash: str | None
    config: str
    """The whole resolved config, JSON."""
    command: str
    commit: str | None
    source_hash: str
    """Of this package's code, and of the user's model where there is one."""
    torch_version: str
    device_class: str
    """cpu, or the GPU's model."""
    processor: str
    cores: int
    started: str
    """UTC, ISO 8601."""
    seconds: float
    """Wall time of all passes."""
    checkpointing: bool | None = None
    """Whether blocks recompute their activations; None where the model has no such choice."""
    ranks_per_gpu: int | None = None
    """CUDA only: ranks that share a GPU. Where they do, a step has no times: they take turns."""
    psi: int | None = None
    """Unique trainable parameters."""
    peak_bytes: int | None = None
    """Largest sum of live bytes at any instant of the measured steps, on the rank where it is largest."""
    peak_parameters_bytes: int | None = None
    """This and the following: the parts at that instant; they add up to peak_bytes."""
    peak_gradients_bytes: int | None = None
    peak_master_bytes: int | None = None
    peak_optimizer_bytes: int | None = None
    peak_communication_bytes: int | None = None
    peak_activations_bytes: int | None = None
    peak_inputs_bytes: int | None = None
    peak_temporary_bytes: int | None = None
    max_parameters_bytes: int | None = None
    """This and the following: each category's own maximum over the measured steps, over the ranks."""
    max_gradients_bytes: int | None = None
    max_master_bytes: int | None = None
    max_optimizer_bytes: int | None = None
    max_communication_bytes: int | None = None
    max_activations_bytes: int | None = None
    max_inputs_bytes: int | None = None
    max_temporary_bytes: int | None = None
    states_bytes: int | None = None
    """Maximum over time of the sum of the states (see STATES), on the rank where it is largest."""
    predicted_states_bytes: int | None = None
    floor_states_bytes: int | None = None
    """The paper's formula alone, without what is in flight."""
    resident_bytes: int | None = None
    """Peak resident set of a rank in the measured steps of the timed pass; another number than the ledger's."""
    allocated_bytes: int | None = None
    """CUDA only: the allocator's own peak, timed pass."""
    reserved_bytes: int | None = None
    """CUDA only: what the allocator held from the device at most, timed pass."""
    split_bytes: int | None = None
    """CUDA only: the most that lay free between live pieces of the allocator's blocks: fragmentation. Timed pass."""
    alloc_retries: int | None = None
    """CUDA only: how often the allocator gave cached blocks back to find room, timed pass."""
    device_used_bytes: int | None = None
    """CUDA only: in use on the device at the end of the timed pass, with the context, NCCL and every process on it."""
    volume_psi: float | None = None
    """Elements moved in one step over ψ, by the paper's convention, control traffic apart."""
    predicted_volume_psi: float | None = None
    volume_all_reduce_psi: float | None = None
    """This and the following: the parts of volume_psi by collective."""
    volume_reduce_scatter_psi: float | None = None
    volume_all_gather_psi: float | None = None
    volume_other_psi: float | None = None
    payload_bytes: int | None = None
    """Bytes of the logical tensors of one step's operations."""
    wire_bytes: int | None = None
    """Bytes that one rank sends in a step, mean over the group."""
    loopback_bytes: int | None = None
    """Bytes over the loopback interface in a step of the timed pass, over the ranks: what one really sends on gloo,
    headers included, and what else ran on the machine meanwhile. wire_bytes is what the ring optimum would send."""
    control_bytes: int | None = None
    """Payload of one step's flags, buffers and scalars, outside the volume."""
    step_s: float | None = None
    """Median step of the timed pass, the slowest rank of each step."""
    step_s_low: float | None = None
    step_s_high: float | None = None
    """95 % confidence interval of the median."""
    forward_s: float | None = None
    backward_s: float | None = None
    update_s: float | None = None
    tokens_per_s: float | None = None
    model_flops: int | None = None
    """Floating-point operations of one rank's matrix products in a step, none counted twice; see flops.py."""
    hardware_flops: int | None = None
    """The same with what is computed again."""
    mfu: float | None = None
    """Model FLOPs over what the device could do in a step's time; None where its peak is not known, and on a CPU."""
    hfu: float | None = None
    """The same of hardware FLOPs."""
    loss_first: float | None = None
    """Mean over the ranks and micro-batches, first step of all."""
    loss_last: float | None = None
    grad_norm_last: float | None = None
    """Global norm of the gradients before clipping, last step; None without clipping."""
    loss_scale_last: float | None = None
    """Loss scale of the last step; 1 without loss scaling."""
    skipped_steps: int | None = None
    """Steps, warm-up included, that were skipped because gradients overflowed, timed pass."""
    passes_agree: bool | None = None
    """The losses of the timed and the accounted pass are equal to the bit, on every rank and step."""
    schema_version: int = SCHEMA_VERSION


@dataclass
class StepRow:
    """One step on one rank in one pass ("timed" or "accounted"). Warm-up steps are kept and marked."""

    rank: int
    mode: str
    step: int
    warmup: bool
    loss: float
    """Mean over the rank's micro-batches."""
    seconds: float | None
    forward_s: float | None
    backward_s: float | None
    update_s: float | None
    grad_norm: float | None = None
    """Global norm of the unscaled gradients before clipping, of the order that `clip_norm` says; None: no clipping."""
    loss_scale: float = 1.0
    """What the step's losses were multiplied by; 1 without loss scaling."""
    skipped: bool = False
    """The gradients overflowed, and no rank updated its parameters."""


@dataclass
class MemoryRow:
    """One category in one phase on one rank, over all measured steps ("init": before the first step).

    `phase` "step" is the whole step. `at_peak_bytes`: the category's part at the phase's peak instant;
    `at_states_peak_bytes`: at the instant when the sum of the states is largest.
    `max_bytes`: its own maximum. `predicted_bytes`: what theory expects of `max_bytes`, where it says anything.
    The category "total" is the sum of all, "states" of the states.
    """

    rank: int
    phase: str
    category: str
    at_peak_bytes: int
    at_states_peak_bytes: int
    max_bytes: int
    predicted_bytes: int | None = None


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
    """What the volume is counted under, one of COLLECTIVES."""
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


@dataclass
class SearchRow:
    """What a search under a memory limit found for one strategy: the fastest run that fits, or that none does."""

    search_id: str
    strategy: str
    model: str
    world_size: int
    batch: int
    sequence: int
    device: str
    limit_bytes: int
    """Memory a rank may use at its peak."""
    status: str
    """found, or nothing_fits."""
    reason: str
    tried: int
    """Combinations that were run."""
    least_bytes: int | None
    """The smallest peak of all combinations."""
    run_ids: str
    """The runs of the fastest combination, separated by spaces."""
    micro_batch: int | None = None
    accumulation: int | None = None
    checkpointing: bool | None = None
    peak_bytes: int | None = None
    tokens_per_s: float | None = None
    tokens_per_s_low: float | None = None
    tokens_per_s_high: float | None = None
    precision: str = "fp32"
    optimizer: str = ""
    """As in RunRow."""
    schema_version: int = SCHEMA_VERSION
