"""Parameters that move together.

[Note: the tensors of a unit]
For a unit of `padded_numel` elements, of which this rank owns `shard_numel` (layout.py)::

    full_parameters   (padded_numel,)   what forward and backward read; the parameters are views of it
    parameter_shard   (shard_numel,)    what the optimizer updates; in fp32 it *is* the master copy
    full_gradients    (padded_numel,)   this rank's gradients divided by N, on their way to the reduction
    gradient_shard    (shard_numel,)    the mean over the ranks, of which the optimizer sees segments

Which of them is a view of which, and which comes and goes, is what a stage is:

    stage   full_parameters        parameter_shard        full_gradients       gradient_shard
    1       stays                  view of it             stays                view of it
    2       stays                  view of it             while in flight      own tensor
    3       while in use           own tensor             while in flight      own tensor

With one rank a shard is the whole: the full tensors are the shards.
"""

from __future__ import annotations

import torch

from .comm import Comm, Handle
from .layout import Layout, Piece

ALIGN_BYTES = 64
"""See layout.py [Note: alignment]: the widest vector of a fused optimizer."""


class Unit:
    """One unit on one rank: its tensors (see the note) and where its gradients stand.

    `filled`    pieces whose elements of `full_gradients` hold something not yet reduced
    `arrived`   pieces whose gradients came in the present backward
    `reduced`   `gradient_shard` holds gradients that `step` has not consumed
    `reduction` the reduction in flight
    """

    full_parameters: torch.Tensor
    parameter_shard: torch.Tensor
    gradient_shard: torch.Tensor
    full_gradients: torch.Tensor | None

    def __init__(self, name: str, layout: Layout, comm: Comm) -> None:
        self.name = name
        self.layout = layout
        self.rank = comm.rank
        self.full_gradients = None
        self.filled: set[Piece] = set()
        self.arrived: set[Piece] = set()
        self.reduced = False
        self.reduction: Handle | None = None

    def own_slice(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's (shard_numel,) view of a (padded_numel,) tensor."""
        return full.narrow(0, self.rank * self.layout.shard_numel, self.layout.shard_numel)

    def write_gradient(self, piece: Piece, gradient: torch.Tensor, scale: float) -> None:
        """Puts `scale` · gradient, (piece.numel,), into the full gradients; adds where one waits already."""
        assert self.full_gradients is not None
        place = self.full_gradients.narrow(0, piece.offset, piece.numel)
        if piece in self.filled:
            place.add_(gradient, alpha=scale)
        else:
            torch.mul(gradient, scale, out=place)
        self.filled.add(piece)
        self.arrived.add(piece)

    def zero_missing_gradients(self) -> None:
        """Zeros what no gradient was written to: unused parameters and the padding."""
        assert self.full_gradients is not None
        for piece in self.layout.pieces:
            if piece not in self.filled:
                self.full_gradients.narrow(0, piece.offset, piece.numel).zero_()
        for offset, numel in self.layout.gaps:
            self.full_gradients.narrow(0, offset, numel).zero_()

    def forget_gradients(self) -> None:
        """Back to: no gradients."""
        self.filled.clear()
        self.arrived.clear()
        self.reduced = False
