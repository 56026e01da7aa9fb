"""A user's engine as the harness sees it: the optional parts completed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn, optim

from .engine import REQUIRED
from .peer_engine import PeerEngine
from .spec import StrategySpec


class AdaptedEngine(PeerEngine):
    """A user's engine with the optional parts completed, as engine.py lists them.

    Raises TypeError, a sentence, for an engine that lacks a method. `clips`: the run clips gradients.
    """

    skipped = False
    loss_scale = 1.0

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
        """The module's forward."""
        return self._engine(*inputs, **named_inputs)

    def backward(self, loss: torch.Tensor) -> None:
        """Backpropagates."""
        self._engine.backward(loss)

    def step(self) -> None:
        """One update; the gradients are dropped after it."""
        self._engine.step()
        self._engine.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients."""
        self._engine.zero_grad()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """The engine's own."""
        norm: torch.Tensor = self._engine.clip_grad_norm_(max_norm, norm_type)
        return norm

    def no_sync(self) -> AbstractContextManager[Any]:
        """The engine's own; without one backward reduces every micro-batch."""
        own = getattr(self._engine, "no_sync", None)
        return nullcontext() if own is None else own()

    def settle(self) -> None:
        """Completes what the engine has on its way after the last step, where it knows of such a thing."""
        own = getattr(self._engine, "settle", None)
        if own is not None:
            own()
