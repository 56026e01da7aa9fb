"""How a bucket's gradients are summed over the ranks: 1 of its size on the wire, or 2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .base import Comm
from .desync import Stamp
from .streams import Handle


@dataclass(frozen=True)
class Reduction:
    """A collective over a full buffer of gradients.

    `launch`          starts it; its last argument is where the mean of the own slice is to be written, None: in place
    `sums_own_slice`  it makes no more of the sum than the own slice, and so can write that anywhere
    """

    launch: Callable[[Comm, torch.Tensor, str, Stamp | None, torch.Tensor | None], Handle]
    sums_own_slice: bool


REDUCTIONS: dict[str, Reduction] = {
    "reduce_scatter": Reduction(
        lambda comm, full, unit, stamp, into: comm.reduce_scatter(full, unit, stamp, into), True
    ),
    "all_reduce": Reduction(lambda comm, full, unit, stamp, _: comm.all_reduce(full, unit, stamp), False),
}
"""By the name that `Options.reduce_with` has for them."""
