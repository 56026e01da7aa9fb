"""The row per run, and the row per search under a memory limit."""

from __future__ import annotations

from dataclasses import dataclass

from .names import SCHEMA_VERSION
from .run_times import RunTimes


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
    """True where the losses of all passes are equal to the bit, on every rank and step; None where there is one pass.
    """
    unexplained: str | None = None
    """Sentences on figures of the accounted pass that no prediction explains; empty where all are explained."""
    training: str | None = None
    """Against a DDP run of the same training: equal, close, differs, reference for DDP itself, unchecked; None where
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
    """Sequences per step over all ranks, which every combination has."""
    sequence: int
    """Tokens in a sequence."""
    device: str
    """cpu or cuda."""
    limit_bytes: int
    """Memory that a rank may use at its peak."""
    status: str
    """found, or nothing_fits."""
    reason: str
    """Why nothing fits, a sentence; empty where something does."""
    tried: int
    """Combinations that were run."""
    least_bytes: int | None
    """The smallest peak of all combinations."""
    run_ids: str
    """The runs of the fastest combination, separated by spaces."""
    micro_batch: int | None = None
    """Of the fastest combination that fits, as the columns that follow; None where nothing fits."""
    accumulation: int | None = None
    """Micro-batches per step."""
    checkpointing: bool | None = None
    """True where blocks recompute their activations."""
    peak_bytes: int | None = None
    """Largest sum of live bytes on any rank."""
    tokens_per_s: float | None = None
    """Of the winner, over its launches."""
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
