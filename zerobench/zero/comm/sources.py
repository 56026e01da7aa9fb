"""Sources of a stage 3 unit's full parameters: the shards of all ranks, or a nearer copy (hpZ's secondary shards).

launch     starts filling the unit's full parameters
released   they are about to be freed: a source that keeps a copy takes it now
stale      the parameters have changed: a kept copy is invalid
"""

from __future__ import annotations

from typing import Protocol

import torch

from .desync import Stamp
from .streams import Handle


class Gathers(Protocol):
    """The part of a Comm (comm/base.py) that fills a unit."""

    def all_gather(self, full: torch.Tensor, unit: str = "", stamp: Stamp | None = None) -> Handle:
        """Fills every slice of `full` from its owner."""


class Source(Protocol):
    """The source of one unit's full parameters."""

    def launch(self, full: torch.Tensor, unit: str, stamp: Stamp | None) -> Handle:
        """Starts filling `full`, (N · shard_numel,), whose own slice is filled already."""

    def released(self, full: torch.Tensor, unit: str) -> None:
        """`full` is about to lose its memory."""

    def stale(self) -> None:
        """Some rank's shard has changed."""


class ShardAllGather:
    """An all-gather of all ranks' shards at each launch; nothing is kept in between."""

    def __init__(self, comm: Gathers) -> None:
        self._comm = comm

    def launch(self, full: torch.Tensor, unit: str, stamp: Stamp | None) -> Handle:
        """Launches an all-gather over the shard group."""
        return self._comm.all_gather(full, unit, stamp)

    def released(self, full: torch.Tensor, unit: str) -> None:
        """Keeps nothing."""

    def stale(self) -> None:
        """Has nothing to drop."""
