"""Parameters that move together.

[Note: the tensors of a unit]
For a unit of `padded_numel` elements, of which this rank owns `shard_numel` (layout.py)::

    full_parameters   (padded_numel,)   what forward and backward read; the parameters are views of it
    parameter_shard   (shard_numel,)    this rank's part of them
    master_shard      (shard_numel,)    what the optimizer updates: the parameter shard itself, or in fp32 beside half
    full_gradients    (padded_numel,)   this rank's gradients divided by N, on their way to the reduction
    wire_gradients    (padded_numel,)   the same in the wire's dtype, while in flight; often the same tensor
    gradient_shard    (shard_numel,)    the mean over the ranks, of which the optimizer sees segments

Which of them is a view of which, and which comes and goes, is what a stage is:

    stage   full_parameters        parameter_shard        full_gradients       gradient_shard
    1       stays                  view of it             stays                view of it
    2       stays                  view of it             while in flight      from reduction to update
    3       while in use           own tensor             while in flight      from reduction to update

With one rank a shard is the whole: the full tensors are the shards.
"""

from __future__ import annotations

import torch

from . import labels
from .arena import Heap
from .comm import Comm, Handle
from .layout import Layout, Piece
from .precision import Dtypes

ALIGN_BYTES = 64
"""See layout.py [Note: alignment]: the widest vector of a fused optimizer."""


class Unit:
    """One unit on one rank: its tensors (see the note) and where its gradients stand.

    `expected`  parameters, by number, whose gradients come in a backward, tied ones apart
    `uses`      uses of tied parameters whose gradients have not come yet
    `filled`    pieces whose elements of `full_gradients` hold something not yet reduced
    `arrived`   parameters whose gradients have come in the present backward
    `reduced`   `gradient_shard` holds gradients that `step` has not consumed
    `reduction` the reduction in flight
    `mean`      where it writes the mean, if not into the own slice of what travels
    `heap`      where memory that comes and goes is from: an arena has it in slots
    """

    full_parameters: torch.Tensor
    parameter_shard: torch.Tensor
    master_shard: torch.Tensor
    gradient_shard: torch.Tensor
    full_gradients: torch.Tensor | None
    heap = Heap()

    def __init__(self, name: str, layout: Layout, comm: Comm, dtypes: Dtypes) -> None:
        self.name = name
        self.layout = layout
        self.rank = comm.rank
        self.size = comm.size
        self.dtypes = dtypes
        self.full_gradients = None
        self.wire_gradients: torch.Tensor | None = None
        self.expected: set[int] = set()
        self.arrived: set[int] = set()
        self.uses = 0
        self.filled: set[Piece] = set()
        self.reduced = False
        self.reduction: Handle | None = None
        self.mean: torch.Tensor | None = None

    @property
    def is_full(self) -> bool:
        """Every gradient that can come has come."""
        return self.uses == 0 and self.arrived >= self.expected

    def own_slice(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's (shard_numel,) view of a (padded_numel,) tensor."""
        return full.narrow(0, self.rank * self.layout.shard_numel, self.layout.shard_numel)

    def make_master(self) -> None:
        """The shard that the optimizer updates, from the parameters."""
        self.master_shard = self.parameter_shard
        if self.dtypes.master != self.dtypes.parameters:
            self.master_shard = self.parameter_shard.to(self.dtypes.master)
            labels.label(self.master_shard, labels.MASTER, self.name)

    def round_master(self) -> None:
        """The parameters become the rounded masters."""
        if self.master_shard is not self.parameter_shard:
            self.parameter_shard.copy_(self.master_shard)

    def new_full_gradients(self, dtype: torch.dtype, category: str = labels.COMMUNICATION) -> torch.Tensor:
        """A (padded_numel,) buffer, not filled, for gradients on their way or, by its category, to be kept."""
        full = self.heap.take(self.layout.padded_numel, dtype, self.parameter_shard.device)
        return labels.label(full, category, self.name)

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
        """The mean over the ranks, (shard_numel,), once the reduction is done: in its place, or where it travelled."""
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
        """What travelled is needed no more. Its memory goes back now, whatever thread of gloo's still holds it."""
        wire, self.wire_gradients = self.wire_gradients, None
        if wire is not None and wire is not self.full_gradients:
            self.heap.give_back(wire)

    def forget_gradients(self) -> None:
        """Back to: no gradients."""
        self.filled.clear()
        self.arrived.clear()
        self.uses = 0
        self.reduced = False
        self.reduction = self.mean = None  # one that was interrupted
