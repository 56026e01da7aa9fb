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

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn, optim


class LossScale(Protocol):
    """Loss scaling, as read by the harness; tensors are 0-dim, on the device, and change in place."""

    @property
    def scale(self) -> torch.Tensor | float:
        """The factor of the next loss."""

    @property
    def skipped(self) -> torch.Tensor | float:
        """1 if the last step was skipped, otherwise 0."""


class Engine(Protocol):
    """The object that the harness trains with: a model and its optimizer under a strategy, on one rank."""

    @property
    def module(self) -> nn.Module:
        """The model that the engine was built over."""

    @property
    def optimizer(self) -> optim.Optimizer:
        """The optimizer that holds this rank's states."""

    @property
    def scaler(self) -> LossScale:
        """Loss scaling; a scale of 1 if there is none."""

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Runs the module's forward."""

    def backward(self, loss: torch.Tensor) -> None:
        """Backpropagates; the gradients are reduced, except under `no_sync`."""

    def step(self) -> Any:
        """Makes one update; consumes the gradients."""

    def no_sync(self) -> AbstractContextManager[Any]:
        """Backwards inside keep their gradients on this rank, if the strategy can."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales the gradients down to the global norm `max_norm`; returns the norm before, 0-dim."""

    def settle(self) -> None:
        """Completes transfers in flight after the last step, such as gathers that overlap the next forward."""

    def reduced_gradients(self) -> Iterable[torch.Tensor]:
        """Yields this rank's part of the reduced gradients, multiplied by the loss scale; none if they are not visible.
        Read a tensor before asking for the next.
        """

    @property
    def gradient_holders(self) -> int:
        """Number of ranks with the same part of the gradients."""


REQUIRED = ("__call__", "backward", "step", "zero_grad")
