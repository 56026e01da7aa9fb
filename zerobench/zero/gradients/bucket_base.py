"""The gradients of one unit on this rank, from autograd to the optimizer: one object with a life.

[Note: the life of a gradient bucket]

    open       `full` has memory: before the first gradient of a round
    fill       a gradient, divided by N, is written into its piece of `full`, or added to what waits there
    launch     all have come: zeros for those that did not, a cast to the wire's dtype, and the reduction starts
    wait       the mean over the ranks of the own slice is there, and is kept in `shard`, or in the sink of a tier
    release    the optimizer has had it, or it is dropped: back to no gradients and no memory

A round is open to wait; micro-batches make several rounds before a release. When memory comes and goes is what a stage
is: stage1.py has buckets that stay whole until the update, stage2.py buckets that go as soon as they are reduced.

    full     (padded_numel,)   this rank's gradients divided by N
    wire     (padded_numel,)   the same in the wire's dtype, while in flight; often the same tensor
    shard    (shard_numel,)    the mean over the ranks, of which the optimizer sees segments, without the sink's part

At N = 1, without a sink, `full` and `shard` are one tensor in which gradients stay until the update.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from .. import labels
from ..comm.base import Comm
from ..comm.desync import Stamp
from ..comm.streams import Handle
from ..layout import Piece

if TYPE_CHECKING:
    from ..offload.placement import GradientSink as GradientSink
    from ..units.unit import Unit


class GradientBucket:
    """One unit's gradients. The subclasses of stages say when memory comes and goes: `open`, `wait` and `release`.

    `expected`    parameters, by number, whose gradients come in a backward
    `arrived`     those whose gradients have all come in the present one
    `filled`      pieces whose elements of `full` hold something not yet reduced
    `is_reduced`  the shard holds a mean that `step` has not consumed
    `all_reduces` the whole sum is made on every rank, not the own slice alone
    `sink`        where the first `offloaded_numel` elements of the shard go, if they leave the device
    """

    shard: torch.Tensor
    full: torch.Tensor | None = None
    wire: torch.Tensor | None = None
    check: Callable[[], None] | None = None
    """Raises RuntimeError if a gradient comes for which the unit's parameters had to be there, and are not."""
    stays = False
    """True if its memory is there in any case, so that its reduction need wait for no other."""

    def __init__(self, unit: Unit, comm: Comm, reduce_with: str, sink: GradientSink | None = None) -> None:
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

    # -- what a stage is ------------------------------------------------------------------------------------

    def open(self, sends: bool) -> None:
        """released, or reduced -> open. `sends`: what comes is reduced in this backward, not kept by no_sync."""
        raise NotImplementedError

    def wait(self) -> None:
        """in flight -> reduced."""
        raise NotImplementedError

    def release(self) -> None:
        """-> released: the optimizer has had the gradients, or they are dropped."""
        self.filled.clear()
        self.arrived.clear()
        self.is_reduced = False
        self.wire = self._handle = self._target = None  # a reduction that was interrupted

    def target(self) -> torch.Tensor | None:
        """Where the reduction may write the mean, (shard_numel,), at once; None: into the own slice of what travels."""
        return None

    # -- fill -----------------------------------------------------------------------------------------------

    @property
    def is_alone(self) -> bool:
        """Nothing is reduced: full gradients and shard are one tensor."""
        return self._comm.size == 1 and self.sink is None

    @property
    def is_full(self) -> bool:
        """Every gradient that can come has come."""
        return self.arrived >= self.expected

    @property
    def is_half_full(self) -> bool:
        """The present backward is done with parameters that make up half of the unit."""
        layout = self.unit.layout
        return 2 * sum(piece.numel for piece in layout.pieces if piece.parameter in self.arrived) >= layout.numel

    def fill(self, piece: Piece, gradient: torch.Tensor, sends: bool) -> None:
        """Puts gradient / N, (piece.numel,), into its piece; adds where one waits (tied, micro-batches)."""
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
        """Its reduction was launched and not waited for."""
        return self._handle is not None

    def launch(self, stamp: Stamp | None) -> None:
        """open -> in flight. A bucket to which nothing came travels as zeros: all ranks send the same buckets."""
        if not self.filled:
            self.open(sends=True)
        # 1 padding and unused parameters are sent, too: what lies there must not be what the memory held before
        self._zero_missing()
        # 2 before there is memory for the mean: what was cast from may go first
        self.wire = self.cast()
        # 3 straight into the shard where the collective can write there, which saves a copy
        self._target = self.target()
        if self.all_reduces:  # as other systems do: every slice is summed, at twice the volume
            self._handle = self._comm.all_reduce(self.wire, self.unit.name, stamp)
        else:
            self._handle = self._comm.reduce_scatter(
                self.wire, self.unit.name, stamp, self._target, self.unit.layout.sizes
            )

    def cast(self) -> torch.Tensor:
        """The full gradients as they travel: a copy only where the wire has another dtype."""
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
        """(padded_numel,) from the heap, not filled: `category` says whether it travels or is kept."""
        made = self.unit.heap.take(self.unit.layout.padded_numel, dtype, self.unit.device)
        return labels.label(made, category, self.unit.name)

    # -- wait -----------------------------------------------------------------------------------------------

    def reduced_slice(self) -> torch.Tensor:
        """Waits for the reduction. The mean over the ranks, (shard_numel,): in its target, or where it traveled."""
        assert self._handle is not None
        assert self.wire is not None
        self._handle.wait()
        mean = self.unit.own_slice(self.wire) if self._target is None else self._target
        self._handle = self._target = None
        return mean

    def end_round(self) -> None:
        """reduced: the next gradient opens a further round."""
        self.wire = None
        self.filled.clear()
        self.is_reduced = True

    @property
    def travels_apart(self) -> bool:
        """A reduction runs beside what computes, and needs no memory but that of `full`."""
        return self._comm.on_streams and self.unit.dtypes.wire == self.unit.dtypes.gradients

    def keep(self, mean: torch.Tensor) -> None:
        """Puts the mean, (shard_numel,), where the optimizer will look, or adds it to that of a round before: its first
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
        """The memory of the full gradients goes now, whatever thread of gloo's still holds them."""
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
        """Elements of `shard`: the rank's, less those that go to the sink."""
        return self.unit.shard_numel - self.offloaded_numel

    def segment(self, offset: int, numel: int) -> torch.Tensor:
        """The mean of elements [offset, offset + numel) of the rank's shard, where it lies."""
        if self.sink is not None and offset < self.offloaded_numel:
            return self.sink.view(offset, numel)
        return self.shard.narrow(0, offset - self.offloaded_numel, numel)

    def tier_of(self, offset: int) -> str:
        """The tier in which the gradient of element `offset` of the shard lies."""
        return self.sink.tier if self.sink is not None and offset < self.offloaded_numel else labels.DEVICE

    def settle(self) -> None:
        """All that was reduced is where `segment` says, copies to other tiers included."""
        if self.sink is not None:
            self.sink.settle()
