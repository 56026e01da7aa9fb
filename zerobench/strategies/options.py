"""The options of all strategies, as dataclasses: each field is a key on the command line, `strategy.FIELD`.

They include the options of the peers, and the values that `strategy.tuned` stands for in each.

A field of a peer's options that is null follows `tuned`: it gets the peer's own default, or the value that serves this
harness's models (10 to 100 million parameters, CPU or one node) best. The filled-in values are part of the resolved
config, so a row shows what was tuned.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..sections import Key, Section
from .spec import Tuning

MIB = 2**20


BUCKET_BYTES = Key(
    "capacity of a bucket of gradients; auto: psi/(2N) or psi/64, 1 to 25 MiB", unit="bytes", limits=(2**10, 2**40),
    words=("auto",),
)  # fmt: skip
GRADIENT_AS_BUCKET_VIEW = Key("gradients are views of DDP's buckets, not copies")
BROADCAST_BUFFERS = Key("rank 0's buffers are copied to all ranks before a forward")
ACCUMULATE = Key(
    "micro-batches after which gradients are reduced: every one, or only the last", words=("every", "last")
)
MODE = Key("defaults of null options: own, paper (ZeRO) or vendor (DeepSpeed)", words=("own", "paper", "vendor"))
OVERLAP_GATHER = Key("updated parameters travel during the next forward")
CONSTRUCT = Key("plain, or meta: no rank ever holds the whole model", words=("plain", "meta"))
PREFETCH = Key("units gathered ahead of their use", unit="units", limits=(0, 1e6))
PERSISTENCE_NUMEL = Key("parameters up to this size stay whole on every rank", unit="elements", limits=(0, 1e12))


@dataclass
class StrategyOptions(Section):
    """How data-parallel ranks hold the model states: the base of every strategy's options.

    `accumulate`: which micro-batches of a step are reduced over the ranks: only the last, until which whole gradients
    are kept on every rank (no_sync), or every one, into the shard if gradients are partitioned. DeepSpeed chooses by
    itself: its stage 1 reduces the last, its stages 2 and 3 every one.
    """

    name: str = "???"  # OmegaConf's mark of a value that is missing

    @property
    def reduces(self) -> str:
        """The micro-batches of a step that are reduced: "every", or the "last", also if an engine chooses."""
        return str(getattr(self, "accumulate", "last"))

    @property
    def is_tuned(self) -> bool:
        """True for a peer with the values that serve this harness's models best."""
        return bool(getattr(self, "tuned", False))

    @property
    def is_meta(self) -> bool:
        """True if the model is built without memory and the engine gives it its values."""
        return bool(getattr(self, "construct", "plain") == "meta")

    @property
    def has_buckets(self) -> bool:
        """True if gradients are reduced in buckets of a given size."""
        return hasattr(self, "bucket_bytes")

    @property
    def whole_numel(self) -> int:
        """Elements up to which a parameter stays whole on every rank."""
        numel = getattr(self, "persistence_numel", None)
        return numel if isinstance(numel, int) else 0  # a user's option of that name may be another thing


@dataclass
class Ddp(StrategyOptions):
    """torch DistributedDataParallel."""

    name: str = "ddp"
    bucket_bytes: int = BUCKET_BYTES(25 * MIB)
    gradient_as_bucket_view: bool = GRADIENT_AS_BUCKET_VIEW(True)
    find_unused_parameters: bool = Key("DDP looks for parameters that a forward did not use")(False)
    broadcast_buffers: bool = BROADCAST_BUFFERS(True)
    accumulate: str = ACCUMULATE("last")


@dataclass
class Zero1(StrategyOptions):
    """Our ZeRO-1 (P_os). `mode` (own, paper or vendor) sets the meaning of null: zerobench.zero.options.MODES.

    `bucket_bytes`: a number, or auto: half of psi/N or a 64th of psi, from 1 to 25 MiB.
    `reduce_with`: reduce_scatter or all_reduce. `overlap_gather`: gathers run during the next forward.
    """

    name: str = "zero1"
    bucket_bytes: int | str | None = BUCKET_BYTES(None)
    broadcast_buffers: bool = BROADCAST_BUFFERS(True)
    accumulate: str = ACCUMULATE("last")
    mode: str = MODE("own")
    reduce_with: str | None = Key(
        "reduce_scatter or all_reduce; null: as mode says", words=("reduce_scatter", "all_reduce")
    )(None)
    overlap_gather: bool = OVERLAP_GATHER(True)
    construct: str = CONSTRUCT("plain")


@dataclass
class Zero2(Zero1):
    """Our ZeRO-2 (P_os+g)."""

    name: str = "zero2"
    accumulate: str = ACCUMULATE("every")


@dataclass
class Megatron(StrategyOptions):
    """Megatron-core's distributed optimizer: ZeRO-1 with fp32 gradients in one buffer, gathers during forward."""

    name: str = "megatron"
    bucket_bytes: int = BUCKET_BYTES(25 * MIB)
    broadcast_buffers: bool = BROADCAST_BUFFERS(True)
    accumulate: str = ACCUMULATE("last")
    overlap_gather: bool = OVERLAP_GATHER(True)


@dataclass
class Zero3(StrategyOptions):
    """Our ZeRO-3 (P_os+g+p): a unit per transformer block. `mode` (own, paper or vendor) sets the meaning of null.

    `construct`: plain, or meta: no rank ever holds the whole model, whose values are the same nevertheless.
    `persistence_numel`: parameters of up to this many elements stay whole. From forward to backward the root unit stays
    (`keep_root`; auto: it is freed while backward is at others), or every unit (`reshard_after_forward=false`).
    `shards`: masters, or parameters (beside the masters).
    """

    name: str = "zero3"
    prefetch: int = PREFETCH(1)
    broadcast_buffers: bool = BROADCAST_BUFFERS(True)
    accumulate: str = ACCUMULATE("every")
    mode: str = MODE("own")
    persistence_numel: int | None = PERSISTENCE_NUMEL(None)
    keep_root: bool | str | None = Key(
        "the root unit (embedding, head) stays from forward to backward; auto: freed while backward is in the blocks",
        words=("auto", "true", "false"),
    )(None)
    reshard_after_forward: bool | None = Key("units are freed after forward and gathered again for backward")(None)
    shards: str | None = Key(
        "in half precision without offload: a rank's part of the masters alone, rounded for each gather, or also of the"
        " parameters",
        words=("masters", "parameters"),
        omitted=True,
    )(None)
    construct: str = CONSTRUCT("plain")


WITHOUT_RULE: dict[str, tuple[str, ...]] = {
    "sgd": ("fused",), "adagrad": ("fused",), "rprop": ("foreach", "loop"),
}  # fmt: skip
"""Optimizer -> implementations of operators that torch 2.13 cannot apply to the shards of fsdp2, which are DTensors."""


TUNED = Key("null options get values tuned for these models, instead of the peer's defaults")
REDUCE_BUCKET_NUMEL = Key("reduce_bucket_size of DeepSpeed", unit="elements", limits=(1, 1e12))
OVERLAP_COMM = Key("overlap_comm of DeepSpeed: a second bucket is filled while the first is sent")


@dataclass
class Fsdp2(StrategyOptions):
    """torch's fully_shard on the units of our stage 3, which are gathered again in backward. In bf16 the shards stay
    fp32 and are the master weights; `precision.wire_dtype` (bf16 or fp32) is the dtype in which gradients are reduced.
    """

    name: str = "fsdp2"
    tuned: bool = TUNED(False)
    accumulate: str = ACCUMULATE("every")
    prefetch: int | None = PREFETCH(None)
    async_gather: bool | None = Key("FSDP2's gathers do not block without CUDA streams")(None)
    sum_gradients: bool | None = Key("gradients are summed and then divided, not averaged on the way")(None)
    upcast_frozen: bool = Key(
        "in half precision, frozen parameters have fp32 shards like trained ones; false: shards in the dtype of the"
        " computation", omitted=True,
    )(True)  # fmt: skip
    reshard_ranks: int | None = Key(
        "between forward and backward a unit stays partitioned over so many ranks; null: over all", unit="ranks",
        limits=(2, 1e6), omitted=True,
    )(None)  # fmt: skip


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
    parameters_as_bucket_view: bool | None = Key("parameters are views of ZeroRedundancyOptimizer's buckets")(None)


@dataclass
class DeepspeedZero1(StrategyOptions):
    """DeepSpeed's ZeRO-1, gradient clipping off. Sizes are in elements, as in DeepSpeed."""

    name: str = "deepspeed_zero1"
    tuned: bool = TUNED(False)
    reduce_bucket_numel: int | None = REDUCE_BUCKET_NUMEL(None)
    multi_rank_allreduce: bool | None = Key("use_multi_rank_bucket_allreduce of DeepSpeed")(None)
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
    prefetch_numel: int | None = Key("stage3_prefetch_bucket_size of DeepSpeed", unit="elements", limits=(0, 1e12))(
        None
    )
    persistence_numel: int | None = PERSISTENCE_NUMEL(None)
    max_live_numel: int | None = Key("stage3_max_live_parameters of DeepSpeed", unit="elements", limits=(0, 1e12))(None)
    max_reuse_numel: int | None = Key("stage3_max_reuse_distance of DeepSpeed", unit="elements", limits=(0, 1e12))(None)
    overlap_comm: bool | None = OVERLAP_COMM(None)


FSDP2: Tuning = {
    # units gathered ahead by name, in either direction; 0: FSDP2's implicit order, one ahead in backward only
    "prefetch": (0, 1),
    # without CUDA streams a gather blocks unless it is asked to be asynchronous
    "async_gather": (False, True),
    # gradients are summed and then divided, rather than averaged by the reduction
    "sum_gradients": (False, True),
}
DEEPSPEED_12: Tuning = {
    "reduce_bucket_numel": (500_000_000, 25 * MIB // 4),
    # one all-reduce for a bucket of several owners, each of which keeps its slice; false: a reduce to each owner, which
    # is 2ψ instead of 3ψ, the least memory, and on gloo as fast
    "multi_rank_allreduce": (True, False),
    "overlap_comm": (False, False),  # a second bucket, and without CUDA's streams nothing gained
}
DEEPSPEED_3: Tuning = {
    "reduce_bucket_numel": (500_000_000, 25 * MIB // 4),
    # all three have to be small for parameters to be freed at all in a model below a billion parameters
    "prefetch_numel": (50_000_000, 0),
    "max_live_numel": (1_000_000_000, 0),
    "max_reuse_numel": (1_000_000_000, 0),
    "persistence_numel": (100_000, 100_000),
    "overlap_comm": (True, True),
}

ZERO_REDUNDANCY: Tuning = {"gradient_as_bucket_view": (False, True), "parameters_as_bucket_view": (False, True)}
