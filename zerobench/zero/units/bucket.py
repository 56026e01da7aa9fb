"""The gradients of one unit on this rank, from autograd to the optimizer.

[Note: the life of a gradient bucket]

    open       `full` has memory: before the first gradient of a round
    fill       a gradient, divided by N, is written into its piece of `full`, or added to a gradient that waits there
    launch     all have come: zeros for missing ones, a cast to the wire's dtype, and the reduction starts
    wait       this rank's slice of the mean is complete, and is kept in `shard`, or in the sink of a tier
    release    the optimizer has used it, or it is dropped: back to no gradients and no memory

A round lasts from open to wait; micro-batches make several rounds before a release. The stages differ in when memory is
allocated and freed: stage1.py has buckets that stay whole until the update, stage2.py frees buckets once reduced.

    full     (padded_numel,)   this rank's gradients divided by N
    wire     (padded_numel,)   the same in the wire's dtype, while in flight; often the same tensor
    shard    (shard_numel,)    the mean over the ranks, whose segments the optimizer sees, without the sink's part

At N = 1, without a sink, `full` and `shard` are one tensor in which gradients stay until the update.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from .. import labels
from ..comm.base import Comm
from ..comm.desync import Stamp
from ..comm.streams import Handle
from ..layout import Piece
from ..offload.placement import GradientSink
from ..unit_tensors import UnitTensors


class GradientBucket:
    """One unit's gradients. Subclasses decide when memory is allocated and freed: `open`, `wait` and `release`.

    `expected`    parameters, by number, whose gradients come in a backward
    `arrived`     parameters whose gradients have all come in the current backward
    `filled`      pieces whose elements of `full` have gradients that are not yet reduced
    `is_reduced`  True if the shard holds a mean that `step` has not consumed
    `all_reduces` True if every rank gets the whole sum, not only its own slice
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
        self.all_reduces = reduce_with == "all_reduce"
        self._handle: Handle | None = None
        self._target: torch.Tensor | None = None  # where the reduction writes the mean, if not into the own slice
        self.expected: set[int] = set()
        self.arrived: set[int] = set()
        self.filled: set[Piece] = set()
        self.is_reduced = False

    # -- defined by a stage ---------------------------------------------------------------------------------

    def open(self, sends: bool) -> None:
        """released, or reduced -> open. `sends`: gradients are reduced in this backward, not kept by no_sync."""
        raise NotImplementedError

    def wait(self) -> None:
        """in flight -> reduced."""
        raise NotImplementedError

    def release(self) -> None:
        """-> released: the optimizer has used the gradients, or they are dropped."""
        self.filled.clear()
        self.arrived.clear()
        self.is_reduced = False
        self.wire = self._handle = self._target = None  # a reduction that was interrupted

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

    def fill(self, piece: Piece, gradient: torch.Tensor, sends: bool) -> None:
        """Writes gradient / N, (piece.numel,), into its piece, or adds it to what waits there (tied, micro-batches)."""
        if self.check is not None:
            self.check()
        if not self.filled:
            self.open(sends)
        assert self.full is not None
        place, scale = self.full.narrow(0, piece.offset, piece.numel), 1 / self._comm.ranks
        if piece in self.filled:
            place.add_(gradient, alpha=scale)
        elif place.dtype == gradient.dtype:
            torch.mul(gradient, scale, out=place)  # in one pass, without a copy of the gradient
        else:  # round once, to the wider dtype
            place.copy_(gradient).mul_(scale)
        self.filled.add(piece)

    # -- launch ---------------------------------------------------------------------------------------------

    @property
    def is_in_flight(self) -> bool:
        """True if its reduction was launched and not waited for."""
        return self._handle is not None

    def launch(self, stamp: Stamp | None) -> None:
        """open -> in flight. A bucket without gradients is sent as zeros: all ranks send the same buckets."""
        if not self.filled:
            self.open(sends=True)
        # 1 padding and unused parameters are sent, too: they must not hold the memory's previous content
        self._zero_missing()
        # 2 before memory for the mean is allocated, since the tensor that was cast may be freed first
        self.wire = self.cast()
        # 3 straight into the shard if the collective can write there, which saves a copy
        self._target = self.target()
        if self.all_reduces:  # as other systems do: every slice is summed, at twice the volume
            self._handle = self._comm.all_reduce(self.wire, self.unit.name, stamp)
        else:
            self._handle = self._comm.reduce_scatter(
                self.wire, self.unit.name, stamp, self._target, self.unit.layout.sizes
            )

    def cast(self) -> torch.Tensor:
        """The full gradients as they are sent: a copy only if the wire has another dtype."""
        assert self.full is not None
        if self.full.dtype == self.unit.dtypes.wire:
            return self.full
        return self.take_memory(self.unit.dtypes.wire, labels.COMMUNICATION).copy_(self.full)

    def _zero_missing(self) -> None:
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

    # -- wait -----------------------------------------------------------------------------------------------

    def reduced_slice(self) -> torch.Tensor:
        """Waits for the reduction and returns the mean, (shard_numel,): its target, or this rank's slice of `wire`."""
        assert self._handle is not None
        assert self.wire is not None
        self._handle.wait()
        mean = self.unit.own_slice(self.wire) if self._target is None else self._target
        self._handle = self._target = None
        return mean

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
