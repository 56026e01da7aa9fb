"""Values of a step, which on a GPU are read when the steps are over: loss, norms, loss scale, skipped or not."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..strategies import Engine


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


def scale_of(engine: Engine) -> torch.Tensor | float:
    """The factor of an engine's next loss; a copy, for it changes in place."""
    scale = engine.scaler.scale
    return scale.clone() if isinstance(scale, torch.Tensor) else scale
