"""Values of a step, which on a GPU are read when the steps are over: loss, norms, loss scale, skipped or not.

The harness measures the norm of gradients in the same way for every strategy: from the tensors, not from an engine's
value.

Each rank sums the squares of its gradients between backward and update, in fp64; nothing is sent. The sum over the
ranks, without the duplicates of replicas, is the square of the norm, and is computed at the end (aggregate.py). The
order of the sum differs between strategies, which in fp64 changes it by about 1e-15.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..strategies import Engine
from ..zero.precision import sum_of_powers
from .labeling import parts_of


@dataclass(frozen=True)
class StepResult:
    """Values of one step on one rank, as in StepRow."""

    loss: float
    clip_norm: float | None
    loss_scale: float
    skipped: bool
    grad_squares: float | None


@dataclass(frozen=True)
class StepValues:
    """Values of a step that may still be on the device; `read` waits for it."""

    loss: torch.Tensor
    clip_norm: torch.Tensor | None
    loss_scale: torch.Tensor | float
    skipped: torch.Tensor | float
    grad_squares: torch.Tensor | None

    def read(self) -> StepResult:
        """Returns the values as numbers, after waiting for the device."""
        norm, squares = (None if one is None else one.item() for one in (self.clip_norm, self.grad_squares))
        return StepResult(self.loss.item(), norm, float(self.loss_scale), bool(self.skipped), squares)


def scale_of(engine: Engine) -> torch.Tensor | float:
    """Returns the factor of an engine's next loss; a copy, because it changes in place."""
    scale = engine.scaler.scale
    return scale.clone() if isinstance(scale, torch.Tensor) else scale


def squares(gradients: Iterable[torch.Tensor], scale: torch.Tensor | float) -> torch.Tensor | None:
    """Returns Σ g² over this rank's part of the reduced gradients, unscaled, 0-dim fp64 on the device; None if there
    are none. `scale`: the factor of the loss.
    """
    total: torch.Tensor | None = None
    with torch.no_grad():
        for gradient in gradients:
            for held in parts_of(gradient):  # of a DTensor this rank's shard
                part = sum_of_powers([held.reshape(-1)], 2.0, held.device)
                total = part if total is None else total + part.to(total.device)
    return None if total is None else total / scale / scale
