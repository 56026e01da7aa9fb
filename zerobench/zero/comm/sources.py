"""Where a unit of stage 3 has its full parameters from: the shards of all ranks, unless something nearer is there.

launch     the unit wants them
released   nobody reads them for a while: what is to be kept of them must be taken now
stale      the parameters have changed: what was kept is not theirs any more
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from .desync import Stamp

if TYPE_CHECKING:
    from .base import Comm, Handle


class Source(Protocol):
    """One unit's."""

    def launch(self, full: torch.Tensor, unit: str, stamp: Stamp | None) -> Handle:
        """Starts filling `full`, (N · shard_numel,), of which the own slice is filled."""

    def released(self, full: torch.Tensor, unit: str) -> None:
        """`full` is about to lose its memory."""

    def stale(self) -> None:
        """Some element of some rank's shard is another."""


class ShardAllGather:
    """The shards of all ranks, each time."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def launch(self, full: torch.Tensor, unit: str, stamp: Stamp | None) -> Handle:
        """An all-gather over everybody who has a shard."""
        return self._comm.all_gather(full, unit, stamp)

    def released(self, full: torch.Tensor, unit: str) -> None:
        """Nothing is kept."""

    def stale(self) -> None:
        """Nothing was."""
