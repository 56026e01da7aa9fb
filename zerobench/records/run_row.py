"""Rows that stand for a run or a search: the columns of `runs` and `searches`."""

from __future__ import annotations

from dataclasses import dataclass

from .names import SCHEMA_VERSION


@dataclass
class RunRow:
    """One row a run. What a failed run could not measure is None."""

    run_id: str
    cell_id: str
    """Hash of the config less what does not change a measurement."""
    repeat: int
    """Which launch of its cell this is, from 0."""
    status: str
    """ok, diverged (a loss is not finite), crash, oom, timeout, invalid or interrupted; `reason` says why not ok."""
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
    systems: str | None = None
    """Tiers, codecs, groups and residual policies beside the strategy, as on a command line; empty: all as usual."""
    alloc_conf: str | None = None
    """CUDA only: how torch's allocator was told to work, by PYTORCH_ALLOC_CONF or its older name."""
    ranks_per_gpu: int | None = None
    """CUDA only: ranks that share a GPU. Where they do, a step has no times: they take turns."""
    psi: int | None = None
    """Unique trainable parameters."""
    bucket_bytes: int | None = None
    """What a bucket holds at most, as a number also where the config says auto; None where there are no buckets."""
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
    predicted_activations_bytes: int | None = None
    """Of max_activations_bytes: what the model needs without an engine; None where that cannot be foretold."""
    states_bytes: int | None = None
    """Maximum over time of the sum of the states (see STATES), on the rank where it is largest."""
    predicted_states_bytes: int | None = None
    floor_states_bytes: int | None = None
    """The paper's formula alone, without what is in flight."""
    host_peak_bytes: int | None = None
    """Largest sum of live bytes in host memory at any instant of the measured steps, on the rank where it is largest;
    the ones before are the device's. On a machine without a GPU both are one memory, told apart by the engine's labels.
    """
    host_peak_all_bytes: int | None = None
    """The sum of such peaks over the ranks of a node, of the fullest node: what a host needs at most, for its ranks'
    peaks need not be at one instant. A node is `node_size` ranks, without that key all ranks of a machine."""
    host_states_bytes: int | None = None
    predicted_host_states_bytes: int | None = None
    nvme_bytes: int | None = None
    """The same in files, over the ranks: the largest rank's peak."""
    predicted_nvme_bytes: int | None = None
    down_bytes: int | None = None
    """This and the following: bytes of one step, over all ranks, from devices to host memory."""
    up_bytes: int | None = None
    """From host memory to devices."""
    read_bytes: int | None = None
    """From files to host memory."""
    write_bytes: int | None = None
    """From host memory to files."""
    predicted_down_bytes: int | None = None
    """This and the following: theory's, None where it says nothing."""
    predicted_up_bytes: int | None = None
    predicted_read_bytes: int | None = None
    predicted_write_bytes: int | None = None
    resident_bytes: int | None = None
    """Peak resident set of a rank in the measured steps of the timed pass; another number than the ledger's."""
    allocated_bytes: int | None = None
    """This and the following are CUDA's, of the measured steps of the timed pass, or of the accounted pass where there
    is no timed one: the allocator's own peak."""
    reserved_bytes: int | None = None
    """What the allocator held from the device at most."""
    fragmentation_bytes: int | None = None
    """reserved_bytes less allocated_bytes of the same rank: held from the device beyond the most that was in use. It is
    what lay idle at the allocated peak, or more where the allocator gave segments back or took some after it."""
    largest_free_block_bytes: int | None = None
    """The largest piece of a segment that nobody uses at the end: the most to be had without asking the device."""
    split_bytes: int | None = None
    """The most that lay free between live pieces of the allocator's segments."""
    alloc_retries: int | None = None
    """How often the allocator gave cached segments back to find room, since the process began."""
    device_used_bytes: int | None = None
    """In use on the device at the end of the pass, with the context, NCCL and every process on it."""
    pinned_requested_bytes: int | None = None
    """Peak of pinned host memory in the hands of callers, or freed with the device not done with it. The allocator
    counts its blocks, each a power of two as a rule; of its sizes' own peaks this is the sum."""
    pinned_bytes: int | None = None
    """Peak of pinned host memory that the allocator held, handed out or kept for later."""
    allocator_peak_bytes: int | None = None
    """The allocator's own total at its peak in the measured steps of the accounted pass, on the rank where it is
    largest: the figure to compare with other systems by. Of a CPU's allocator with what the host tier holds."""
    timed_allocator_peak_bytes: int | None = None
    """allocator_peak_bytes of the timed pass, in which nothing delays what other threads free."""
    allocator_witness: str | None = None
    """What told of the allocator's total: hook, profiler, cuda or none (probes/allocator_total.py)."""
    kept_bytes: int | None = None
    """Bytes on the device that lived through a whole measured step though they are called activations or temporary."""
    heap_bytes: int | None = None
    """Memory that is not torch's: what malloc has handed out beyond torch's allocator at the end of a measured step of
    the accounted pass, less the same before the model was built. numpy's arrays, C libraries'; some KiB of Python's."""
    outside_ledger_bytes: int | None = None
    """Accounted pass: the allocator's peak in a step less the ledger's in the same memory: what kernels, libraries and
    their threads take, on CUDA the allocator's rounding. Of several ranks the most."""
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
    predicted_wire_bytes: int | None = None
    within_nodes_bytes: int | None = None
    """The part of wire_bytes that stays in a node of `node_size` ranks; None without that key, as the next three."""
    between_nodes_bytes: int | None = None
    """The part that goes from a node to another."""
    predicted_within_nodes_bytes: int | None = None
    predicted_between_nodes_bytes: int | None = None
    quantized_gather_share: float | None = None
    """The share of ψ whose gathers, if not all of them, travelled as bytes of a code, as the traffic meter saw them."""
    quantized_reduction_share: float | None = None
    """The same of reductions."""
    loopback_bytes: int | None = None
    """Bytes over the loopback interface in a step of the timed pass, over the ranks: what one really sends on gloo,
    headers included, and what else ran on the machine meanwhile. wire_bytes is what the ring optimum would send."""
    predicted_loopback_bytes: int | None = None
    """What gloo sends for the operators that were seen, control traffic included, headers apart: wire_bytes, but for a
    reduce-scatter, which it carries as an all-reduce and so sends twice."""
    control_bytes: int | None = None
    """Payload of one step's flags, buffers and scalars, outside the volume."""
    predicted_control_bytes: int | None = None
    step_s: float | None = None
    """Median step of the timed pass, the slowest rank of each step; without the drawing of batches, and without
    garbage collection, which comes between steps."""
    step_s_low: float | None = None
    step_s_high: float | None = None
    """95 % confidence interval of the median."""
    forward_s: float | None = None
    backward_s: float | None = None
    update_s: float | None = None
    wall_s: float | None = None
    """From the begin of the first measured step to the end of the last, with what comes between; the slowest rank's."""
    tokens_per_s: float | None = None
    """Of all measured steps, over wall_s."""
    sm_clock_mhz: int | None = None
    """This and the following are the GPU's, read right before and right after the measured steps of the timed pass, in
    which nothing is read: the lowest SM clock of both readings and all ranks."""
    sm_clock_max_mhz: int | None = None
    """The highest SM clock that the GPU has; of several GPUs the lowest."""
    gpu_temperature_c: int | None = None
    """The higher of both readings, degrees Celsius; of several GPUs the highest."""
    gpu_power_w: float | None = None
    """The higher of both readings; of several GPUs the highest."""
    throttle: str | None = None
    """What held clocks down, of both readings and all ranks; empty where nothing did, None where nobody knows."""
    traced_step_s: float | None = None
    """This and the following are of the traced pass, which the profiler slows down: medians over the steps of the rank
    whose median step is longest; what counts is said in probes/trace.py. The step itself."""
    communication_s: float | None = None
    """Time of a step in which a collective is in flight or running."""
    exposed_s: float | None = None
    """The part of it in which nothing is computed."""
    overlap: float | None = None
    """1 - exposed_s / communication_s: the share of communication behind which something is computed."""
    model_flops: int | None = None
    """Floating-point operations of one rank's matrix products in a step, none counted twice; see predict/flops.py."""
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
    """Global 2-norm of the unscaled mean gradients before clipping, last step of the accounted pass."""
    loss_scale_last: float | None = None
    """Loss scale of the last step; 1 without loss scaling."""
    skipped_steps: int | None = None
    """Steps, warm-up included, that were skipped because gradients overflowed, timed pass."""
    passes_agree: bool | None = None
    """The losses of all passes are equal to the bit, on every rank and step; None where there is one pass."""
    unexplained: str | None = None
    """What of the accounted pass no prediction explains, in sentences (residuals.py); empty where there is nothing."""
    training: str | None = None
    """Against a DDP run of the same training (parity.py): equal, close, differs, reference for DDP itself, unchecked;
    None where it was not asked for, and in a simulated world, which trains nothing."""
    training_words: str | None = None
    """The same as a sentence: over how many steps, what differed first, or why nothing was compared."""
    loss_deviation: float | None = None
    """Largest |loss − DDP's| over DDP's, of any rank and step compared."""
    grad_norm_deviation: float | None = None
    """The same of gradient norms."""
    schema_version: int = SCHEMA_VERSION


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
