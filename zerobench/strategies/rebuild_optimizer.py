"""The user's optimizer over other tensors, for engines that put theirs in the place of the module's parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim


def options_of(optimizer: optim.Optimizer) -> dict[str, Any]:
    """The options that `optimizer` was constructed with, beside its parameters."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    return {key: value for key, value in optimizer.defaults.items() if key in accepted}


def rebuilt(optimizer: optim.Optimizer, other: Callable[[nn.Parameter], torch.Tensor]) -> optim.Optimizer:
    """A fresh optimizer of the same kind, groups and options, over `other(parameter)` for each parameter."""
    groups = [{**group, "params": [other(p) for p in group["params"]]} for group in optimizer.param_groups]
    return type(optimizer)(groups, **options_of(optimizer))
