"""The options of the peers as dataclasses, and what `strategy.tuned` stands for in each.

A field of a peer's options that is null follows `tuned`: it gets the peer's own default, or what serves this harness's
models (10 to 100 million parameters, CPU or one node) best. The filled-in values are part of the resolved config, so
a row says what was tuned.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..sections import Key
from .options import (
    ACCUMULATE,
    BUCKET_BYTES,
    GRADIENT_AS_BUCKET_VIEW,
    MIB,
    PERSISTENCE_NUMEL,
    PREFETCH,
    StrategyOptions,
)
from .spec import Tuning

WITHOUT_RULE: dict[str, tuple[str, ...]] = {
    "sgd": ("fused",), "adagrad": ("fused",), "rprop": ("foreach", "loop"),
}  # fmt: skip
"""Optimizer -> implementations of operators that torch 2.13 cannot apply to the shards of fsdp2, which are DTensors."""


TUNED = Key("null options have the values that serve this harness's models, not the peer's defaults")
REDUCE_BUCKET_NUMEL = Key(
    "DeepSpeed's reduce_bucket_size", unit="elements", limits=(1, 1e12), deepspeed="`reduce_bucket_size`"
)
OVERLAP_COMM = Key(
    "DeepSpeed's overlap_comm: a second bucket, filled while the first travels", deepspeed="`overlap_comm`"
)


@dataclass
class Fsdp2(StrategyOptions):
    """torch's fully_shard on the units of our stage 3, which are gathered again in backward. In bf16 the shards stay
    fp32 and are the master weights; `precision.wire_dtype` (bf16 or fp32) is what gradients are reduced in.
    """

    name: str = "fsdp2"
    tuned: bool = TUNED(False)
    accumulate: str = ACCUMULATE("every")
    prefetch: int | None = PREFETCH(None)
    async_gather: bool | None = Key(
        "FSDP2's gathers do not block without CUDA streams", torch="`_set_unshard_async_op`"
    )(None)
    sum_gradients: bool | None = Key(
        "gradients are summed and then divided, not averaged on the way", torch="`set_force_sum_reduction_for_comms`"
    )(None)


@dataclass
class Fsdp2NoReshard(Fsdp2):
    """torch's fully_shard with parameters kept whole between forward and backward."""

    name: str = "fsdp2_no_reshard"


@dataclass
class ZeroRedundancy(StrategyOptions):
    """torch's ZeroRedundancyOptimizer over DistributedDataParallel."""

    name: str = "zero_redundancy"
    tuned: bool = TUNED(False)
    accumulate: str = ACCUMULATE("last")
    bucket_bytes: int = BUCKET_BYTES(25 * MIB)
    gradient_as_bucket_view: bool | None = GRADIENT_AS_BUCKET_VIEW(None)
    parameters_as_bucket_view: bool | None = Key(
        "parameters are views of ZeroRedundancyOptimizer's buckets",
        torch="ZeroRedundancyOptimizer `parameters_as_bucket_view`",
    )(None)  # fmt: skip


@dataclass
class DeepspeedZero1(StrategyOptions):
    """DeepSpeed's ZeRO-1, gradient clipping off. Sizes are in elements, as DeepSpeed has them."""

    name: str = "deepspeed_zero1"
    tuned: bool = TUNED(False)
    reduce_bucket_numel: int | None = REDUCE_BUCKET_NUMEL(None)
    multi_rank_allreduce: bool | None = Key(
        "DeepSpeed's use_multi_rank_bucket_allreduce", deepspeed="`use_multi_rank_bucket_allreduce`"
    )(None)
    overlap_comm: bool | None = OVERLAP_COMM(None)


@dataclass
class DeepspeedZero2(DeepspeedZero1):
    """DeepSpeed's ZeRO-2."""

    name: str = "deepspeed_zero2"


@dataclass
class DeepspeedZero3(StrategyOptions):
    """DeepSpeed's ZeRO-3."""

    name: str = "deepspeed_zero3"
    tuned: bool = TUNED(False)
    reduce_bucket_numel: int | None = REDUCE_BUCKET_NUMEL(None)
    prefetch_numel: int | None = Key(
        "DeepSpeed's stage3_prefetch_bucket_size", unit="elements", limits=(0, 1e+12),
        deepspeed="`stage3_prefetch_bucket_size`",
    )(None)  # fmt: skip
    persistence_numel: int | None = PERSISTENCE_NUMEL(None)
    max_live_numel: int | None = Key(
        "DeepSpeed's stage3_max_live_parameters", unit="elements", limits=(0, 1e+12),
        deepspeed="`stage3_max_live_parameters`",
    )(None)  # fmt: skip
    max_reuse_numel: int | None = Key(
        "DeepSpeed's stage3_max_reuse_distance", unit="elements", limits=(0, 1e+12),
        deepspeed="`stage3_max_reuse_distance`",
    )(None)  # fmt: skip
    overlap_comm: bool | None = OVERLAP_COMM(None)


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
