"""Parameters that move together.

[Note: the tensors of a unit]
For a unit of `padded_numel` elements, of which this rank owns `shard_numel` (layout.py)::

    full_parameters   (padded_numel,)   what forward and backward read; the parameters are views of it
    parameter_shard   (shard_numel,)    this rank's part of them
    masters           (shard_numel,)    what the optimizer updates: the parameter shard itself, or in fp32 beside half;
                                        in runs, each in its tier (offload/placement.py)
    full_gradients    (padded_numel,)   this rank's gradients divided by N, on their way to the reduction
    wire_gradients    (padded_numel,)   the same in the wire's dtype, while in flight; often the same tensor
    gradient_shard    (shard_numel,)    the mean over the ranks, of which the optimizer sees segments, less what leaves

Which of them is a view of which, and which comes and goes, is what a stage is:

    stage   full_parameters        parameter_shard        full_gradients       gradient_shard
    1       stays                  view of it             until the update     view of it
    2       stays                  view of it             while in flight      from reduction to update
    3       while in use           own tensor             while in flight      from reduction to update

With one rank a shard is the whole: the full tensors are the shards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import labels
from ..arena import Heap
from ..comm.base import Comm, Handle
from ..layout import Layout, Piece
from ..offload.placement import Away, Places, Run
from ..parameters.versions import Versions
from ..precision import Dtypes

ALIGN_BYTES = 64
"""See layout.py [Note: alignment]: the widest vector of a fused optimizer."""


class Departing(NamedTuple):
    """`wire`, of `heap`, of which a part leaves the device; `end`: the event at the end of that copy."""

    end: Any
    wire: torch.Tensor | None
    heap: Heap

    def let_go(self) -> None:
        """Its memory goes back in the order of who computes, which is now behind the copy."""
        self.end.wait()
        if self.wire is not None:
            self.heap.give_back(self.wire)


class Unit:
    """One unit on one rank: its tensors (see the note) and where its gradients stand.

    `expected`  parameters, by number, whose gradients come in a backward
    `filled`    pieces whose elements of `full_gradients` hold something not yet reduced
    `arrived`   parameters whose gradients have all come in the present backward
    `reduced`   `gradient_shard` holds gradients that `step` has not consumed
    `reduction` the reduction in flight
    `mean`      where it writes the mean, if not into the own slice of what travels
    `heap`      where memory that comes and goes is from: an arena has it in slots
    `is_whole`  whether the parameters are there to be read and written
    `versions`  those of the parameters, by which writes are found (parameters/writes.py)
    """

    full_parameters: torch.Tensor
    parameter_shard: torch.Tensor
    gradient_shard: torch.Tensor
    full_gradients: torch.Tensor | None
    heap = Heap()
    is_whole = True
    versions = Versions()

    def __init__(self, name: str, layout: Layout, comm: Comm, dtypes: Dtypes, places: Places) -> None:
        self.name = name
        self.layout = layout
        self.rank = comm.rank
        self.size = comm.size
        self.dtypes = dtypes
        self.places = places
        self.leaving = places.leaving(layout.shard_numel, layout.align)
        self.away: Away | None = None
        self.runs: list[Run] = []
        self.full_gradients = None
        self.wire_gradients: torch.Tensor | None = None
        self.expected: set[int] = set()
        self.arrived: set[int] = set()
        self.filled: set[Piece] = set()
        self.reduced = False
        self.reduction: Handle | None = None
        self.mean: torch.Tensor | None = None
        self.departure: Any = None  # the event at the end of the copy of gradients that leave

    @property
    def device(self) -> torch.device:
        """The device, wherever shards are."""
        return self.full_parameters.device

    @property
    def is_full(self) -> bool:
        """Every gradient that can come has come."""
        return self.arrived >= self.expected

    @property
    def is_half_full(self) -> bool:
        """The present backward is done with parameters that make up half of the unit."""
        come = sum(piece.numel for piece in self.layout.pieces if piece.parameter in self.arrived)
        return 2 * come >= self.layout.numel

    def own_slice(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's (shard_numel,) view of a (padded_numel,) tensor."""
        return full.narrow(0, self.rank * self.layout.shard_numel, self.layout.shard_numel)

    @property
    def is_alone(self) -> bool:
        """Full gradients and shard are one tensor, in which gradients stay until the update."""
        return self.size == 1 and self.away is None

    def make_master(self) -> None:
        """What the optimizer updates, from the parameters."""
        self.runs = self.places.runs(self)
        for run in self.runs:
            run.make_master()

    def round_masters(self) -> None:
        """The parameters become the rounded masters."""
        for run in self.runs:
            run.round_master()

    def homes(self) -> Iterable[tuple[nn.Parameter, torch.Tensor]]:
        """Each parameter of a unit that is not always whole, with its view of the full buffer."""
        return ()

    def keep_parameters(self, loaded: Collection[int]) -> None:
        """The full parameters were written to, by every rank alike: what this rank keeps of them follows.

        `loaded`: numbers of parameters whose values are new even where they are the old ones rounded.
        """
        self.follow(loaded)

    def follow(self, loaded: Collection[int]) -> None:
        """The own shard of parameters was written to: the masters follow."""
        self.places.wait()
        self.places.settle()  # what was read ahead is old
        segments = self.layout.segments(self.rank)
        ranges = [(one.offset, one.offset + one.numel) for one in segments if one.parameter in loaded]
        for run in self.runs:
            run.follow_parameters(ranges)

    def finish_update(self) -> None:
        """The same, of those that have not become so tile by tile."""
        for run in self.runs:
            if run.rounds_late:
                run.round_master()

    def new_full_gradients(self, dtype: torch.dtype, category: str = labels.COMMUNICATION) -> torch.Tensor:
        """A (padded_numel,) buffer, not filled, for gradients on their way or, by its category, to be kept."""
        full = self.heap.take(self.layout.padded_numel, dtype, self.device)
        return labels.label(full, category, self.name)

    def new_gradient_shard(self) -> torch.Tensor:
        """Zeros for the gradients of what stays; the others have their place elsewhere from now on."""
        self.away = self.places.away(self)
        numel = self.layout.shard_numel - (0 if self.away is None else self.leaving)
        return torch.zeros(numel, dtype=self.dtypes.gradients, device=self.device)

    def send_away(self, mean: torch.Tensor) -> torch.Tensor:
        """Of the mean, (shard_numel,), what leaves goes; returns what stays."""
        if self.away is None:
            return mean
        self.departure = self.away.take(mean.narrow(0, 0, self.leaving), self.reduced)
        return mean.narrow(0, self.leaving, self.gradient_shard.numel())

    def gradient(self, offset: int, numel: int) -> torch.Tensor:
        """The mean of elements [offset, offset + numel) of the shard, where it lies."""
        if self.away is None:
            return self.gradient_shard.narrow(0, offset, numel)
        if offset < self.leaving:
            return self.away.view(offset, numel)
        return self.gradient_shard.narrow(0, offset - self.leaving, numel)

    @property
    def sums_in_place(self) -> bool:
        """Whether a reduction can write the mean into the gradient shard itself."""
        return self.away is None and self.dtypes.wire == self.dtypes.gradients

    def allocate_gradient_shard(self) -> None:
        """The gradient shard, one tensor for life, has memory again; not filled."""
        self.heap.restore(self.gradient_shard)

    def free_gradient_shard(self) -> None:
        """Its memory goes back: the forward, and the backward's start, where activations are most, need none."""
        self.heap.release(self.gradient_shard)

    def write_gradient(self, piece: Piece, gradient: torch.Tensor, scale: float) -> None:
        """Puts `scale` · gradient, (piece.numel,), into the full gradients; adds where one waits already."""
        assert self.full_gradients is not None
        place = self.full_gradients.narrow(0, piece.offset, piece.numel)
        if piece in self.filled:
            place.add_(gradient, alpha=scale)
        elif place.dtype == gradient.dtype:
            torch.mul(gradient, scale, out=place)
        else:  # round once, to the wider dtype
            place.copy_(gradient).mul_(scale)
        self.filled.add(piece)

    def zero_missing_gradients(self) -> None:
        """Zeros what no gradient was written to: unused parameters and the padding."""
        assert self.full_gradients is not None
        for piece in self.layout.pieces:
            if piece not in self.filled:
                self.full_gradients.narrow(0, piece.offset, piece.numel).zero_()
        for offset, numel in self.layout.gaps:
            self.full_gradients.narrow(0, offset, numel).zero_()

    def cast_to_wire(self) -> torch.Tensor:
        """The full gradients as they travel: a copy only where the wire has another dtype."""
        assert self.full_gradients is not None
        if self.full_gradients.dtype == self.dtypes.wire:
            self.wire_gradients = self.full_gradients
        else:
            self.wire_gradients = self.new_full_gradients(self.dtypes.wire)
            self.wire_gradients.copy_(self.full_gradients)
        return self.wire_gradients

    def reduced_slice(self) -> torch.Tensor:
        """The mean over the ranks, (shard_numel,), once the reduction is done: in its place, or where it traveled."""
        if self.mean is not None:
            return self.mean
        assert self.wire_gradients is not None
        return self.own_slice(self.wire_gradients)

    def drop_full(self) -> None:
        """The full gradients are needed no more, unless it is they that travel."""
        full, self.full_gradients = self.full_gradients, None
        if full is not None and full is not self.wire_gradients:
            self.heap.give_back(full)

    def drop_wire(self) -> None:
        """What traveled is needed no more. Its memory goes back now, whatever thread of gloo's still holds it."""
        wire, self.wire_gradients = self.wire_gradients, None
        if wire is not None and wire is not self.full_gradients:
            self.heap.give_back(wire)

    def take_departing(self) -> Departing:
        """What traveled and is still being copied from, to be let go of when that has ended."""
        wire = None if self.wire_gradients is self.full_gradients else self.wire_gradients
        departing = Departing(self.departure, wire, self.heap)
        self.departure = self.wire_gradients = None
        return departing

    def forget_gradients(self) -> None:
        """Back to: no gradients."""
        self.filled.clear()
        self.arrived.clear()
        self.reduced = False
        self.reduction = self.mean = None  # one that was interrupted
