"""Every byte between ranks passes here. The stages ask for a collective; how it travels is the backend's.

A full buffer has `N · shard_numel` elements; slice j belongs to rank j. The collectives work in place:

    reduce_scatter(full)   own slice := sum over ranks of that slice      (other slices: left as they were; with `into`
                           the sum goes there, and what the own slice holds is not said)
    all_gather(full)       slice j := rank j's slice j, for every j       (own slice: must be filled before)
    all_reduce(full)       every slice := sum over ranks of that slice
    all_to_all(to, here)   slice j of `here` := rank j's slice for this rank, for every other j

With a stamp (desync.py) a collective whose ranks are at different units or steps raises RuntimeError in `Handle.wait`.
The backends: comm/backends.py. Groups of ranks: groups.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .desync import Stamp
from .sources import ShardAllGather, Source
from .streams import Waitable

T = TypeVar("T")


class Handle:
    """A collective in flight. `wait` completes it and drops every tensor that it kept alive."""

    def __init__(self, works: list[Waitable], finish: Callable[[], None] | None = None) -> None:
        self._works = works
        self._finish = finish

    def wait(self) -> None:
        """Blocks (on CUDA: the current stream) until the collective is done. A second call does nothing."""
        works, finish = self._works, self._finish
        self._works, self._finish = [], None
        for work in works:
            work.wait()
        if finish is not None:
            finish()


class Comm:
    """A world of one rank: nothing travels. The base of the backends below.

    `full`: (N · shard_numel,); where a `stamp` is given, its last STAMP_NUMEL elements are padding. `unit`: a name for
    whoever measures.
    """

    rank = 0
    size = 1
    """Ranks that share a shard; of these this one owns slice number `rank`."""
    ranks = 1
    """Ranks that gradients are means over: more than `size` where groups of ranks are replicas of one another."""
    replica = 0
    """Which of the replicas this rank's slices belong to."""
    group: dist.ProcessGroup | None = None
    """Everybody."""
    flags_device: torch.device | None = None
    """Where flags that the host needs travel without holding up a device; None: where the model is."""
    on_streams = False
    """Whether a collective runs by itself, beside what computes: comm/streams.py."""

    def reduce_scatter(
        self, full: torch.Tensor, unit: str = "", stamp: Stamp | None = None, into: torch.Tensor | None = None
    ) -> Handle:
        """Sums `full` over the ranks into the own slice, or `into` another tensor of its shape and dtype."""
        return Handle([])

    def all_gather(self, full: torch.Tensor, unit: str = "", stamp: Stamp | None = None) -> Handle:
        """Fills every slice of `full` from its owner."""
        return Handle([])

    def all_reduce(self, full: torch.Tensor, unit: str = "", stamp: Stamp | None = None) -> Handle:
        """Sums `full` over the ranks: twice the volume of a reduce-scatter, where a vendor does so."""
        return Handle([])

    def all_to_all(
        self, to: torch.Tensor, here: torch.Tensor, name: str, unit: str = "", stamp: Stamp | None = None
    ) -> Handle:
        """Sends rank j slice j of `to` and receives its own into `here`, both (N · m,); nobody's own slice need travel.

        `name`: the logical collective. With a stamp the last STAMP_NUMEL elements of every slice are padding.
        """
        return Handle([])

    @property
    def is_first(self) -> bool:
        """Whether this is the rank whose values all others have at the start."""
        return self.rank == self.replica == 0

    @property
    def exact(self) -> Comm:
        """Collectives that bring every bit of what was sent: itself, but where a codec is in between."""
        return self

    def new_source(self) -> Source:
        """Where a unit of stage 3 has its parameters from."""
        return ShardAllGather(self)

    def serves(self, engine: Any) -> None:
        """Whose collectives these are: for words, where something goes wrong."""

    def check_stamps(self) -> None:
        """Checks what has been found since the last call; for the end of a step, and holds up no device."""

    def seal(self, flags: torch.Tensor, what: str) -> None:
        """Puts into `flags`, (n,) int32 of 0 and 1 whose maximum is about to be taken, what this rank has launched."""

    def unseal(self, flags: list[int], what: str) -> list[int]:
        """The maximum less what `seal` put there. Raises RuntimeError where ranks had launched other collectives."""
        return flags

    def disagreement(self, what: str, asked: dict[str, int]) -> RuntimeError:
        """The error for ranks that `unseal` has found at different places: this one at `what`, after `asked`."""
        return RuntimeError(f"{what}: the ranks have come here by different ways; this one's had {asked}")

    def meet(self, what: str) -> None:
        """Returns when all ranks are here. Before a small collective that another one may be mistaken for."""

    def call(self, channel: str, run: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
        """What `run` returns, a collective of all ranks that is waited for where it is launched.

        `channel`: a name for it. `group`: what it goes through, by default this one's.
        """
        return run()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copies rank 0's `tensor` to every rank; outside the volume (start-up, buffers)."""

    def maximum(self, flags: torch.Tensor) -> None:
        """Elementwise maximum over the ranks, in place; outside the volume."""

    def sum(self, values: torch.Tensor) -> None:
        """Elementwise sum over the ranks, in place; outside the volume. For norms: a few float64 values."""


class WrappedComm(Comm):
    """A Comm that stands on another, whose collectives it may change: by itself it changes none."""

    def __init__(self, below: Comm) -> None:
        self._below = below
        self.rank, self.size = below.rank, below.size
        self.ranks, self.replica = below.ranks, below.replica
        self.group, self.flags_device, self.on_streams = below.group, below.flags_device, below.on_streams

    def reduce_scatter(
        self, full: torch.Tensor, unit: str = "", stamp: Stamp | None = None, into: torch.Tensor | None = None
    ) -> Handle:
        return self._below.reduce_scatter(full, unit, stamp, into)

    def all_gather(self, full: torch.Tensor, unit: str = "", stamp: Stamp | None = None) -> Handle:
        return self._below.all_gather(full, unit, stamp)

    def all_reduce(self, full: torch.Tensor, unit: str = "", stamp: Stamp | None = None) -> Handle:
        return self._below.all_reduce(full, unit, stamp)

    def all_to_all(
        self, to: torch.Tensor, here: torch.Tensor, name: str, unit: str = "", stamp: Stamp | None = None
    ) -> Handle:
        return self._below.all_to_all(to, here, name, unit, stamp)

    def disagreement(self, what: str, asked: dict[str, int]) -> RuntimeError:
        return self._below.disagreement(what, asked)

    def meet(self, what: str) -> None:
        self._below.meet(what)

    def call(self, channel: str, run: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
        return self._below.call(channel, run, group)

    def serves(self, engine: Any) -> None:
        self._below.serves(engine)

    def check_stamps(self) -> None:
        self._below.check_stamps()

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._below.broadcast(tensor)

    def maximum(self, flags: torch.Tensor) -> None:
        self._below.maximum(flags)

    def sum(self, values: torch.Tensor) -> None:
        self._below.sum(values)
