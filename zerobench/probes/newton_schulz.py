"""Counts the Newton-Schulz orthogonalizations that torch's Muon computes, beneath every engine.

A step orthogonalizes each matrix once: on one rank if matrices are owned, on all if they are replicated. An engine that
does so in each micro-batch, for another number of matrices, or not at all, has a different count.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch.optim import _muon

from ..zero.optim.segments import cost_of


class NewtonSchulz:
    """Counts, while it is entered, `calls` of torch's function, and `flops` of all its iterations."""

    def __init__(self) -> None:
        self.calls = self.flops = 0
        self._counted = _muon._zeropower_via_newtonschulz  # torch-private, tested

    def __enter__(self) -> Self:
        _muon._zeropower_via_newtonschulz = self._count  # type: ignore[assignment]
        return self

    def __exit__(self, *error: object) -> None:
        _muon._zeropower_via_newtonschulz = self._counted

    def begin(self) -> None:
        """Resets the counts."""
        self.calls = self.flops = 0

    def _count(self, grad: torch.Tensor, coefficients: Any, steps: int, eps: float) -> torch.Tensor:
        self.calls += 1
        self.flops += steps * cost_of(grad.shape)
        return self._counted(grad, coefficients, steps, eps)
