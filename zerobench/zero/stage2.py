"""ZeRO-2, P_os+g: gradients are partitioned too (ZeRO, arXiv 1910.02054, section 5.2).

As stage 1, but a bucket's full gradients live only from the first gradient that falls into it until its
reduction is done; what remains is the own shard of the mean::

    reduce    a bucket fills, is sent, and its memory is given back           ψ on the wire a micro-batch
    update    as stage 1
    gather    as stage 1                                                      ψ on the wire

In fp32: 4ψ parameters + 4ψ/N gradients + 8ψ/N optimizer states for Adam, and two buckets in flight.
"""

from __future__ import annotations

import torch

from . import labels
from .stage1 import Stage1
from .unit import Unit


class Stage2(Stage1):
    """Optimizer states and gradients partitioned."""

    stage = 2

    def allocate_gradients(self, flat: torch.Tensor) -> torch.Tensor | None:
        return None

    def place_gradients(self, unit: Unit, gradients: torch.Tensor | None, start: int) -> None:
        unit.gradient_shard = torch.zeros_like(unit.parameter_shard)
        if self.comm.size == 1:
            unit.full_gradients = unit.gradient_shard

    def open_gradients(self, unit: Unit) -> None:
        if unit.full_gradients is None:
            unit.full_gradients = unit.gradient_shard.new_empty(unit.layout.padded_numel)
            labels.label(unit.full_gradients, labels.COMMUNICATION, unit.name)

    def close_gradients(self, unit: Unit) -> None:
        assert unit.full_gradients is not None
        mean = unit.own_slice(unit.full_gradients)
        if unit.reduced:
            unit.gradient_shard.add_(mean)
        else:
            unit.gradient_shard.copy_(mean)
        unit.full_gradients = None

    def forget(self) -> None:
        super().forget()
        if self.comm.size > 1:
            for unit in self.units:
                unit.full_gradients = None
