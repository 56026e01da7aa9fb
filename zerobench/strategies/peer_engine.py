"""The common part of engines that leave gradients on the parameters: DDP, the peers, users' engines."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim

from ..zero.precision import LossScaler
from .engine import REQUIRED
from .spec import StrategySpec

UNSCALED = LossScaler(None, torch.device("cpu"))
"""Losses are multiplied by 1, and no step is skipped."""


class PeerEngine:
    """Defaults of the protocol `Engine` (engine.py).

    `shares_gradients`  `.grad` between backward and update is this rank's part, disjoint from the others'
    `hides_gradients`   `.grad` has no gradients then: they are in the engine's own buffers
    """

    module: nn.Module
    optimizer: optim.Optimizer
    scaler = UNSCALED
    shares_gradients = False
    hides_gradients = False

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Runs the module's forward."""
        return self.module(*inputs, **named_inputs)

    def backward(self, loss: torch.Tensor) -> None:
        """Backpropagates; gradients are reduced by the engine's hooks."""
        loss.backward()

    def step(self) -> None:
        """Makes one update; consumes the gradients."""
        self.optimizer.step()
        self.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients."""
        self.optimizer.zero_grad(set_to_none)

    def settle(self) -> None:
        """Does nothing: no transfer is in flight after a step."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Raises NotImplementedError: an engine that can clip overrides this."""
        raise NotImplementedError(f"clip: {type(self).__name__} cannot clip gradients; leave clip out")

    def reduced_gradients(self) -> Iterator[torch.Tensor]:
        """Yields this rank's part of the reduced gradients, which may be DTensors; none if they are hidden."""
        for parameter in () if self.hides_gradients else self.module.parameters():
            if parameter.grad is not None:
                yield parameter.grad

    @property
    def gradient_holders(self) -> int:
        """Number of ranks with the same part of the gradients: all, if every rank has the whole mean."""
        return 1 if self.shares_gradients else dist.get_world_size()


def options_of(optimizer: optim.Optimizer) -> dict[str, Any]:
    """Returns the options that `optimizer` was constructed with, besides its parameters."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    return {key: value for key, value in optimizer.defaults.items() if key in accepted}


def rebuilt(optimizer: optim.Optimizer, other: Callable[[nn.Parameter], torch.Tensor]) -> optim.Optimizer:
    """Returns a new optimizer of the same class, groups and options, over `other(parameter)` for each parameter."""
    groups = [{**group, "params": [other(p) for p in group["params"]]} for group in optimizer.param_groups]
    return type(optimizer)(groups, **options_of(optimizer))


class AdaptedEngine(PeerEngine):
    """A user's engine, completed by the optional parts listed in engine.py.

    Raises TypeError for an engine that lacks a method. `clips`: the run clips gradients.
    """

    def __init__(
        self, spec: StrategySpec, engine: Any, module: nn.Module, optimizer: optim.Optimizer, clips: bool
    ) -> None:
        wanted = (*REQUIRED, *(("clip_grad_norm_",) if clips else ()))
        missing = [name for name in wanted if not callable(getattr(engine, name, None))]
        if missing:
            why = "; clip needs it" if missing == ["clip_grad_norm_"] else ""
            words = f"its engine, {type(engine).__name__}, has no method {' and no '.join(missing)}{why}"
            raise TypeError(f"strategy={spec.name}: {words}")
        self._engine = engine
        self.module = getattr(engine, "module", module)
        self.optimizer = getattr(engine, "optimizer", optimizer)
        self.shares_gradients = bool(getattr(engine, "shares_gradients", False))
        self.hides_gradients = bool(getattr(engine, "hides_gradients", False))

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Runs the engine's forward."""
        return self._engine(*inputs, **named_inputs)

    def backward(self, loss: torch.Tensor) -> None:
        """Backpropagates."""
        self._engine.backward(loss)

    def step(self) -> None:
        """Makes one update, then drops the gradients."""
        self._engine.step()
        self._engine.zero_grad()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Calls the engine's own method."""
        norm: torch.Tensor = self._engine.clip_grad_norm_(max_norm, norm_type)
        return norm

    def no_sync(self) -> AbstractContextManager[Any]:
        """Returns the engine's own context; without one backward reduces every micro-batch."""
        own = getattr(self._engine, "no_sync", None)
        return nullcontext() if own is None else own()

    def settle(self) -> None:
        """Completes the engine's transfers in flight after the last step, if it has such a method."""
        own = getattr(self._engine, "settle", None)
        if own is not None:
            own()
