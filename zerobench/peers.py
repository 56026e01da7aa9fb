"""The peers: what each of them needs installed, and which of its own settings `strategy.tuned` stands for.

A field of a peer's schema that is null follows `tuned`: it gets the peer's own default, or what serves this harness's
models (10 to 100 million parameters, CPU or one node) best. The filled-in values are part of the resolved config, so
a row says what was tuned.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

MIB = 2**20

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


def missing(strategy: str) -> str | None:
    """A sentence where what `strategy` needs is not installed, else None."""
    module = NEEDS.get(strategy)
    if module is None or find_spec(module) is not None:
        return None
    return f"strategy={strategy}: needs {module}, which is not installed; it is the extra `peers`: {INSTALL}"
