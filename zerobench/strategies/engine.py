"""The engine's interface: the few methods that a user's engine must have, and the rest that the harness completes.

    engine(*inputs)          the module's forward, which returns the loss
    engine.backward(loss)    backpropagates; afterwards the gradients are reduced, or not yet under `no_sync`
    engine.step()            one update of the parameters, from the gradients of the micro-batches since the last step
    engine.zero_grad()       drops the gradients; called after each step

These four are required. The harness also uses these, and substitutes the following if an engine lacks them:

    engine.no_sync()         a context in which backward reduces nothing: without it every micro-batch is reduced
    engine.clip_grad_norm_(max_norm, norm_type)    returns the global norm before: without it `clip` is refused
    engine.optimizer, engine.module                the ones that the engine was built over
    engine.shares_gradients = True                 `.grad` after backward is this rank's part, disjoint from the others'
    engine.hides_gradients = True                  `.grad` has no gradients: their norms are not compared with DDP's
    engine.settle()          completes transfers in flight when the steps are over
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn, optim

from ..zero.precision import LossScaler
from .spec import StrategySpec


class LossScale(Protocol):
    """Loss scaling, as read by the harness; tensors are 0-dim, on the device, and change in place. `scale`: the factor
    of the next loss, 1 without scaling. `skipped`: 1 if the last step was skipped, otherwise 0.
    """

    @property
    def scale(self) -> torch.Tensor | float: ...
    @property
    def skipped(self) -> torch.Tensor | float: ...


class Engine(Protocol):
    """The object that the harness trains with: a model and its optimizer under a strategy, on one rank."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def optimizer(self) -> optim.Optimizer: ...
    @property
    def scaler(self) -> LossScale: ...
    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any: ...
    def backward(self, loss: torch.Tensor) -> None: ...
    def step(self) -> Any: ...
    def no_sync(self) -> AbstractContextManager[Any]: ...
    def settle(self) -> None: ...

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales the gradients down to the global norm `max_norm`; returns the norm before, 0-dim."""

    def reduced_gradients(self) -> Iterable[torch.Tensor]:
        """Yields this rank's part of the reduced gradients, multiplied by the loss scale; none if they are not visible.
        Read a tensor before asking for the next.
        """

    @property
    def gradient_holders(self) -> int:
        """Number of ranks with the same part of the gradients."""


REQUIRED = ("__call__", "backward", "step", "zero_grad")


UNSCALED = LossScaler(None, torch.device("cpu"))
"""Losses are multiplied by 1, and no step is skipped."""


class PeerEngine:
    """Defaults of the protocol `Engine`, for engines that leave gradients on the parameters: DDP, peers, users'."""

    module: nn.Module
    optimizer: optim.Optimizer
    scaler = UNSCALED
    shares_gradients = False
    hides_gradients = False

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        return self.module(*inputs, **named_inputs)

    def backward(self, loss: torch.Tensor) -> None:
        """Backpropagates; gradients are reduced by the engine's hooks."""
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
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
    """A user's engine, completed (see above). Raises TypeError for a lacking method. `clips`: the run clips."""

    def __init__(
        self, spec: StrategySpec, engine: Any, module: nn.Module, optimizer: optim.Optimizer, clips: bool
    ) -> None:
        required = (*REQUIRED, *(("clip_grad_norm_",) if clips else ()))
        missing = [name for name in required if not callable(getattr(engine, name, None))]
        if missing:
            why = "; clip needs it" if missing == ["clip_grad_norm_"] else ""
            problem = f"its engine, {type(engine).__name__}, has no method {' and no '.join(missing)}{why}"
            raise TypeError(f"strategy={spec.name}: {problem}")
        self._engine = engine
        self.module = getattr(engine, "module", module)
        self.optimizer = getattr(engine, "optimizer", optimizer)
        self.shares_gradients = bool(getattr(engine, "shares_gradients", False))
        self.hides_gradients = bool(getattr(engine, "hides_gradients", False))
        self.save = getattr(engine, "save", None)

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        return self._engine(*inputs, **named_inputs)

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss)

    def step(self) -> None:
        self._engine.step()
        self._engine.zero_grad()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        norm: torch.Tensor = self._engine.clip_grad_norm_(max_norm, norm_type)
        return norm

    def no_sync(self) -> AbstractContextManager[Any]:
        """Returns the engine's own context; without one backward reduces every micro-batch."""
        own = getattr(self._engine, "no_sync", None)
        return nullcontext() if own is None else own()

    def settle(self) -> None:
        if (own := getattr(self._engine, "settle", None)) is not None:
            own()
