"""What an engine offers: the little that a user's must have, and the rest that the harness completes.

    engine(*inputs)          the module's forward, which returns the loss
    engine.backward(loss)    backpropagates; afterwards the gradients are reduced, or are not yet under `no_sync`
    engine.step()            one update of the parameters, from the gradients of the micro-batches since the last
    engine.zero_grad()       drops the gradients; called after each step

These four it must have. What else the harness asks for, and what stands in its place where an engine has no such thing:

    engine.no_sync()         a context in which backward reduces nothing: without it every micro-batch is reduced
    engine.clip_grad_norm_(max_norm, norm_type)    returns the global norm before: without it `clip` is refused
    engine.optimizer, engine.module                the ones that the engine was built over
    engine.shares_gradients = True                 `.grad` after backward is this rank's part, disjoint from the others'
    engine.hides_gradients = True                  `.grad` says nothing: gradient norms are not compared with DDP's
    engine.settle()          completes what is still on its way when the steps are over
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from .spec import StrategySpec

if TYPE_CHECKING:
    import torch
    from torch import nn, optim

REQUIRED = ("__call__", "backward", "step", "zero_grad")


class UserEngine(Protocol):
    """What `build` of a user's strategy must return."""

    def __call__(self, *inputs: Any, **named_inputs: Any) -> torch.Tensor:
        """The module's forward: the loss, a scalar."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Backpropagates the loss of one micro-batch."""
        ...

    def step(self) -> Any:
        """One update of the parameters."""
        ...

    def zero_grad(self) -> None:
        """Drops the gradients."""
        ...


class AdaptedEngine:
    """A user's engine with the optional parts completed, as the module's docstring lists them.

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
