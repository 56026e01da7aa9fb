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

from functools import partial

import torch

from . import labels
from .comm.base import Comm
from .comm.reductions import Reduction
from .gradients.bucket import GradientBucket
from .offload.placement import GradientSink
from .protocols import UnitView
from .stage1 import Stage1
from .units.unit import Unit


class ShardedBucket(GradientBucket):
    """Full gradients while they are in flight, and a shard of their mean from the reduction to the update."""

    def __init__(
        self, unit: UnitView, comm: Comm, reduction: Reduction, sink: GradientSink | None, offloaded: int
    ) -> None:
        super().__init__(unit, comm, reduction, sink, offloaded)
        numel = unit.layout.shard_numel - self.offloaded_numel
        self.shard = torch.zeros(numel, dtype=unit.dtypes.gradients, device=unit.device)
        if self.is_alone:
            self.full = self.shard
        else:
            unit.heap.release(self.shard)  # one tensor for life; its memory comes with the first reduction
        self._lands_in_shard = sink is None and unit.dtypes.wire == unit.dtypes.gradients and reduction.sums_own_slice

    def open(self, sends: bool) -> None:
        if self.full is not None:  # at N = 1, or a sum that no_sync has kept
            return
        # what is sent next is made as it travels, which saves a copy; a sum keeps its own dtype until it is sent
        dtypes = self.unit.dtypes
        travels, kept = (dtypes.wire, labels.COMMUNICATION), (dtypes.gradients, labels.GRADIENTS)
        self.full = self.take_memory(*(travels if sends else kept))

    def cast(self) -> torch.Tensor:
        """See the base; what was cast from goes before there is memory for the mean."""
        wire = super().cast()
        if wire is not self.full:
            assert self.full is not None
            self.unit.heap.give_back(self.full)
            self.full = wire
        return wire

    def target(self) -> torch.Tensor | None:
        if self.is_reduced or not self._lands_in_shard:  # the mean of a further micro-batch is added
            return None
        self.unit.heap.restore(self.shard)
        return self.shard

    def wait(self) -> None:
        mean = self.reduced_slice()
        if mean is not self.shard:
            self._keep(mean)
        # ZeRO-2 is this line: of a bucket that is reduced the shard stays, and all other memory goes back
        self._release_full()
        self.end_round()

    def release(self) -> None:
        super().release()
        if not self.is_alone:
            self._release_full()
            self.unit.heap.release(self.shard)

    def _keep(self, mean: torch.Tensor) -> None:
        """Puts the mean, (shard_numel,), where the optimizer will look, or adds it to what is there."""
        if self.sink is not None:
            self.sink.take(mean.narrow(0, 0, self.offloaded_numel), adds=self.is_reduced)
            mean = mean.narrow(0, self.offloaded_numel, self.shard.numel())
        if self.is_reduced:
            self.shard.add_(mean)
        else:
            self.unit.heap.restore(self.shard)
            self.shard.copy_(mean)

    def _release_full(self) -> None:
        """The memory goes now, whatever thread of gloo's still holds the tensor."""
        full, self.full = self.full, None
        if full is None:
            return
        give_back = partial(self.unit.heap.give_back, full)
        if self.sink is None:
            give_back()
        else:  # once a copy to another tier has read from it
            self.sink.release(give_back)


class Stage2(Stage1):
    """Optimizer states and gradients partitioned."""

    stage = 2

    def new_bucket(self, unit: Unit) -> GradientBucket:
        sink, offloaded = self.places.sink(unit), unit.leaving
        return ShardedBucket(unit, self.comm, self.options.reduction, sink, offloaded)
