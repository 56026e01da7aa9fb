"""The peers: their schemas, what each of them needs installed, and what `strategy.tuned` stands for in each.

A field of a peer's schema that is null follows `tuned`: it gets the peer's own default, or what serves this harness's
models (10 to 100 million parameters, CPU or one node) best. The filled-in values are part of the resolved config, so
a row says what was tuned.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from omegaconf import MISSING

MIB = 2**20


@dataclass
class Strategy:
    """How data-parallel ranks share the model states: the base of every strategy's schema, of ours in config/schema.py.

    `accumulate`: which micro-batches of a step are reduced over the ranks: the last alone, until which whole gradients
    are kept on every rank (no_sync), or every one, into the shard where gradients are shared. DeepSpeed has its own
    mind: its stage 1 reduces the last, its stages 2 and 3 every one.
    """

    name: str = MISSING


@dataclass
class Fsdp2(Strategy):
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
class ZeroRedundancy(Strategy):
    """torch's ZeroRedundancyOptimizer over DistributedDataParallel."""

    name: str = "zero_redundancy"
    tuned: bool = False
    accumulate: str = "last"
    bucket_bytes: int = 25 * MIB
    gradient_as_bucket_view: bool | None = None
    parameters_as_bucket_view: bool | None = None


@dataclass
class DeepspeedZero1(Strategy):
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
class DeepspeedZero3(Strategy):
    """DeepSpeed's ZeRO-3."""

    name: str = "deepspeed_zero3"
    tuned: bool = False
    reduce_bucket_numel: int | None = None
    prefetch_numel: int | None = None
    persistence_numel: int | None = None
    max_live_numel: int | None = None
    max_reuse_numel: int | None = None
    overlap_comm: bool | None = None


PEERS: dict[str, type] = {
    schema.name: schema
    for schema in (Fsdp2, Fsdp2NoReshard, ZeroRedundancy, DeepspeedZero1, DeepspeedZero2, DeepspeedZero3)
}

_FSDP2 = {
    # units gathered ahead by name, in either direction; 0: FSDP2's implicit order, one ahead in backward alone
    "prefetch": (0, 1),
    # without CUDA's streams a gather blocks unless it is asked to be asynchronous
    "async_gather": (False, True),
    # gradients are summed and then divided, rather than averaged on the way
    "sum_gradients": (False, True),
}
_DEEPSPEED_12 = {
    "reduce_bucket_numel": (500_000_000, 25 * MIB // 4),
    # one all-reduce for a bucket of several owners, of which each keeps its slice; false: a reduce to each owner, which
    # is 2ψ in place of 3ψ, the least memory, and on gloo as fast
    "multi_rank_allreduce": (True, False),
    "overlap_comm": (False, False),  # a second bucket, and without CUDA's streams nothing gained
}
_DEEPSPEED_3 = {
    "reduce_bucket_numel": (500_000_000, 25 * MIB // 4),
    # all three have to be small for parameters to be given back at all in a model below a billion
    "prefetch_numel": (50_000_000, 0),
    "max_live_numel": (1_000_000_000, 0),
    "max_reuse_numel": (1_000_000_000, 0),
    "persistence_numel": (100_000, 100_000),
    "overlap_comm": (True, True),
}

TUNING: dict[str, dict[str, tuple[Any, Any]]] = {
    "fsdp2": _FSDP2,
    "fsdp2_no_reshard": _FSDP2,
    "zero_redundancy": {
        "gradient_as_bucket_view": (False, True),
        "parameters_as_bucket_view": (False, True),
    },
    "deepspeed_zero1": _DEEPSPEED_12,
    "deepspeed_zero2": _DEEPSPEED_12,
    "deepspeed_zero3": _DEEPSPEED_3,
}
"""Peer -> field -> (its own default, tuned)."""

NEEDS = {name: "deepspeed" for name in TUNING if name.startswith("deepspeed")}
"""Strategy -> the module that must be there beside torch."""

INSTALL = "DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed"


def tuned(strategy: dict[str, Any]) -> dict[str, Any]:
    """The section of a strategy with every null that follows `tuned` filled in; ours as it is."""
    choices = TUNING.get(strategy["name"], {})
    filled = {key: pair[bool(strategy["tuned"])] for key, pair in choices.items() if strategy[key] is None}
    return {**strategy, **filled}


def problems_of(plain: dict[str, Any]) -> list[str]:
    """Sentences where what the strategy of a resolved config needs is not installed, or it cannot do what is asked."""
    strategy, problems = plain["strategy"]["name"], []
    module = NEEDS.get(strategy)
    if module is not None and find_spec(module) is None:
        words = f"needs {module}, which is not installed; it is the extra `peers`: {INSTALL}"
        problems.append(f"strategy={strategy}: {words}")
    if module is not None and plain["clip"] is not None:
        problems.append(f"clip={plain['clip']:g}: strategy={strategy} clips inside its own step, unseen; leave it out")
    return problems
