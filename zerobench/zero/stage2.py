"""ZeRO-2, P_os+g: gradients are partitioned too (ZeRO, arXiv 1910.02054, section 5.2).

Like stage 1, but a bucket's full gradients exist only from its first gradient until its reduction is done; only the
rank's own shard of the mean remains until the update::

    reduce    a bucket fills, is sent, and its memory is freed                ψ sent per micro-batch
    update    as in stage 1
    gather    as in stage 1                                                   ψ sent

In fp32: 4ψ parameters + 4ψ/N gradients + 8ψ/N optimizer states for Adam, and two buckets in flight.
In half precision with fp32 masters: 2ψ + 2ψ/N + 12ψ/N.
"""

from __future__ import annotations

import torch

from . import labels
from .comm.base import Comm
from .offload.placement import GradientSink
from .stage1 import Stage1
from .units.bucket import GradientBucket
from .units.unit import Unit


class ShardedBucket(GradientBucket):
    """Full gradients until they are reduced, and a shard of their mean from the reduction to the update."""

    def __init__(self, unit: Unit, comm: Comm, reduce_with: str, sink: GradientSink | None) -> None:
        super().__init__(unit, comm, reduce_with, sink)
        self.shard = torch.zeros(self.kept_numel, dtype=unit.dtypes.gradients, device=unit.device)
        unit.heap.release(self.shard)  # one tensor for life; its memory comes with the first gradient or reduction
        self._lands_in_shard = sink is None and unit.dtypes.wire == unit.dtypes.gradients and not self.all_reduces

    def open(self, sends: bool) -> None:
        if self.full is not None:  # a sum that no_sync has kept
            return
        if self.is_alone:
            self.unit.heap.restore(self.shard)
            self.full = self.shard
            return
        # a gradient that is sent next is made in the wire's dtype, which saves a copy; a sum keeps its own until sent
        dtypes = self.unit.dtypes
        travels, kept = (dtypes.wire, labels.COMMUNICATION), (dtypes.gradients, labels.GRADIENTS)
        self.full = self.take_memory(*(travels if sends else kept))

    def cast(self) -> torch.Tensor:
        """See the base; frees the tensor that was cast before memory for the mean is allocated."""
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

    def store(self, mean: torch.Tensor) -> None:
        if mean is not self.shard:
            self.keep(mean)
        # ZeRO-2 is this line: only the shard of a reduced bucket stays, and all its other memory is freed
        self.release_full()

    def release(self) -> None:
        super().release()
        if self.is_alone:
            self.full = None
        self.release_full()
        self.unit.heap.release(self.shard)


class Stage2(Stage1):
    """Optimizer states and gradients partitioned."""

    stage = 2

    def new_bucket(self, unit: Unit) -> GradientBucket:
        return ShardedBucket(unit, self.comm, self.options.reduce_with, self.placement.new_sink(unit))
