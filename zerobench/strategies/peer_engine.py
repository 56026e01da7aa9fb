"""The common part of engines that leave gradients on the parameters: DDP, the peers, users' engines."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from ..zero.precision import LossScaler

UNSCALED = LossScaler(None, torch.device("cpu"))
"""Losses are multiplied by 1, and no step is skipped."""


class PeerEngine:
    """Defaults of the protocol `Engine` (engine.py).

    `shares_gradients`  `.grad` between backward and update is this rank's part, disjoint from the others'
    `hides_gradients`   `.grad` says nothing then: gradients are in buffers of the engine's own
    """

    module: nn.Module
    scaler = UNSCALED
    shares_gradients = False
    hides_gradients = False

    def settle(self) -> None:
        """Nothing is on its way after a step."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Raises NotImplementedError, a sentence: to clip, an engine has a method of its own."""
        raise NotImplementedError(f"clip: {type(self).__name__} cannot clip gradients; leave clip out")

    def reduced_gradients(self) -> Iterator[torch.Tensor]:
        """This rank's part of the reduced gradients, DTensors among them; none where they are hidden."""
        for parameter in () if self.hides_gradients else self.module.parameters():
            if parameter.grad is not None:
                yield parameter.grad

    @property
    def gradient_holders(self) -> int:
        """Ranks that hold the same part of the gradients: all, where every rank has the whole mean."""
        return 1 if self.shares_gradients else dist.get_world_size()
