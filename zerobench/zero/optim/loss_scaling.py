"""The factor of a step's gradients on their way to the optimizer: the loss scale out, and clipping.

clip      the norm of what is left so far; a further call clips that
judge     with loss scaling: did a gradient overflow? A norm that clipping has taken says so, too
forget    the gradients are gone
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import optim

from ..precision import LossScaler, LossScaling, clip_coefficient

Norm = Callable[[float], torch.Tensor]
"""Given its p: the norm of all gradients as they are, 0-dim fp64."""


class GradientScaling:
    """`coefficient`: what `update_tiles` is to multiply by, 0-dim; None: nothing."""

    def __init__(self, policy: LossScaling | None, device: torch.device, norm: Norm) -> None:
        self.scaler = LossScaler(policy, device)
        self.coefficient: torch.Tensor | float | None = None
        self._norm = norm
        self._known: torch.Tensor | None = None  # a norm of these gradients, if clipping has asked for one

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool = False) -> torch.Tensor:
        """The norm of the unscaled gradients, 0-dim fp32; what is left of it is `max_norm` at most, as in torch."""
        pending = self.pending
        self._known = norm = self._norm(norm_type) * pending
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"clip_grad_norm_: the norm of the gradients is {norm.item()}, and error_if_nonfinite=True wants a"
                " finite one; the gradients are as they were: call zero_grad(), or clip without error_if_nonfinite"
            )
        self.coefficient = clip_coefficient(norm, max_norm) * pending
        return norm.float()

    @property
    def pending(self) -> torch.Tensor | float:
        """The factor of gradients by the time that the optimizer gets them, as far as is known."""
        return self.scaler.unscaling if self.coefficient is None else self.coefficient

    def edited(self) -> None:
        """Gradients may have been changed: a norm that was taken says nothing of overflows any more."""
        self._known = None

    @contextmanager
    def judging(self, optimizer: optim.Optimizer) -> Iterator[bool]:
        """Around the optimizer's step: LossScaler.judging, with the coefficient as the step needs it."""
        if self.coefficient is None and self.scaler.policy is not None:
            self.coefficient = self.scaler.unscaling
        with self.scaler.judging(optimizer, self._overflow) as skips:
            yield skips

    def forget(self) -> None:
        """Forgets all that was found out about the gradients."""
        self.coefficient = self._known = None

    def _overflow(self) -> torch.Tensor:
        """1 where a gradient overflowed anywhere, else 0; 0-dim fp32."""
        norm = self._norm(math.inf) if self._known is None else self._known
        return norm.isfinite().logical_not().float()
