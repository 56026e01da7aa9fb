"""Every strategy of a sweep by name, ours and the peers', behind one face."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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


STRATEGIES: dict[str, Callable[..., Any]] = {"ddp": _ddp, **{name: _ours(name) for name in zero.STAGES}}


def wrap(strategy: dict[str, Any], model: nn.Module, optimizer: optim.Optimizer, **precision: Any) -> Any:
    """The engine that a resolved `strategy` section asks for, over `model` and `optimizer`. `precision`: what an
    engine must know of dtypes and loss scaling beside the model (precision.options_of).
    """
    options = {key: value for key, value in strategy.items() if key not in ("name", "accumulate", "mode")}
    return STRATEGIES[strategy["name"]](model, optimizer, **options, **precision)


def synchronising(engine: Any, accumulate: str, last: bool) -> AbstractContextManager[Any]:
    """Around a micro-batch: with `accumulate` "last" only a step's last one communicates, with "every" all do."""
    return engine.no_sync() if accumulate == "last" and not last else nullcontext()
