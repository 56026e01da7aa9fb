"""ZeRO-2, P_os+g: gradients are partitioned too (ZeRO, arXiv 1910.02054, section 5.2).

As stage 1, but a bucket's full gradients live only from the first gradient that falls into it until its
reduction is done; what remains, until the update, is the own shard of the mean::

    reduce    a bucket fills, is sent, and its memory is given back           ψ on the wire a micro-batch
    update    as stage 1
    gather    as stage 1                                                      ψ on the wire

In fp32: 4ψ parameters + 4ψ/N gradients + 8ψ/N optimizer states for Adam, and two buckets in flight.
In half precision with fp32 masters: 2ψ + 2ψ/N + 12ψ/N.
"""

from __future__ import annotations

import torch

from . import labels
from .gradients.flow import REDUCTIONS_IN_FLIGHT
from .stage1 import Stage1
from .units.unit import Unit


class Stage2(Stage1):
    """Optimizer states and gradients partitioned."""

    stage = 2

    def place_gradients(self, unit: Unit) -> None:
        unit.gradient_shard = unit.new_gradient_shard()
        if unit.is_alone:
            unit.full_gradients = unit.gradient_shard
        else:
            unit.free_gradient_shard()

    def open_gradients(self, unit: Unit) -> None:
        if unit.full_gradients is None:
            kept = (unit.dtypes.gradients, labels.GRADIENTS)  # under no_sync: a sum, to be cast when it is sent
            sent = (unit.dtypes.wire, labels.COMMUNICATION)
            unit.full_gradients = unit.new_full_gradients(*(sent if self.gradients.synchronizing else kept))

    def most_in_flight(self, unit: Unit) -> int:
        """A bucket has memory until its reduction is done."""
        return REDUCTIONS_IN_FLIGHT

    def send_gradients(self, unit: Unit) -> None:
        unit.drop_full()

    def place_for_mean(self, unit: Unit) -> torch.Tensor | None:
        if unit.reduced or not unit.sums_in_place or not self.options.sums_own_slice:
            return None
        unit.allocate_gradient_shard()
        return unit.gradient_shard

    def close_gradients(self, unit: Unit, mean: torch.Tensor) -> None:
        if mean is unit.gradient_shard:
            return
        mean = unit.send_away(mean)
        if unit.reduced:
            unit.gradient_shard.add_(mean)
        else:
            unit.allocate_gradient_shard()
            unit.gradient_shard.copy_(mean)

    def release_gradients(self, unit: Unit) -> None:
        if not unit.is_alone:
            unit.drop_full()
            unit.free_gradient_shard()
