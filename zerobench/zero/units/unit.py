"""Parameters that are communicated together.

[Note: the tensors of a unit]
For a unit of `padded_numel` elements, of which this rank owns `shard_numel` (layout.py)::

    full_parameters   (padded_numel,)   read by forward and backward; the parameters are views of it
    parameter_shard   (shard_numel,)    this rank's part of them; in stage 3 the masters, which a gather rounds
    masters           (shard_numel,)    updated by the optimizer: the parameter shard itself, or fp32 copies of a half
                                        one; in ranges, each in its tier, owned by a placement (offload/placement.py)
    gradients                           from autograd to the optimizer (bucket.py)

The stages differ in which of these tensors are views, and in when their memory is allocated and freed:

    stage   full_parameters        parameter_shard        gradients.full       gradients.shard
    1       stays                  view of it             until the update     view of it
    2       stays                  view of it             while in flight      from reduction to update
    3       while in use           own tensor             while in flight      from reduction to update

On one rank full tensors and shards are the same tensors, unless stage 3 keeps only masters, which a gather rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack

import torch
from torch import optim

from .. import labels
from ..bucket import GradientBucket, UnitTensors
from ..comm.base import Comm
from ..layout import Layout
from ..low_bit import block_numel
from ..offload.placement import Placement
from ..parameters.access import Versions
from ..precision import Dtypes

ALIGN_BYTES = 64
"""See layout.py [Note: alignment]: the widest vector of a fused optimizer."""


def align_numel(optimizer: optim.Optimizer, element_bytes: int) -> int:
    """Returns the alignment, in elements, of the starts of parameters and the ends of shards and tiles: a vector, and
    the optimizer's whole blocks, if it quantizes its states in blocks (low_bit.py).
    """
    return math.lcm(ALIGN_BYTES // element_bytes, block_numel(optimizer))


class Unit(UnitTensors):
    """One unit on one rank: its tensors, see the note.

    `is_whole`  True if the parameters are present, to be read and written
    `versions`  the parameters' versions, by which writes are found (writes.py)
    """

    gradients: GradientBucket
    is_whole = True
    versions = Versions()

    def __init__(self, name: str, layout: Layout, comm: Comm, dtypes: Dtypes, placement: Placement) -> None:
        super().__init__(name, layout, comm, dtypes)
        self.placement = placement

    def held_tensors(self) -> Iterator[labels.Held]:
        """Yields its tensors, without those of its placement."""
        yield labels.Held(self.full_parameters, labels.PARAMETERS, self.name)
        tier = labels.DEVICE if self.placement.keeps_parameters else labels.HOST
        yield labels.Held(self.parameter_shard, self.shard_category, self.name, tier)
        gradients = getattr(self, "gradients", None)  # a frozen unit has none
        if gradients is not None:
            yield from gradients.held_tensors()

    def keep_parameters(self, loaded: Collection[int]) -> None:
        """Updates this rank's shard and masters after the full parameters were written to, equally on every rank.
        `loaded`: numbers of parameters whose masters are replaced even if their rounded values are equal.
        """
        self.follow(loaded)

    def put_aside(self) -> Callable[[], None]:
        """Copies this shard's parts without a separate master to the host; returns the function that restores them."""
        stack, ranges = ExitStack(), self.placement.ranges.get(self)
        without_masters = [(0, self.shard_numel)]  # all of a frozen unit
        if ranges is not None:
            without_masters = [(part.start, part.stop) for part in ranges if part.is_parameters]
        for start, stop in without_masters:
            copy = torch.empty(stop - start, dtype=self.dtypes.shard)
            labels.label(copy, self.shard_category, self.name, tier=labels.HOST)
            self.placement.read(self, start, copy)
            stack.callback(self.placement.put, self, start, copy)
        return stack.close

    def follow(self, loaded: Collection[int]) -> None:
        """Updates the masters after this rank's parameter shard was written to."""
        self.placement.follow(self, loaded)
