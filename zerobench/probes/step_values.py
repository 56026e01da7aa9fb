"""Values of a step, which on a GPU are read when the steps are over: loss, norms, loss scale, skipped or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


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
        """Returns numbers, after waiting for the device."""
        norm, squares = (None if one is None else one.item() for one in (self.clip_norm, self.grad_squares))
        return StepResult(self.loss.item(), norm, float(self.loss_scale), bool(self.skipped), squares)


def scale_of(engine: Any) -> torch.Tensor | float:
    """Returns the factor of an engine's next loss; a copy, since it changes. 1 for peers' engines."""
    scale = engine.scaler.scale if hasattr(engine, "scaler") else 1.0
    return scale.clone() if isinstance(scale, torch.Tensor) else scale


def skipped_by(engine: Any) -> torch.Tensor | float:
    """Returns 1 where an engine's last step was skipped, else 0, as a number on the device."""
    return engine.scaler.skipped if hasattr(engine, "scaler") else 0.0
