"""Collectives whose waits are registered with a deadlock watch (comm/hang_watch.py), one per process group."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from .backends import FAKE
from .base import Comm, WrappedComm
from .desync import Stamp
from .hang_watch import Watch, watch_of
from .positions import named
from .streams import Handle

if TYPE_CHECKING:
    from ..strategy import Strategy

AGREEMENT = "agreement"
"""The channel of all small all-reduces: gloo pairs them in the order of their launch."""

T = TypeVar("T")


class Watched(WrappedComm):
    """A Comm whose waits `watch` observes. `peers`: the group's ranks, in the numbering of `watch`."""

    def __init__(self, below: Comm, watch: Watch, peers: list[int]) -> None:
        super().__init__(below)
        self.watch, self._peers = watch, peers
        self._among = "" if len(peers) == watch.size else f" among {named(peers)}"

    def reduce_scatter(
        self, full: torch.Tensor, unit: str = "", stamp: Stamp | None = None, into: torch.Tensor | None = None
    ) -> Handle:
        return self._launch("reduction", unit, full, partial(self._below.reduce_scatter, full, unit, stamp, into))

    def all_reduce(self, full: torch.Tensor, unit: str = "", stamp: Stamp | None = None) -> Handle:
        return self._launch("reduction", unit, full, partial(self._below.all_reduce, full, unit, stamp))

    def all_gather(self, full: torch.Tensor, unit: str = "", stamp: Stamp | None = None) -> Handle:
        return self._launch("gather", unit, full, partial(self._below.all_gather, full, unit, stamp))

    def all_to_all(
        self, to: torch.Tensor, here: torch.Tensor, name: str, unit: str = "", stamp: Stamp | None = None
    ) -> Handle:
        return self._launch("exchange", unit, to, partial(self._below.all_to_all, to, here, name, unit, stamp))

    def broadcast(self, tensor: torch.Tensor) -> None:
        self.call("broadcast", partial(self._below.broadcast, tensor))

    def maximum(self, flags: torch.Tensor) -> None:
        self.call(AGREEMENT, partial(self._below.maximum, flags))
        if not flags.is_floating_point():  # which parameters have gradients: an update follows
            self.watch.begin_step()

    def sum(self, values: torch.Tensor) -> None:
        self.call(AGREEMENT, partial(self._below.sum, values))

    def meet(self, what: str) -> None:
        self.call(what, partial(self._below.meet, what))

    def call(self, channel: str, run: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
        if group is not None:
            self.watch.groups.add(group)
        where = channel + self._among
        number = self.watch.launch(where)
        return self.watch.wait(where, number, self._peers, lambda: f"the {where}{self.watch.step()}", run)

    def serves(self, engine: Strategy) -> None:
        self.watch.serves(engine)

    def disagreement(self, what: str, asked: dict[str, int]) -> RuntimeError:
        return self.watch.differ(f"calling {what}(){self.watch.step()}", asked)

    def _launch(self, kind: str, unit: str, sent: torch.Tensor, start: Callable[[], Handle]) -> Handle:
        """Starts a collective that moves `sent`. Its launch is watched like its wait, since a launch can block too."""
        channel = f"{kind} of {unit}{self._among}, {sent.nbytes} bytes"
        number = self.watch.launch(channel)

        def words() -> str:
            since = number - self.watch.before.get(channel, 0)
            return f"{kind} {since} of {unit}{self.watch.parameters(unit)}{self._among}{self.watch.step()}"

        handle = self.watch.wait(channel, number, self._peers, words, start)
        return Handle([], lambda: self.watch.wait(channel, number, self._peers, words, handle.wait))


def watched(comm: Comm, whole: dist.ProcessGroup | None = None) -> Comm:
    """Returns `comm` under the watch of `whole`, a process group that contains its ranks, by default its own.

    Returns `comm` itself in a world of one rank, and in a simulated world, where no rank can wait.
    """
    group = comm.group
    if group is None or str(dist.get_backend(group)) == FAKE:
        return comm
    watch = watch_of(whole or group)
    watch.groups.add(group)
    peers = range(comm.size) if whole is None else dist.get_process_group_ranks(group)
    return Watched(comm, watch, list(peers))
