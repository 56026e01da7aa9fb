"""Every strategy of a sweep by name, ours and the peers', behind one face."""

from __future__ import annotations

from collections.abc import Callable
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


STRATEGIES: dict[str, Callable[..., Any]] = {"ddp": _ddp, **{name: _ours(name) for name in zero.STAGES}}


def wrap(strategy: dict[str, Any], model: nn.Module, optimizer: optim.Optimizer) -> Any:
    """The engine that a resolved `strategy` section asks for, over `model` and `optimizer`."""
    options = {key: value for key, value in strategy.items() if key != "name"}
    return STRATEGIES[strategy["name"]](model, optimizer, **options)
