"""Every strategy of a sweep by name, ours and the peers', behind one face."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

from torch import nn, optim

from .. import zero
from .ddp import DdpEngine


def _ours(name: str) -> Callable[..., Any]:
    return lambda model, optimizer, **options: zero.initialize(model, optimizer, name, **options)


def _ddp(
    model: nn.Module, optimizer: optim.Optimizer, bucket_bytes: int, broadcast_buffers: bool, **options: Any
) -> DdpEngine:
    if not broadcast_buffers:  # the default needs no word, and torch 2.13 warns of this one
        options["broadcast_buffers"] = False
    return DdpEngine(model, optimizer, bucket_cap_mb=bucket_bytes / 2**20, **options)


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


def wrap(strategy: dict[str, Any], model: nn.Module, optimizer: optim.Optimizer) -> Any:
    """The engine that a resolved `strategy` section asks for, over `model` and `optimizer`."""
    options = {key: value for key, value in strategy.items() if key != "name"}
    return STRATEGIES[strategy["name"]](model, optimizer, **options)


def synchronising(engine: Any, last: bool) -> AbstractContextManager[Any]:
    """Around a micro-batch. With whole gradients on every rank (DDP, stage 1) only a step's last one communicates;
    stages 2 and 3 reduce every one into the shard, for keeping it whole would undo what they save. DeepSpeed is told
    of every one and decides itself.
    """
    keeps_whole_gradients = getattr(engine, "stage", 0) < 2
    return engine.no_sync() if keeps_whole_gradients and not last else nullcontext()
