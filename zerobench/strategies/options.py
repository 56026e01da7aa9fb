"""The options of DDP and of our stages, as dataclasses: each field is a key of the command line, `strategy.FIELD`."""

from __future__ import annotations

from dataclasses import dataclass

from ..sections import Section

MIB = 2**20


@dataclass
class StrategyOptions(Section):
    """How data-parallel ranks hold the model states: the base of every strategy's options.

    `accumulate`: which micro-batches of a step are reduced over the ranks: the last alone, until which whole gradients
    are kept on every rank (no_sync), or every one, into the shard where gradients are partitioned. DeepSpeed chooses by
    itself: its stage 1 reduces the last, its stages 2 and 3 every one.
    """

    name: str = "???"  # OmegaConf's mark of a value that is missing

    @property
    def reduces(self) -> str:
        """The micro-batches of a step that are reduced: "every", or the "last", also where an engine chooses."""
        return str(getattr(self, "accumulate", "last"))

    @property
    def is_tuned(self) -> bool:
        """True for a peer with what serves this harness's models best."""
        return bool(getattr(self, "tuned", False))

    @property
    def is_meta(self) -> bool:
        """True where the model is built without memory and the engine gives it its values."""
        return bool(getattr(self, "construct", "plain") == "meta")

    @property
    def has_buckets(self) -> bool:
        """True where gradients are reduced in buckets of a given size."""
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
    bucket_bytes: int = 25 * MIB
    gradient_as_bucket_view: bool = True
    find_unused_parameters: bool = False
    broadcast_buffers: bool = True
    accumulate: str = "last"


@dataclass
class Zero1(StrategyOptions):
    """Our ZeRO-1 (P_os). `mode` (own, paper or vendor) says what null means: zerobench.zero.options.MODES.

    `bucket_bytes`: a number, or auto: half of psi/N, from 1 to 25 MiB.
    `reduce_with`: reduce_scatter or all_reduce. `overlap_gather`: updated parameters travel during the next forward,
    which takes longer where a rank's cores have no time to spare (2 % of a step on two busy ones).
    """

    name: str = "zero1"
    bucket_bytes: int | str | None = None
    broadcast_buffers: bool = True
    accumulate: str = "last"
    mode: str = "own"
    reduce_with: str | None = None
    overlap_gather: bool = False
    construct: str = "plain"


@dataclass
class Zero2(Zero1):
    """Our ZeRO-2 (P_os+g)."""

    name: str = "zero2"
    accumulate: str = "every"


@dataclass
class Megatron(StrategyOptions):
    """Megatron-core's distributed optimizer: ZeRO-1 with fp32 gradients in one buffer, gathers behind the forward."""

    name: str = "megatron"
    bucket_bytes: int = 25 * MIB
    broadcast_buffers: bool = True
    accumulate: str = "last"
    overlap_gather: bool = True


@dataclass
class Zero3(StrategyOptions):
    """Our ZeRO-3 (P_os+g+p): a unit per transformer block. `mode` (own, paper or vendor) says what null means.

    `construct`: plain, or meta: no rank ever holds the whole model, which has the same values all the same.
    `persistence_numel`: parameters of up to so many elements stay whole. From forward to backward the root unit stays
    (`keep_root`; auto: and is given back while backward is at others), or every unit (`reshard_after_forward=false`).
    """

    name: str = "zero3"
    prefetch: int = 1
    broadcast_buffers: bool = True
    accumulate: str = "every"
    mode: str = "own"
    persistence_numel: int | None = None
    keep_root: bool | str | None = None
    reshard_after_forward: bool | None = None
    construct: str = "plain"
