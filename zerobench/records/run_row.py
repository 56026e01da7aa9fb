"""The row per run, and the row per search under a memory limit. Each class adds columns to the one before it:

RunSetting    the identity of a run, its setting, and where it comes from
RunMemory     memory by category and tier, from the ledger of the accounted pass
RunAllocator  memory by the allocator, the system and CUDA, in no sum with the ledger
RunTraffic    traffic between ranks in one step
RunTimes      times, arithmetic and the state of the GPU
RunRow        how the run ended
"""

from __future__ import annotations

from dataclasses import dataclass

SCHEMA_VERSION = 10

STATES = ("parameters", "gradients", "master", "optimizer", "communication")
"""Categories of the model states, including buffers in flight; the formulas predict their sum."""

CATEGORIES = (*STATES, "activations", "inputs", "temporary")
"""The ledger's categories: the parts of a total."""

ALLOCATOR = ("allocated", "reserved", "outside_ledger", "fragmentation", "pinned", "device_used")
"""The allocator's figures for a phase, next to the ledger's categories in the memory table and in no total; on a CPU
only the first and outside_ledger.
"""

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "other")
"""Parts of the volume: logical collectives if the engine names them, else physical ones."""

BETWEEN = "between"
"""The instants at which measured steps end; storages alive then live between steps."""

PHASES = ("init", "data", "forward", "backward", "update", "save", BETWEEN, "step")
"""Phases in order: init before the first step, then the phases of a step, its end, and the step as a whole."""

BETWEEN_STEPS = tuple(f"between_steps_{category}_bytes" for category in CATEGORIES)
"""Columns of runs for bytes that live between steps."""

PHASE_PEAKS = tuple(f"{phase}_peak_bytes" for phase in ("forward", "backward", "update"))
"""Columns of runs for the peak of each phase."""

TIERS = ("device", "host", "nvme")
"""Where bytes are stored. Figures are for the device unless a tier is named."""

LINKS = ("down", "up", "read", "write")
"""Kinds of traffic between tiers: from the device to host memory and back, and from and to files."""

DATA_AXIS, TENSOR_AXIS = "data", "tensor"
"""Axes of the mesh of ranks: ranks that train on different data, and ranks that share one model."""


@dataclass
class RunSetting:
    """The first columns of a row per run. Every run has them, also one that failed."""

    run_id: str
    """Name of the run's folder; the other tables refer to it."""
    cell_id: str
    """Hash of the config without keys that do not change a measurement."""
    repeat: int
    """Number of this launch among those of its cell, from 0."""
    status: str
    """ok, diverged (a loss is not finite), crash, oom, timeout or interrupted, and invalid for a refused cell, which is
    a row of its sweep but no run in a results folder; `reason` says why not ok.
    """
    reason: str
    """A sentence on why the run is not ok; empty if it is."""
    strategy: str
    """The key `strategy`: ddp, a ZeRO stage, a peer, or one that a user has registered."""
    model: str
    """The key `model`: a choice of the group, or a model that a user has registered."""
    world_size: int
    """Ranks N of the run."""
    device: str
    """cpu or cuda."""
    backend: str
    """gloo, nccl, or simulated: one rank of N alone."""
    precision: str
    """The dtype of the model, and the dtypes of gradients and traffic if they differ."""
    optimizer: str
    """Its name and implementation, and the norm at which gradients are clipped, if they are."""
    micro_batch: int
    """Samples on one rank in one forward: sequences, images."""
    accumulation: int
    """Micro-batches per step."""
    batch: int
    """Samples per step over all ranks: micro_batch · accumulation · world_size / tensor_parallel."""
    sequence: int
    """Tokens in a sequence; 1 if samples have no length."""
    seed: int
    """Seed of the initial weights and of the order of data."""
    threads: int
    """Threads of each rank."""
    data: str
    """The key `data`: text, synthetic, or data that a user has registered."""
    text_hash: str | None
    """Hash of the text file that the run has read; None for other data."""
    config: str
    """The whole resolved config, JSON."""
    command: str
    """The command line that made the run."""
    commit: str | None
    """git commit of the checkout; None outside of one. provenance.json says whether it had changes."""
    source_hash: str
    """Hash of this package's code, and of the user's model if there is one."""
    torch_version: str
    """Version of torch."""
    device_class: str
    """cpu, or the GPU's model."""
    processor: str
    """Name of the CPU."""
    cores: int
    """CPU cores that the run could use."""
    started: str
    """UTC, ISO 8601."""
    seconds: float
    """Wall time of all passes."""
    checkpointing: bool | None = None
    """True if blocks recompute their activations; None if the model has no such choice."""
    systems: str | None = None
    """Tiers, codecs, groups and residual policies besides the strategy, as on a command line; empty: the defaults."""
    alloc_conf: str | None = None
    """CUDA only: the settings of torch's allocator, from PYTORCH_ALLOC_CONF or its older name."""
    ranks_per_gpu: int | None = None
    """CUDA only: ranks that share a GPU. If several do, a step has no times: they take turns."""
    launcher: str | None = None
    """The sweep's launcher: local, ours, or the Hydra plugin whose job has run the cell, such as submitit_slurm."""
    psi: int | None = None
    """Unique trainable parameters, ψ."""
    bucket_bytes: int | None = None
    """Capacity of a bucket, a number also if the config has auto; None if there are no buckets."""


@dataclass
class RunMemory(RunSetting):
    """Bytes on the rank where they are largest, in the measured steps; what could not be measured is None."""

    peak_bytes: int | None = None
    """Largest sum of live bytes at any instant of the measured steps, on the rank where it is largest."""
    peaks_of_ranks: str | None = None
    """The same of every measured rank, in bytes, JSON: {"0": 36245504, "1": 36241408}."""
    peak_parameters_bytes: int | None = None
    """Parameters at the instant of peak_bytes; the eight parts add up to it."""
    peak_gradients_bytes: int | None = None
    """Gradients at the instant of peak_bytes."""
    peak_master_bytes: int | None = None
    """fp32 master weights at the instant of peak_bytes."""
    peak_optimizer_bytes: int | None = None
    """Optimizer states at the instant of peak_bytes."""
    peak_communication_bytes: int | None = None
    """Communication buffers at the instant of peak_bytes."""
    peak_activations_bytes: int | None = None
    """Activations at the instant of peak_bytes."""
    peak_inputs_bytes: int | None = None
    """Batches and the model's buffers at the instant of peak_bytes."""
    peak_temporary_bytes: int | None = None
    """All else at the instant of peak_bytes: results that nothing keeps, scratch."""
    max_parameters_bytes: int | None = None
    """Parameters at their own maximum over the measured steps and the ranks."""
    max_gradients_bytes: int | None = None
    """Gradients at their own maximum."""
    max_master_bytes: int | None = None
    """fp32 master weights at their own maximum."""
    max_optimizer_bytes: int | None = None
    """Optimizer states at their own maximum."""
    max_communication_bytes: int | None = None
    """Communication buffers at their own maximum."""
    max_activations_bytes: int | None = None
    """Activations at their own maximum."""
    max_inputs_bytes: int | None = None
    """Batches and the model's buffers at their own maximum."""
    max_temporary_bytes: int | None = None
    """All else at its own maximum."""
    between_steps_parameters_bytes: int | None = None
    """Parameters that live when a measured step ends, at most over the steps and the ranks."""
    between_steps_gradients_bytes: int | None = None
    """Gradients that live when a measured step ends."""
    between_steps_master_bytes: int | None = None
    """fp32 master weights that live when a measured step ends."""
    between_steps_optimizer_bytes: int | None = None
    """Optimizer states that live when a measured step ends."""
    between_steps_communication_bytes: int | None = None
    """Communication buffers that live when a measured step ends."""
    between_steps_activations_bytes: int | None = None
    """Activations that live when a measured step ends: the loss, and outputs that a module keeps."""
    between_steps_inputs_bytes: int | None = None
    """Batches and the model's buffers that live when a measured step ends."""
    between_steps_temporary_bytes: int | None = None
    """All else that lives when a measured step ends."""
    forward_peak_bytes: int | None = None
    """Largest sum of live bytes at any instant of the measured steps' forwards, on the rank where it is largest."""
    backward_peak_bytes: int | None = None
    """Largest sum of live bytes in their backwards."""
    update_peak_bytes: int | None = None
    """Largest sum of live bytes in their updates."""
    save_peak_bytes: int | None = None
    """Largest sum of live bytes while a checkpoint is copied or, if blocking, written; None without `measure.save`."""
    predicted_activations_bytes: int | None = None
    """The part of max_activations_bytes that the model needs without an engine; None if it cannot be predicted."""
    growth_bytes: int | None = None
    """Live bytes on the device after the measured steps minus live bytes before them, on the rank where it is largest;
    the table of lines names the lines that grew. In a loop without leaks it is 0."""
    states_bytes: int | None = None
    """Maximum over time of the sum of parameters, gradients, masters, optimizer states and communication, on the rank
    where it is largest."""
    predicted_states_bytes: int | None = None
    """states_bytes as the theory has it, buffers in flight included."""
    floor_states_bytes: int | None = None
    """The paper's formula alone, without buffers in flight."""
    formulas: str | None = None
    """The formulas of the states' categories, of their sum and of the volume, JSON: for each its equation, its value in
    bytes or elements, the numbers in it, and the terms that may be in flight in addition."""
    host_peak_bytes: int | None = None
    """Largest sum of live bytes in host memory at any instant of the measured steps, on the rank where it is largest;
    the columns before are the device's. On a machine without a GPU both are one memory; the engine's labels
    distinguish them."""
    host_peak_all_bytes: int | None = None
    """The sum of these peaks over the ranks of a node, largest node: an upper bound of a host's need, for its ranks'
    peaks need not coincide. A node is `node_size` ranks, without that key all ranks of a machine."""
    host_states_bytes: int | None = None
    """states_bytes in host memory."""
    predicted_host_states_bytes: int | None = None
    nvme_bytes: int | None = None
    """Bytes in files at their peak, on the rank where it is largest."""
    predicted_nvme_bytes: int | None = None
    down_bytes: int | None = None
    """Bytes of one step from devices to host memory, over all ranks."""
    up_bytes: int | None = None
    """Bytes of one step from host memory to devices, over all ranks."""
    read_bytes: int | None = None
    """Bytes of one step from files to host memory, over all ranks."""
    write_bytes: int | None = None
    """Bytes of one step from host memory to files, over all ranks."""
    predicted_down_bytes: int | None = None
    """down_bytes as the theory has it; None if it says nothing."""
    predicted_up_bytes: int | None = None
    predicted_read_bytes: int | None = None
    predicted_write_bytes: int | None = None


@dataclass
class RunAllocator(RunMemory):
    """Totals that know no categories. Those of CUDA are of the timed pass, or of the accounted one where there is no
    timed pass.
    """

    resident_bytes: int | None = None
    """Peak resident set of a rank in the measured steps of the timed pass, as the system counts it."""
    allocated_bytes: int | None = None
    """CUDA: peak of the bytes that the allocator has handed out, in the measured steps."""
    reserved_bytes: int | None = None
    """CUDA: peak of the bytes that the allocator has reserved on the device."""
    fragmentation_bytes: int | None = None
    """CUDA: reserved_bytes minus allocated_bytes of the same rank: reserved on the device beyond the largest use. It is
    the idle part at the allocated peak, or more if the allocator released or reserved segments after it."""
    largest_free_block_bytes: int | None = None
    """CUDA: the largest unused piece of a segment at the end: the largest allocation without a new segment."""
    split_bytes: int | None = None
    """CUDA: the largest sum of free pieces between live ones in the allocator's segments."""
    alloc_retries: int | None = None
    """CUDA: how often the allocator gave cached segments back to find room, since the process began."""
    device_used_bytes: int | None = None
    """CUDA: in use on the device at the end of the pass, with the context, NCCL and every process on it."""
    pinned_requested_bytes: int | None = None
    """CUDA: peak of pinned host memory in the hands of callers, or freed with the device not done with it. The
    allocator counts its blocks, each a power of two as a rule; of its sizes' own peaks this is the sum. None before
    torch 2.13: earlier versions count freed memory too."""
    pinned_bytes: int | None = None
    """CUDA: peak of pinned host memory that the allocator held, handed out or kept for later."""
    allocator_peak_bytes: int | None = None
    """The allocator's own total at its peak in the measured steps of the accounted pass, on the rank where it is
    largest: the figure for comparisons with other systems. On a CPU it includes the host tier."""
    timed_allocator_peak_bytes: int | None = None
    """allocator_peak_bytes of the timed pass, in which nothing delays what other threads free."""
    allocator_witness: str | None = None
    """Source of the allocator's total: hook, profiler, cuda or none."""
    kept_bytes: int | None = None
    """Bytes on the device that lived through a whole measured step though they are called activations or temporary."""
    outside_ledger_bytes: int | None = None
    """The allocator's peak in a step of the accounted pass minus the ledger's in the same memory: memory of kernels,
    libraries and their threads, on CUDA the allocator's rounding. Of several ranks the one furthest from 0; a value
    far below 0 means that the ledger missed a free."""


@dataclass
class RunTraffic(RunAllocator):
    """Volumes in elements over ψ, by the paper's convention; bytes by operator, by formula and as they were sent."""

    volume_psi: float | None = None
    """Elements moved in one step over ψ, by the paper's convention (an all-reduce 2), mean over the ranks, control
    traffic apart."""
    predicted_volume_psi: float | None = None
    volume_all_reduce_psi: float | None = None
    """The part of volume_psi by all-reduce."""
    volume_reduce_scatter_psi: float | None = None
    """The part of volume_psi by reduce-scatter."""
    volume_all_gather_psi: float | None = None
    """The part of volume_psi by all-gather."""
    volume_other_psi: float | None = None
    """The part of volume_psi by other collectives: broadcast, reduce, sends without a label."""
    payload_bytes: int | None = None
    """Bytes of the logical tensors of one step's operations."""
    wire_bytes: int | None = None
    """Bytes that one rank sends in a step if collectives are rings, mean over the group."""
    predicted_wire_bytes: int | None = None
    within_nodes_bytes: int | None = None
    """The part of wire_bytes that stays in a node of `node_size` ranks; None without that key, as the next three."""
    between_nodes_bytes: int | None = None
    """The part of wire_bytes that goes from one node to another."""
    predicted_within_nodes_bytes: int | None = None
    predicted_between_nodes_bytes: int | None = None
    tensor_axis_all_reduce_bytes: int | None = None
    """Bytes that one rank sends in a step to those that share its model (tensor_parallel), by all-reduce, mean over the
    ranks; such traffic is in no other column. None if no ranks share a model, as in the next three."""
    tensor_axis_all_gather_bytes: int | None = None
    """The same by all-gather: of activations in parts (P_a)."""
    predicted_tensor_axis_all_reduce_bytes: int | None = None
    predicted_tensor_axis_all_gather_bytes: int | None = None
    quantized_gather_share: float | None = None
    """Fraction of ψ whose gathers, if not all of them, were sent quantized, as the traffic meter saw them."""
    quantized_reduction_share: float | None = None
    """Fraction of ψ whose reductions were sent quantized."""
    loopback_bytes: int | None = None
    """Bytes over the loopback interface per step and rank: the mean over all steps of the timed pass, warm-up included.
    These are the bytes that gloo really sends, with headers and other programs' traffic. wire_bytes is the optimum of
    rings."""
    predicted_loopback_bytes: int | None = None
    """Bytes that gloo sends for the observed operators, control traffic included, without headers: wire_bytes, except
    that gloo carries a reduce-scatter as an all-reduce and so sends twice as much."""
    newton_schulz_matrices: int | None = None
    """Matrices that Muon takes; None with another optimizer, as in the next columns."""
    newton_schulz_calls: float | None = None
    """Orthogonalizations of one step, counted on all ranks together: one per matrix if a single rank owns it, N if all
    ranks have it."""
    newton_schulz_flops: int | None = None
    """Multiplications and additions of these orthogonalizations, counted on all ranks together."""
    newton_schulz_balance: float | None = None
    """newton_schulz_flops of the busiest rank over the mean of the ranks: 1 if all ranks have the same."""
    control_bytes: int | None = None
    """Payload of one step's flags, buffers and scalars, outside the volume."""
    predicted_control_bytes: int | None = None


@dataclass
class RunTimes(RunTraffic):
    """Medians over the measured steps of the timed pass, the slowest rank of each step."""

    step_s: float | None = None
    """Median step of the timed pass, the slowest rank of each step; without the drawing of batches, and without
    garbage collection, which comes between steps."""
    step_s_low: float | None = None
    """Lower end of the 95 % confidence interval of step_s."""
    step_s_high: float | None = None
    """Upper end of the 95 % confidence interval of step_s."""
    forward_s: float | None = None
    """Median time of a step's forwards."""
    backward_s: float | None = None
    """Median time of a step's backwards."""
    update_s: float | None = None
    """Median time of a step's update, waits included."""
    save_s: float | None = None
    """Median time for which a save of a checkpoint holds the loop, the slowest rank of each; a part of its step. None
    without `measure.save`, as in the next columns."""
    save_done_s: float | None = None
    """Median time from the beginning of a save until the checkpoint is complete, when the next may begin."""
    save_step_s: float | None = None
    """Median step in which a checkpoint is copied or written, the slowest rank of each; step_s is of all steps."""
    checkpoint_bytes: int | None = None
    """Files of one checkpoint, of all ranks."""
    wall_s: float | None = None
    """From the begin of the first measured step to the end of the last, with what comes between; the slowest rank's."""
    tokens_per_s: float | None = None
    """Tokens of all measured steps over wall_s; samples if the data have no sequence."""
    others_cores: float | None = None
    """Cores that other processes kept busy during the timed pass, on average, of the cores that the run could use; None
    in a joined job, and of older runs."""
    sm_clock_mhz: int | None = None
    """CUDA: the lowest SM clock of two readings, right before and right after the measured steps, over all ranks."""
    sm_clock_max_mhz: int | None = None
    """CUDA: the highest SM clock that the GPU has; of several GPUs the lowest."""
    gpu_temperature_c: int | None = None
    """CUDA: the higher of both readings; of several GPUs the highest."""
    gpu_power_w: float | None = None
    """CUDA: the higher of both readings; of several GPUs the highest."""
    energy_j: float | None = None
    """Energy of the measured steps, with what comes between them. CUDA: of all GPUs, by NVML's counter; else of the CPU
    packages and their memory (RAPL), once per machine, other programs' part included. None if a counter cannot be read,
    as RAPL's often by root alone, and for less than a second on a GPU, on which the counter moves every 20 to 100 ms.
    """
    tokens_per_j: float | None = None
    """Tokens of all measured steps over energy_j; samples if the data have no sequence."""
    throttle: str | None = None
    """CUDA: reasons that held clocks down, of both readings and all ranks; empty for none, None if unknown."""
    traced_step_s: float | None = None
    """Traced pass, which the profiler slows down: median step of the rank where it is longest; communication_s and
    exposed_s are medians over the steps of that rank."""
    communication_s: float | None = None
    """Traced pass: time of a step in which a collective is in flight or running."""
    exposed_s: float | None = None
    """Traced pass: the part of communication_s in which nothing is computed."""
    overlap: float | None = None
    """1 - exposed_s / communication_s: the fraction of communication behind which something is computed."""
    model_flops: int | None = None
    """Floating-point operations of one rank's matrix products in a step, none counted twice."""
    hardware_flops: int | None = None
    """model_flops plus recomputed operations."""
    mfu: float | None = None
    """model_flops over what the device could do in a step's time; None if its peak is not known, and on a CPU."""
    hfu: float | None = None
    """hardware_flops over what the device could do in a step's time."""


@dataclass
class RunRow(RunTimes):
    """One row per run. What a failed run could not measure is None.

    Its columns, in this order: RunSetting, RunMemory, RunAllocator, RunTraffic, RunTimes, and training here.
    """

    loss_first: float | None = None
    """Loss of the first step of all, mean over the ranks and micro-batches."""
    loss_last: float | None = None
    """Loss of the last step, mean over the ranks and micro-batches."""
    grad_norm_last: float | None = None
    """Global 2-norm of the unscaled mean gradients before clipping, last step of the accounted pass."""
    loss_scale_last: float | None = None
    """Loss scale of the last step; 1 without loss scaling."""
    skipped_steps: int | None = None
    """Steps, warm-up included, that were skipped because gradients overflowed, timed pass."""
    passes_agree: bool | None = None
    """True if the losses of all passes are equal to the bit, on every rank and step; None if there is one pass.
    """
    unexplained: str | None = None
    """Sentences on figures of the accounted pass that no prediction explains; empty if all are explained."""
    training: str | None = None
    """Against a DDP run of the same training: equal, close, differs, reference for DDP itself, unchecked; None if
    it was not asked for, and in a simulated world, which trains nothing."""
    training_words: str | None = None
    """`training` as a sentence: over how many steps, what differed first, or why nothing was compared."""
    loss_deviation: float | None = None
    """Largest |loss − DDP's| over DDP's, of any rank and step compared."""
    grad_norm_deviation: float | None = None
    """Largest |gradient norm − DDP's| over DDP's, of any step compared."""
    schema_version: int = SCHEMA_VERSION
    """Version of the tables."""


@dataclass
class SearchRow:
    """Result of a search under a memory limit for one strategy: the fastest run that fits, or that none does."""

    search_id: str
    """Hash of the setting that was searched."""
    strategy: str
    """As in the table of runs, as all columns of the same name."""
    model: str
    """As in runs."""
    world_size: int
    """Ranks N."""
    batch: int
    """Samples per step over all ranks, which every combination has."""
    sequence: int
    """Tokens in a sequence."""
    device: str
    """cpu or cuda."""
    limit_bytes: int
    """Memory that a rank may use at its peak."""
    status: str
    """found, or nothing_fits."""
    reason: str
    """Why nothing fits; empty if something does."""
    tried: int
    """Combinations that were run."""
    least_bytes: int | None
    """The smallest peak of all combinations."""
    run_ids: str
    """The runs of the fastest combination, separated by spaces."""
    micro_batch: int | None = None
    """Micro-batch of the fastest combination that fits, as in the next columns; None if nothing fits."""
    accumulation: int | None = None
    """Micro-batches per step."""
    checkpointing: bool | None = None
    """True if blocks recompute their activations."""
    peak_bytes: int | None = None
    """Largest sum of live bytes on any rank."""
    tokens_per_s: float | None = None
    """Median of the winner, over its launches."""
    tokens_per_s_low: float | None = None
    """Lower end of its 95 % confidence interval over launches."""
    tokens_per_s_high: float | None = None
    """Upper end of its 95 % confidence interval over launches."""
    precision: str = "fp32"
    """As in runs."""
    optimizer: str = ""
    """As in runs."""
    schema_version: int = SCHEMA_VERSION
    """Version of the tables."""
