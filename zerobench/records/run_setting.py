"""Columns of a run on what was run: its identity, its setting, and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RunSetting:
    """The first columns of a row per run. Every run has them, also one that failed."""

    run_id: str
    """Name of the run's folder; the other tables refer to it."""
    cell_id: str
    """Hash of the config less what does not change a measurement."""
    repeat: int
    """Number of this launch among those of its cell, from 0."""
    status: str
    """ok, diverged (a loss is not finite), crash, oom, timeout or interrupted, and invalid for a refused cell, which is
    a row of its sweep but no run in a results folder; `reason` says why not ok.
    """
    reason: str
    """A sentence on why the run is not ok; empty where it is."""
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
    """The dtype of the model, and of gradients and traffic where they have another."""
    optimizer: str
    """Its name and implementation, and at what norm gradients are clipped, if they are."""
    micro_batch: int
    """Sequences on one rank in one forward."""
    accumulation: int
    """Micro-batches per step."""
    batch: int
    """Sequences per step over all ranks: micro_batch · accumulation · world_size."""
    sequence: int
    """Tokens in a sequence; 1 where samples have no length."""
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
    """Hash of this package's code, and of the user's model where there is one."""
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
    """True where blocks recompute their activations; None where the model has no such choice."""
    systems: str | None = None
    """Tiers, codecs, groups and residual policies beside the strategy, as on a command line; empty: all as usual."""
    alloc_conf: str | None = None
    """CUDA only: the setting of torch's allocator, by PYTORCH_ALLOC_CONF or its older name."""
    ranks_per_gpu: int | None = None
    """CUDA only: ranks that share a GPU. Where they do, a step has no times: they take turns."""
    launcher: str | None = None
    """The sweep's launcher: local, ours, or the plugin of Hydra's whose job has run the cell: submitit_slurm."""
    psi: int | None = None
    """Unique trainable parameters, ψ."""
    bucket_bytes: int | None = None
    """Most that a bucket holds, as a number also where the config says auto; None where there are no buckets."""
