"""Phases of a step of a loop that names none.

forward     from the model's call until backward is called: the loss is part of it
backward    torch.autograd.backward, which Tensor.backward and every library calls
update      an optimizer's step, whichever it is, with those that it calls itself
data        all else: drawing a batch, zero_grad, logging
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Listener(Protocol):
    """Hears of a loop's phases."""

    def enter_phase(self, phase: str) -> None:
        """A phase begins."""

    def on_inputs(self, given: Any) -> None:
        """The model is called with these arguments; its forward is next."""

    def on_loss(self, tensors: Any) -> None:
        """Backward is called on these tensors."""

    def after_backward(self) -> None:
        """Gradients are there."""


class Phases(AbstractContextManager["Phases"]):
    """Hooks of a model, of backward and of all optimizers, from enter to exit."""

    def __init__(self, model: nn.Module, listener: Listener) -> None:
        self._model, self._listener = model, listener
        self._updates = 0  # an optimizer may call another one's step
        self._stack = ExitStack()

    def __enter__(self) -> Phases:
        for hook in (
            self._model.register_forward_pre_hook(self._before_forward, with_kwargs=True, prepend=True),
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ):
            self._stack.callback(hook.remove)
        self._stack.enter_context(_backward_heard(self._listener))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _before_forward(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._updates = 0  # also where an update has ended with an error
        self._listener.on_inputs((args, kwargs))
        self._listener.enter_phase("forward")

    def _before_update(self, *_: Any) -> None:
        self._updates += 1
        self._listener.enter_phase("update")

    def _after_update(self, *_: Any) -> None:
        self._updates -= 1
        if self._updates <= 0:
            self._listener.enter_phase("data")


@contextmanager
def _backward_heard(listener: Listener) -> Iterator[None]:
    backward = torch.autograd.backward

    def heard(tensors: Any, *args: Any, **kwargs: Any) -> None:
        listener.on_loss(tensors)
        listener.enter_phase("backward")
        try:
            backward(tensors, *args, **kwargs)
            listener.after_backward()
        finally:
            listener.enter_phase("data")

    torch.autograd.backward = heard
    try:
        yield
    finally:
        torch.autograd.backward = backward


def tensors_in(given: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested tuples, lists and mappings."""
    if isinstance(given, torch.Tensor):
        yield given
    elif depth and isinstance(given, dict):
        for one in given.values():
            yield from tensors_in(one, depth - 1)
    elif depth and isinstance(given, tuple | list):
        for one in given:
            yield from tensors_in(one, depth - 1)
