"""ZeRO-2, P_os+g: gradients are partitioned too (ZeRO, arXiv 1910.02054, section 5.2).

Like stage 1, but a bucket's full gradients exist only from its first gradient until its reduction is done; only the
rank's own shard of the mean remains until the update::

    reduce    a bucket fills, is sent, and its memory is freed                ψ sent per micro-batch
    update    as in stage 1
    gather    as in stage 1                                                   ψ sent

In bytes per rank, in fp32: 4ψ parameters + 4ψ/N gradients + 8ψ/N optimizer states for Adam, and two full buckets: one
being reduced, one being filled.
In half precision with fp32 masters: 2ψ + 2ψ/N + 12ψ/N.
"""

from __future__ import annotations

from functools import partial

import torch

from . import labels
from .bucket import GradientBucket, GradientSink
from .comm.base import Comm
from .stage1 import Stage1
from .units.unit import Unit


class ShardedBucket(GradientBucket):
    """Full gradients until they are reduced, and a shard of their mean from the reduction to the update. With a `sink`
    the mean of the shard's first elements goes there, and `shard` has the others.
    """

    def __init__(self, unit: Unit, comm: Comm, reduce_with: str, sink: GradientSink | None) -> None:
        super().__init__(unit, comm, reduce_with)
        self.sink = sink
        self.is_local = self.is_local and sink is None
        self._offloaded_numel = 0 if sink is None else sink.numel
        kept_numel, dtypes = unit.shard_numel - self._offloaded_numel, unit.dtypes
        self.shard = torch.zeros(kept_numel, dtype=dtypes.gradients, device=unit.device)
        unit.heap.release(self.shard)  # one tensor for life; its memory comes with the first gradient or reduction
        self._lands_in_shard = sink is None and dtypes.wire == dtypes.gradients and not self.all_reduces

    def open(self, sends: bool) -> None:
        if self.full is not None:  # a sum that no_sync has kept
            return
        if self.is_local:
            self.unit.heap.restore(self.shard)
            self.full = self.shard
            return
        # gradients reduced in this backward are stored in the wire's dtype, which saves a copy; no_sync's sums are not
        dtypes = self.unit.dtypes
        if_sent, if_kept = (dtypes.wire, labels.COMMUNICATION), (dtypes.gradients, labels.GRADIENTS)
        self.full = self.take_memory(*(if_sent if sends else if_kept))

    def prepare(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self.filled:
            self.open(sends=True)
        self.zero_missing()
        full = self.full
        assert full is not None
        if full.dtype != self.unit.dtypes.wire:
            self.full = self.take_memory(self.unit.dtypes.wire, labels.COMMUNICATION).copy_(full)
            self.unit.heap.give_back(full)  # before memory for the mean is allocated
            full = self.full
        # the mean cannot be written directly to the shard if it is added to earlier micro-batches' mean, or because of
        # a sink, the wire's dtype or an all-reduce
        if self.is_reduced or not self._lands_in_shard:
            return full, None
        self.unit.heap.restore(self.shard)
        return full, self.shard

    def store(self, mean: torch.Tensor) -> None:
        if self.sink is not None:
            self.sink.take(mean.narrow(0, 0, self._offloaded_numel), adds=self.is_reduced)
            mean = mean.narrow(0, self._offloaded_numel, self.shard.numel())
        if self.is_reduced:
            self.shard.add_(mean)
        elif mean is not self.shard:
            self.unit.heap.restore(self.shard)
            self.shard.copy_(mean)
        # ZeRO-2 is this line: only the shard of a reduced bucket stays, and all its other memory is freed
        self._release_full()
        self.end_round()

    def _release_full(self) -> None:
        """Frees the full gradients even if a gloo thread has them: now, or once a sink's copy has read them."""
        full, self.full = self.full, None
        if full is not None and self.sink is None:
            self.unit.heap.give_back(full)
        elif full is not None and self.sink is not None:
            self.sink.release(partial(self.unit.heap.give_back, full))

    def release(self) -> None:
        super().release()
        if self.is_local:
            self.full = None  # it is the shard itself, which is freed below, not a buffer of the heap
        self._release_full()
        self.unit.heap.release(self.shard)

    def segment(self, offset: int, numel: int) -> torch.Tensor:
        # no segment crosses `_offloaded_numel`: a range of the placement ends there, or all of the shard is offloaded
        if self.sink is not None and offset < self._offloaded_numel:
            return self.sink.view(offset, numel)
        return self.shard.narrow(0, offset - self._offloaded_numel, numel)

    def tier_of(self, offset: int) -> str:
        return self.sink.tier if self.sink is not None and offset < self._offloaded_numel else labels.DEVICE


class Stage2(Stage1):
    """Optimizer states and gradients partitioned."""

    stage = 2

    def new_bucket(self, unit: Unit) -> GradientBucket:
        return ShardedBucket(unit, self.comm, self.options.reduce_with, self.placement.new_sink(unit))
