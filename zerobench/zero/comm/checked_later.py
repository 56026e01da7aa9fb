"""What was launched since the last agreement rides in the next one.

`seal` puts a sum over it into bits of the agreement's flags that would be zero, and `unseal` finds whether all ranks
had the same. So collectives of equal size that were of different units on different ranks never lead to an update, on
any backend, at no cost in bytes; and a rank that clips where another one steps is told so at once.

Counted are the collectives that the stages ask for, whatever hops they become.
"""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist

from .backends import FAKE
from .base import Comm, Handle, WrappedComm
from .desync import Stamp
from .sources import ShardAllGather, Source

SEAL_BITS = 29
MASK = 2**SEAL_BITS - 1


class Sealed(WrappedComm):
    """`asked`: how many collectives of each kind and unit the stages have asked for since the last agreement."""

    def __init__(self, below: Comm, asked: dict[str, int]) -> None:
        super().__init__(below)
        self.asked = asked

    def count(self, kind: str, unit: str) -> None:
        """One more is about to be launched."""
        key = f"{kind} of {unit}"
        self.asked[key] = self.asked.get(key, 0) + 1

    def reduce_scatter(
        self, full: torch.Tensor, unit: str = "", stamp: Stamp | None = None, into: torch.Tensor | None = None
    ) -> Handle:
        self.count("reduction", unit)
        return self._below.reduce_scatter(full, unit, stamp, into)

    def all_reduce(self, full: torch.Tensor, unit: str = "", stamp: Stamp | None = None) -> Handle:
        self.count("reduction", unit)
        return self._below.all_reduce(full, unit, stamp)

    def all_gather(self, full: torch.Tensor, unit: str = "", stamp: Stamp | None = None) -> Handle:
        self.count("gather", unit)
        return self._below.all_gather(full, unit, stamp)

    @property
    def exact(self) -> Comm:
        return self if self._below.exact is self._below else Sealed(self._below.exact, self.asked)

    def new_source(self) -> Source:
        source = self._below.new_source()
        return ShardAllGather(self) if isinstance(source, ShardAllGather) else CountedSource(source, self)

    def seal(self, flags: torch.Tensor, what: str) -> None:
        if len(flags) > 1:
            code = zlib.crc32(f"{what} after {sorted(self.asked.items())}".encode()) & MASK
            flags[0] += code << 1
            flags[-1] += (code ^ MASK) << 1

    def unseal(self, flags: list[int], what: str) -> list[int]:
        asked = dict(self.asked)
        self.asked.clear()
        if len(flags) > 1 and flags[0] >> 1 != (flags[-1] >> 1) ^ MASK:  # max(code) and min(code)
            raise self._below.disagreement(what, asked)
        return [flag & 1 for flag in flags]


class CountedSource:
    """A source whose gathers are counted."""

    def __init__(self, below: Source, comm: Sealed) -> None:
        self._below, self._comm = below, comm
        self.released, self.stale = below.released, below.stale

    def launch(self, full: torch.Tensor, unit: str, stamp: Stamp | None) -> Handle:
        """As the source's below."""
        self._comm.count("gather", unit)
        return self._below.launch(full, unit, stamp)


def sealed(comm: Comm) -> Comm:
    """`comm` with seals; itself where there are no other ranks, or none that could do otherwise."""
    if comm.group is None or str(dist.get_backend(comm.group)) == FAKE:
        return comm
    return Sealed(comm, {})
