"""A checksum of the launched collectives, checked in the next small all-reduce (the agreement) at no cost in bytes.

`seal` writes the checksum into bits of the agreement's flags that would be zero, and `unseal` compares it over the
ranks. So collectives of equal size that belong to different units on different ranks never lead to an update, on any
backend; and a rank that clips while another one steps gets an error immediately.

The collectives that the stages ask for are counted, not the hops into which they are divided.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
import torch.distributed as dist

from .backends import FAKE
from .base import Comm, ShardAllGather, Sizes, Source, WrappedComm
from .desync import Stamp
from .streams import Handle

SEAL_BITS = 29
MASK = 2**SEAL_BITS - 1


class Sealed(WrappedComm):
    """Counts collectives. `asked`: "kind of unit" -> number launched by the stages since the last agreement."""

    def __init__(self, below: Comm, asked: dict[str, int]) -> None:
        super().__init__(below)
        self.asked = asked

    def count(self, kind: str, unit: str) -> None:
        """Counts a collective that is about to be launched."""
        key = f"{kind} of {unit}"
        self.asked[key] = self.asked.get(key, 0) + 1

    def start(self, kind: str, unit: str, sent: torch.Tensor, launch: Callable[[], Handle]) -> Handle:
        self.count(kind, unit)
        return launch()

    @property
    def exact(self) -> Comm:
        return self if self._below.exact is self._below else Sealed(self._below.exact, self.asked)

    def new_source(self, sizes: Sizes = None) -> Source:
        source = self._below.new_source(sizes)
        return ShardAllGather(self, sizes) if isinstance(source, ShardAllGather) else CountedSource(source, self)

    def seal(self, flags: torch.Tensor, what: str) -> None:
        if len(flags) > 1:
            # The agreement is a maximum: over the code and over its complement it gives the largest and the smallest
            # code of all ranks, which are equal only if all codes are. Bit 0 stays the flag's own.
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
    """A source that counts its gathers."""

    def __init__(self, below: Source, comm: Sealed) -> None:
        self._below, self._comm = below, comm
        self.released, self.updated, self.stale = below.released, below.updated, below.stale

    def launch(self, full: torch.Tensor, unit: str, stamp: Stamp | None) -> Handle:
        """Counts the gather and launches it in the source below."""
        self._comm.count("gather", unit)
        return self._below.launch(full, unit, stamp)


def sealed(comm: Comm) -> Comm:
    """Returns `comm` with checksums; `comm` itself in a world of one rank and in a simulated world."""
    if comm.group is None or str(dist.get_backend(comm.group)) == FAKE:
        return comm
    return Sealed(comm, {})
