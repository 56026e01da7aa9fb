"""Skips random initialization whose values are never read."""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.graph
from torch.overrides import TorchFunctionMode

DRAWS = ("normal_", "uniform_", "bernoulli_", "random_", "exponential_", "geometric_", "log_normal_", "cauchy_")
"""torch's in-place draws."""


class Undrawn(TorchFunctionMode):
    """Skips every in-place draw. A meta tensor has no values to draw, but torch would load its compiler to find that
    out, which takes a second of CPU.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls `func`, or returns the tensor that it would fill."""
        named = kwargs or {}
        if getattr(func, "__name__", "") not in DRAWS:
            return func(*args, **named)
        tensor: torch.Tensor = args[0] if args else named["tensor"]  # torch.nn.init's functions pass it by name
        torch.autograd.graph.increment_version(tensor)  # versions tell what was drawn
        return tensor
