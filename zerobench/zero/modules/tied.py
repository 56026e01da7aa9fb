"""The uses of a tied parameter, each with its own gradient.

Autograd sums the gradients of one leaf before it delivers them: for a head tied to its embedding it keeps the head's
gradient through the whole backward, and at the end holds three tensors of that size. Here each use in a module is an
*alias*: a tensor over the parameter's memory, made by a Function whose backward passes the use's gradient to the
engine and none to the parameter. The sum is computed, in the same order, where gradients are accumulated anyway; when
autograd reaches the parameter itself, all its uses have been handled.

An alias replaces the parameter in its module only while that module runs, is a Parameter of the same class, and has the
parameter's own attributes. If the parameter itself needs the summed gradient, autograd sums as usual: for
torch.autograd.grad, for another engine's backward, and for hooks on the parameter, which may be registered at any time.

Inside of a forward `first.weight is second.weight` is False, and an alias is not a leaf; outside both are as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .wrapping import Hook

Take = Callable[[torch.Tensor], torch.Tensor | None]
"""Takes the gradient of one use and returns the part that is passed on to the parameter."""


class TiedName:
    """One of several names, `module.name`, of a tied `parameter`; `take` receives the gradient of each use."""

    def __init__(self, parameter: nn.Parameter, module: nn.Module, name: str, take: Take) -> None:
        self._parameter = parameter
        self._module = module
        self._name = name
        self._take = take
        self._alias: nn.Parameter | None = None
        module.register_forward_pre_hook(Hook(self._put_alias))
        module.register_forward_hook(Hook(self._take_back), always_call=True)

    def _put_alias(self, *_: Any) -> None:
        parameters = self._module._parameters
        is_present = parameters.get(self._name) is self._parameter  # False if functional_call has replaced it
        if is_present and self._parameter.requires_grad and torch.is_grad_enabled():
            alias: nn.Parameter = _Use.apply(self._parameter, self._take)
            alias.__class__ = type(self._parameter)
            alias.__dict__ = self._parameter.__dict__
            parameters[self._name] = self._alias = alias

    def _take_back(self, *_: Any) -> None:
        alias, self._alias = self._alias, None
        if alias is not None and self._module._parameters.get(self._name) is alias:
            self._module._parameters[self._name] = self._parameter


class _Use(torch.autograd.Function):
    """The identity, whose backward passes the gradient to `take`; an undefined gradient stays undefined."""

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


def names_of_tied(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Returns trainable parameter -> (module, name) of all its names, for parameters with more than one."""
    names: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                names.setdefault(parameter, []).append((module, name))
    return {parameter: several for parameter, several in names.items() if len(several) > 1}
