"""Every strategy of a sweep by name, ours and the peers', behind one face."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

from torch import nn, optim

from .. import zero
from ..zero.precision import HALF
from .ddp import DdpEngine
from .ddp_masters import MasterDdpEngine


def _ours(name: str) -> Callable[..., Any]:
    return lambda model, optimizer, **options: zero.initialize(model, optimizer, name, **options)


def _ddp(
    model: nn.Module, optimizer: optim.Optimizer, bucket_bytes: int, broadcast_buffers: bool, tile_bytes: int,
    **options: Any,
) -> DdpEngine:  # fmt: skip
    if not broadcast_buffers:  # the default needs no word, and torch 2.13 warns of this one
        options["broadcast_buffers"] = False
    options["bucket_cap_mb"] = bucket_bytes / 2**20
    if any(p.dtype in HALF for p in model.parameters()):
        return MasterDdpEngine(model, optimizer, tile_bytes=tile_bytes, **options)
    return DdpEngine(model, optimizer, **options)


def _peer(module: str, engine: str, **fixed: Any) -> Callable[..., Any]:
    """An engine that is imported when it is wanted: it takes a second, and may be an optional extra."""

    def build(model: nn.Module, optimizer: optim.Optimizer, **options: Any) -> Any:
        return getattr(import_module(f".{module}", __name__), engine)(model, optimizer, **fixed, **options)

    return build


STRATEGIES: dict[str, Callable[..., Any]] = {
    "ddp": _ddp,
    **{name: _ours(name) for name in zero.STAGES},
    "fsdp2": _peer("fsdp2", "Fsdp2Engine", reshard=True),
    "fsdp2_no_reshard": _peer("fsdp2", "Fsdp2Engine", reshard=False),
    "zero_redundancy": _peer("zero_redundancy", "ZeroRedundancyEngine"),
    **{f"deepspeed_zero{level}": _peer("deepspeed", "DeepspeedEngine", level=level) for level in (1, 2, 3)},
}


def wrap(strategy: dict[str, Any], model: nn.Module, optimizer: optim.Optimizer, **precision: Any) -> Any:
    """The engine that a resolved `strategy` section asks for, over `model` and `optimizer`. `precision`: what an
    engine must know of dtypes and loss scaling beside the model (precision.options_of).
    """
    options = {key: value for key, value in strategy.items() if key not in ("name", "accumulate", "mode", "construct")}
    return STRATEGIES[strategy["name"]](model, optimizer, **options, **precision)


def synchronizing(engine: Any, accumulate: str, last: bool) -> AbstractContextManager[Any]:
    """Around a micro-batch: with `accumulate` "last" only a step's last one communicates, with "every" all do."""
    return engine.no_sync() if accumulate == "last" and not last else nullcontext()


def settle(engine: Any) -> None:
    """Completes what an engine may still have on its way after the last step: gathers that overlap the next forward."""
    if hasattr(engine, "settle"):
        engine.settle()
