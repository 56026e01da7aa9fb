"""A leaf for every use of a tied parameter.

Autograd sums the gradients of one leaf before it hands them over: of a head tied to its embedding it keeps
the head's gradient through the whole backward, and at the end holds three of that size. With a leaf a use
each gradient is handed over when it is made, and the sum is taken, in the same order, where gradients are
gathered anyway.

A use's leaf stands in its module only while that runs: outside of a forward the module's parameter is the
one that it was, so names, identity and `parameters()` are untouched.

A parameter with hooks of the user's has no such leaves: they are owed the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .modules import Hook


class TiedPlace:
    """`module.name` is one of several places of a tied `parameter`; `made` hears of the leaf of each use."""

    def __init__(
        self, parameter: nn.Parameter, module: nn.Module, name: str, made: Callable[[nn.Parameter], None]
    ) -> None:
        self._parameter = parameter
        self._module = module
        self._name = name
        self._made = made
        module.register_forward_pre_hook(Hook(self._put_leaf))
        module.register_forward_hook(Hook(self._take_back), always_call=True)

    def _put_leaf(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not self._parameter._backward_hooks:
            leaf = nn.Parameter(self._parameter.detach())  # the same memory and version counter
            self._made(leaf)
            self._module._parameters[self._name] = leaf

    def _take_back(self, *_: Any) -> None:
        self._module._parameters[self._name] = self._parameter


def tied_places(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """(module, name) of every place of each trainable parameter that has more than one."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                places.setdefault(parameter, []).append((module, name))
    return {parameter: found for parameter, found in places.items() if len(found) > 1}
