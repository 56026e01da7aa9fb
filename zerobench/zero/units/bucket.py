"""The gradients of one unit on this rank, from autograd to the optimizer.

[Note: the life of a gradient bucket]

    open       `full` has memory: before the first gradient of a round
    fill       a gradient, divided by N, or in fp16 by about √N, is written into its piece of `full`, or added to a
               gradient that waits there
    cast       all have come: zeros for missing ones, and the tensor that is sent, `wire`
    store      this rank's slice of the mean has come, and is kept in `shard`, or in the sink of a tier
    release    the optimizer has used it, or it is dropped: back to no gradients and no memory

A round lasts from open to store; micro-batches make several rounds before a release. A bucket holds buffers; when each
of these is called, and the reduction between cast and store, is decided in gradients/flow.py. The stages differ in when
memory is allocated and freed: stage1.py has buckets that stay whole until the update, stage2.py frees buckets once
reduced.

    full     (padded_numel,)   this rank's gradients divided by N, or in fp16 by about √N
    wire     (padded_numel,)   the same in the wire's dtype, while in flight; often the same tensor
    shard    (shard_numel,)    the mean over the ranks, whose segments the optimizer sees, without the sink's part

At N = 1, without a sink, `full` and `shard` are one tensor, which has memory from the first gradient to the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from .. import labels
from ..comm.base import Comm
from ..layout import Piece
from ..offload.placement import GradientSink
from ..unit_tensors import UnitTensors


def divisors(wire: torch.dtype, ranks: int) -> tuple[float, float]:
    """Returns the divisors before and after a sum over `ranks`. In fp16 both are about √N, so that neither small
    gradients vanish nor sums overflow, as in FSDP2; the first is a power of two, which rounds nothing.
    """
    before = 1.0 if wire == torch.float16 else float(ranks)
    while before * before < ranks and ranks % before == 0:
        before *= 2
    return before, ranks / before


class GradientBucket:
    """One unit's gradients. Subclasses decide when memory is allocated and freed: `open`, `store` and `release`.

    `expected`    parameters, by number, whose gradients come in a backward
    `arrived`     parameters whose gradients have all come in the current backward
    `filled`      pieces whose elements of `full` have gradients that are not yet reduced
    `is_in_flight` True if its reduction was launched and not waited for
    `is_reduced`  True if the shard holds a mean that `step` has not consumed
    `all_reduces` True if every rank gets the whole sum, not only its own slice
    `rest`        the divisor of a sum over the ranks, 1 except in fp16
    `sink`        the destination of the shard's first `offloaded_numel` elements, if they leave the device
    """

    shard: torch.Tensor
    full: torch.Tensor | None = None
    wire: torch.Tensor | None = None
    check: Callable[[], None] | None = None
    """Raises RuntimeError if a gradient comes while the unit's parameters, which it needs, are absent."""
    stays = False
    """True if its memory is always allocated, so that its reduction need not wait for another."""

    def __init__(self, unit: UnitTensors, comm: Comm, reduce_with: str, sink: GradientSink | None = None) -> None:
        self.unit = unit
        self.sink = sink
        self.offloaded_numel = 0 if sink is None else sink.numel
        self._comm = comm
        self._divisor, self.rest = divisors(unit.dtypes.wire, comm.ranks)
        self.all_reduces = reduce_with == "all_reduce"
        self.expected: set[int] = set()
        self.arrived: set[int] = set()
        self.filled: set[Piece] = set()
        self.is_in_flight = self.is_reduced = False

    # -- defined by a stage ---------------------------------------------------------------------------------

    def open(self, sends: bool) -> None:
        """released, or reduced -> open. `sends`: gradients are reduced in this backward, not kept by no_sync."""
        raise NotImplementedError

    def store(self, mean: torch.Tensor) -> None:
        """in flight -> reduced. `mean`: (shard_numel,), the target, or this rank's slice of `wire`."""
        raise NotImplementedError

    def release(self) -> None:
        """-> released: the optimizer has used the gradients, or they are dropped."""
        self.filled.clear()
        self.arrived.clear()
        self.is_reduced = self.is_in_flight = False
        self.wire = None  # of a reduction that was interrupted

    def target(self) -> torch.Tensor | None:
        """The tensor to which the reduction writes the mean, (shard_numel,); None: this rank's slice of `wire`."""
        return None

    # -- fill -----------------------------------------------------------------------------------------------

    @property
    def is_alone(self) -> bool:
        """True if nothing is reduced: full gradients and shard are one tensor."""
        return self._comm.size == 1 and self.sink is None

    @property
    def is_full(self) -> bool:
        """True if every expected gradient has come."""
        return self.arrived >= self.expected

    @property
    def is_half_full(self) -> bool:
        """True if the current backward is done with parameters that make up half of the unit."""
        layout = self.unit.layout
        return 2 * sum(piece.numel for piece in layout.pieces if piece.parameter in self.arrived) >= layout.numel

    def fill(self, piece: Piece, gradient: torch.Tensor) -> None:
        """Divides a gradient, (piece.numel,), into its piece, or adds it to what waits there (tied, micro-batches)."""
        assert self.full is not None
        place, scale = self.full.narrow(0, piece.offset, piece.numel), 1 / self._divisor
        if piece in self.filled:
            place.add_(gradient, alpha=scale)
        elif place.dtype == gradient.dtype:
            torch.mul(gradient, scale, out=place)  # in one pass, without a copy of the gradient
        else:  # round once, to the wider dtype
            place.copy_(gradient).mul_(scale)
        self.filled.add(piece)

    # -- send and store -------------------------------------------------------------------------------------

    def cast(self) -> torch.Tensor:
        """The full gradients as they are sent: a copy only if the wire has another dtype."""
        assert self.full is not None
        if self.full.dtype == self.unit.dtypes.wire:
            return self.full
        return self.take_memory(self.unit.dtypes.wire, labels.COMMUNICATION).copy_(self.full)

    def zero_missing(self) -> None:
        """Zeroes padding and pieces without a gradient, which are sent too, with the memory's previous content."""
        assert self.full is not None
        for piece in self.unit.layout.pieces:
            if piece not in self.filled:
                self.full.narrow(0, piece.offset, piece.numel).zero_()
        for offset, numel in self.unit.layout.gaps:
            self.full.narrow(0, offset, numel).zero_()

    def take_memory(self, dtype: torch.dtype, category: str) -> torch.Tensor:
        """Allocates (padded_numel,) from the heap, not filled. `category`: its label, by whether it is sent or kept."""
        made = self.unit.heap.take(self.unit.layout.padded_numel, dtype, self.unit.device)
        return labels.label(made, category, self.unit.name)

    def end_round(self) -> None:
        """-> reduced: the next gradient opens another round."""
        self.wire = None
        self.filled.clear()
        self.is_reduced = True

    @property
    def travels_apart(self) -> bool:
        """True if a reduction runs concurrently with compute, and needs no memory except `full`."""
        return self._comm.on_streams and self.unit.dtypes.wire == self.unit.dtypes.gradients

    def keep(self, mean: torch.Tensor) -> None:
        """Stores the mean, (shard_numel,), for the optimizer, or adds it to the mean of the round before: its first
        elements in the sink, if there is one, the others in `shard`.
        """
        if self.sink is not None:
            self.sink.take(mean.narrow(0, 0, self.offloaded_numel), adds=self.is_reduced)
            mean = mean.narrow(0, self.offloaded_numel, self.kept_numel)
        if self.is_reduced:
            self.shard.add_(mean)
        else:
            self.unit.heap.restore(self.shard)
            self.shard.copy_(mean)

    def release_full(self) -> None:
        """Frees the memory of the full gradients now, even if a gloo thread still references them."""
        full, self.full = self.full, None
        if full is None:
            return
        if self.sink is None:
            self.unit.heap.give_back(full)
        else:  # once a copy to another tier has read from it
            self.sink.release(partial(self.unit.heap.give_back, full))

    def held_tensors(self) -> Iterator[labels.Held]:
        """Yields its tensors between backwards: the shard, a sum that no_sync has kept, and the sink's."""
        for one in (self.shard, self.full):
            if one is not None:
                yield labels.Held(one, labels.GRADIENTS, self.unit.name)
        if self.sink is not None:
            yield from self.sink.held_tensors()

    # -- for the optimizer ----------------------------------------------------------------------------------

    @property
    def kept_numel(self) -> int:
        """Elements of `shard`: the rank's, minus the sink's."""
        return self.unit.shard_numel - self.offloaded_numel

    def segment(self, offset: int, numel: int) -> torch.Tensor:
        """A view of the mean of elements [offset, offset + numel) of the rank's shard."""
        if self.sink is not None and offset < self.offloaded_numel:
            return self.sink.view(offset, numel)
        return self.shard.narrow(0, offset - self.offloaded_numel, numel)

    def tier_of(self, offset: int) -> str:
        """The tier of the gradient of element `offset` of the shard."""
        return self.sink.tier if self.sink is not None and offset < self.offloaded_numel else labels.DEVICE

    def settle(self) -> None:
        """Waits until all reduced gradients are where `segment` looks, including copies to other tiers."""
        if self.sink is not None:
            self.sink.settle()
