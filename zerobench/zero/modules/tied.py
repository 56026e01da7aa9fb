"""The uses of a tied parameter, each with a gradient of its own.

Autograd sums the gradients of one leaf before it hands them over: of a head tied to its embedding it keeps
the head's gradient through the whole backward, and at the end holds three of that size. Here each use in a
module is an *alias*: a tensor over the parameter's memory, made by a Function whose backward gives the use's
gradient to the engine and nothing to the parameter. The sum is taken, in the same order, where gradients are
gathered anyway; when autograd comes to the parameter itself, all its uses have been.

An alias stands in its module only while that runs, is a Parameter of the same class, and has the parameter's own
attributes. Gradients take autograd's way, summed, where the parameter is owed them: for torch.autograd.grad, for
another engine's backward, and for hooks on it, which may be registered at any time.

Inside of a forward `first.weight is second.weight` does not hold, nor is an alias a leaf; outside both hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .wrapping import Hook

Take = Callable[[torch.Tensor], torch.Tensor | None]
"""Given the gradient of a use: what of it is to go on to the parameter."""


class TiedPlace:
    """`module.name` is one of several places of a tied `parameter`; `take` gets the gradient of each use."""

    def __init__(self, parameter: nn.Parameter, module: nn.Module, name: str, take: Take) -> None:
        self._parameter = parameter
        self._module = module
        self._name = name
        self._take = take
        self._alias: nn.Parameter | None = None
        module.register_forward_pre_hook(Hook(self._put_alias))
        module.register_forward_hook(Hook(self._take_back), always_call=True)

    def _put_alias(self, *_: Any) -> None:
        places = self._module._parameters
        is_there = places.get(self._name) is self._parameter  # and not what functional_call has put in its place
        if is_there and self._parameter.requires_grad and torch.is_grad_enabled():
            places[self._name] = self._alias = alias_of(self._parameter, self._take)

    def _take_back(self, *_: Any) -> None:
        alias, self._alias = self._alias, None
        if alias is not None and self._module._parameters.get(self._name) is alias:
            self._module._parameters[self._name] = self._parameter


def alias_of(parameter: nn.Parameter, take: Take) -> nn.Parameter:
    """Another tensor of the parameter's class, attributes, memory and version counter, for one use."""
    alias: nn.Parameter = _Use.apply(parameter, take)
    alias.__class__ = type(parameter)
    alias.__dict__ = parameter.__dict__
    return alias


class _Use(torch.autograd.Function):
    """The identity. Backward gives the gradient to `take`; one that is not there stays so."""

    generate_vmap_rule = True

    @staticmethod
    def forward(parameter: torch.Tensor, _take: Take) -> torch.Tensor:
        return parameter.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, Take], output: torch.Tensor) -> None:
        ctx.take = inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return (None if gradient is None else ctx.take(gradient)), None


class ArrivalHook:
    """The engine's hook on a parameter: called when autograd has made its gradient, after all hooks of the user's.

    Names of torch's own, tested: `_backward_hooks` and `_post_accumulate_grad_hooks` of parameters.
    """

    def __init__(self, parameter: nn.Parameter, arrive: Callable[[torch.Tensor], None]) -> None:
        self._parameter = parameter
        self._handle = parameter.register_post_accumulate_grad_hook(arrive)

    @property
    def is_alone(self) -> bool:
        """Whether nobody else is owed the parameter's gradient."""
        return not self._parameter._backward_hooks and len(self._registered) == 1

    def go_last(self) -> None:
        """Hooks that were registered since will find the gradient, too."""
        if next(reversed(self._registered)) != self._handle.id:
            self._registered[self._handle.id] = self._registered.pop(self._handle.id)

    @property
    def _registered(self) -> Any:
        return self._parameter._post_accumulate_grad_hooks


def tied_places(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """(module, name) of every place of each trainable parameter that has more than one."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                places.setdefault(parameter, []).append((module, name))
    return {parameter: found for parameter, found in places.items() if len(found) > 1}
