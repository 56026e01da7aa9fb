"""The options of the peers as dataclasses, and what `strategy.tuned` stands for in each.

A field of a peer's options that is null follows `tuned`: it gets the peer's own default, or what serves this harness's
models (10 to 100 million parameters, CPU or one node) best. The filled-in values are part of the resolved config, so
a row says what was tuned.
"""

from __future__ import annotations

from dataclasses import dataclass

from .options import MIB, StrategyOptions
from .spec import Tuning

WITHOUT_RULE: dict[str, tuple[str, ...]] = {
    "sgd": ("fused",), "adagrad": ("fused",), "rprop": ("foreach", "loop"),
}  # fmt: skip
"""Optimizer -> implementations of operators that torch 2.13 cannot apply to the shards of fsdp2, which are DTensors."""


@dataclass
class Fsdp2(StrategyOptions):
    """torch's fully_shard on the units of our stage 3, which are gathered again in backward. In bf16 the shards stay
    fp32 and are the master weights; `precision.wire_dtype` (bf16 or fp32) is what gradients are reduced in.
    """

    name: str = "fsdp2"
    tuned: bool = False
    accumulate: str = "every"
    prefetch: int | None = None
    async_gather: bool | None = None
    sum_gradients: bool | None = None


@dataclass
class Fsdp2NoReshard(Fsdp2):
    """torch's fully_shard with parameters kept whole between forward and backward."""

    name: str = "fsdp2_no_reshard"


@dataclass
class ZeroRedundancy(StrategyOptions):
    """torch's ZeroRedundancyOptimizer over DistributedDataParallel."""

    name: str = "zero_redundancy"
    tuned: bool = False
    accumulate: str = "last"
    bucket_bytes: int = 25 * MIB
    gradient_as_bucket_view: bool | None = None
    parameters_as_bucket_view: bool | None = None


@dataclass
class DeepspeedZero1(StrategyOptions):
    """DeepSpeed's ZeRO-1, gradient clipping off. Sizes are in elements, as DeepSpeed has them."""

    name: str = "deepspeed_zero1"
    tuned: bool = False
    reduce_bucket_numel: int | None = None
    multi_rank_allreduce: bool | None = None
    overlap_comm: bool | None = None


@dataclass
class DeepspeedZero2(DeepspeedZero1):
    """DeepSpeed's ZeRO-2."""

    name: str = "deepspeed_zero2"


@dataclass
class DeepspeedZero3(StrategyOptions):
    """DeepSpeed's ZeRO-3."""

    name: str = "deepspeed_zero3"
    tuned: bool = False
    reduce_bucket_numel: int | None = None
    prefetch_numel: int | None = None
    persistence_numel: int | None = None
    max_live_numel: int | None = None
    max_reuse_numel: int | None = None
    overlap_comm: bool | None = None


FSDP2: Tuning = {
    # units gathered ahead by name, in either direction; 0: FSDP2's implicit order, one ahead in backward alone
    "prefetch": (0, 1),
    # without CUDA's streams a gather blocks unless it is asked to be asynchronous
    "async_gather": (False, True),
    # gradients are summed and then divided, rather than averaged on the way
    "sum_gradients": (False, True),
}
DEEPSPEED_12: Tuning = {
    "reduce_bucket_numel": (500_000_000, 25 * MIB // 4),
    # one all-reduce for a bucket of several owners, of which each keeps its slice; false: a reduce to each owner, which
    # is 2ψ in place of 3ψ, the least memory, and on gloo as fast
    "multi_rank_allreduce": (True, False),
    "overlap_comm": (False, False),  # a second bucket, and without CUDA's streams nothing gained
}
DEEPSPEED_3: Tuning = {
    "reduce_bucket_numel": (500_000_000, 25 * MIB // 4),
    # all three have to be small for parameters to be given back at all in a model below a billion
    "prefetch_numel": (50_000_000, 0),
    "max_live_numel": (1_000_000_000, 0),
    "max_reuse_numel": (1_000_000_000, 0),
    "persistence_numel": (100_000, 100_000),
    "overlap_comm": (True, True),
}

ZERO_REDUNDANCY: Tuning = {
    "gradient_as_bucket_view": (False, True),
    "parameters_as_bucket_view": (False, True),
}
