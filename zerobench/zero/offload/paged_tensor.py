"""Tensors in a file, cut by cut, and the pool that cuts are read into. [Note: a cut's states]

absent     the cut is in the file alone
launched   a buffer of the pool is being filled from the file
present    the buffer holds it: `present` is a view of it
           then dropped, or written back and given back when that is done
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from .disk import Buffer, FileStore, IoHandle, Pool, Region, Scratch

if TYPE_CHECKING:
    from .nvme import NvmeOffload


MOST_FETCHED = 2**16
"""Fetches that are remembered of a step."""


LEAST_BUFFERS = 8
"""What one cut may need at once: its master, gradients and rounded parameters, and up to 5 states. Reading ahead leaves
so many alone: whoever waits for a buffer will get one.
"""

GIVING_BACK = 2
"""What a cut that is present, with its states, may still need: a part of the parameters, old and new."""

AHEAD = 8
"""Cuts that are read before they are wanted, as far as the pool has room: as many as are at the disk at once."""


class Kept:
    """(numel,) of `dtype` in the file. `cuts`: [start, stop) of each."""

    def __init__(
        self, store: FileStore, pool: Pool, numel: int, step: int, dtype: torch.dtype, category: str, name: str
    ) -> None:
        self.numel, self.dtype = numel, dtype
        self.cuts = [(start, min(numel, start + step)) for start in range(0, numel, step)]
        self._step, self._pool = step, pool
        sizes = ((stop - start) * dtype.itemsize for start, stop in self.cuts)
        self._regions: list[Region] = [store.allocate(size, category, name) for size in sizes]
        self._here: dict[int, tuple[Buffer, IoHandle | None]] = {}

    def open(self, cut: int) -> torch.Tensor:
        """absent -> present, whatever is in the buffer."""
        self._here[cut] = self._pool.take(), None
        return self.present(cut)

    def launch(self, cut: int) -> None:
        """absent -> launched."""
        if cut not in self._here:
            self._launch(cut, self._pool.take())

    def launch_if_free(self, cut: int, spare: int = LEAST_BUFFERS) -> bool:
        """The same, where the pool has more free buffers than the `spare` ones that what is wanted now may need.
        Returns whether it is on its way, or there.
        """
        if cut not in self._here and self._pool.count - self._pool.taken > spare:
            self._launch(cut, self._pool.take())
        return cut in self._here

    def _launch(self, cut: int, buffer: Buffer) -> None:
        self._here[cut] = buffer, self._regions[cut].read(self._view(cut, buffer))

    def load(self, cut: int) -> None:
        """-> present."""
        self.launch(cut)
        buffer, handle = self._here[cut]
        if handle is not None:
            handle.wait()
            self._here[cut] = buffer, None

    def copy(self, cut: int) -> torch.Tensor:
        """A cut's values in host memory of their own, outside the pool."""
        self.load(cut)
        values = self.present(cut).clone()
        self.drop(cut)
        return values

    def is_present(self, cut: int) -> bool:
        """Whether the cut is in memory, and filled."""
        return cut in self._here and self._here[cut][1] is None

    def present(self, cut: int) -> torch.Tensor:
        """The cut in memory, (stop - start,)."""
        return self._view(cut, self._here[cut][0])

    def drop(self, cut: int) -> None:
        """-> absent, nothing having changed."""
        buffer, handle = self._here.pop(cut)
        self._pool.give(buffer, after=handle)

    def forget_ahead(self) -> None:
        """What was launched ahead of its use is let go of."""
        for cut in list(self._here):
            self.drop(cut)

    def write_back(self, cut: int) -> None:
        """present -> absent, as it is in memory now."""
        buffer, _ = self._here.pop(cut)
        self._pool.give(buffer, after=self._regions[cut].write(self._view(cut, buffer)))

    def write(self, cut: int, values: torch.Tensor, adds: bool = False) -> None:
        """The cut := values of any dtype and device, or their sum with it."""
        buffer = self._pool.take()
        place = self._view(cut, buffer)
        place.copy_(values)
        if adds:
            self.load(cut)
            place.add_(self.present(cut))
            self.drop(cut)
        self._pool.give(buffer, after=self._regions[cut].write(place))

    def write_all(self, values: torch.Tensor, adds: bool = False) -> None:
        """All cuts := values, (numel,)."""
        for cut, (start, stop) in enumerate(self.cuts):
            self.write(cut, values[start:stop], adds)

    def put(self, start: int, values: torch.Tensor) -> None:
        """Elements from `start` on := values; the rest of their cuts stays."""
        for cut, low, high in self._overlaps(start, values.numel()):
            part = values[low - start : high - start]
            if (low, high) == self.cuts[cut]:
                self.write(cut, part)
                continue
            self.load(cut)
            first = self.cuts[cut][0]
            self.present(cut)[low - first : high - first].copy_(part)
            self.write_back(cut)

    def read(self, start: int, place: torch.Tensor) -> None:
        """place := elements from `start` on."""
        for cut, low, high in self._overlaps(start, place.numel()):
            self.load(cut)
            first = self.cuts[cut][0]
            place[low - start : high - start].copy_(self.present(cut)[low - first : high - first])
            self.drop(cut)

    def view(self, offset: int, numel: int) -> torch.Tensor:
        """Elements of one cut that is present."""
        cut = offset // self._step
        return self.present(cut).narrow(0, offset - self.cuts[cut][0], numel)

    def _overlaps(self, start: int, numel: int) -> Iterator[tuple[int, int, int]]:
        for cut, (first, last) in enumerate(self.cuts):
            low, high = max(first, start), min(last, start + numel)
            if low < high:
                yield cut, low, high

    def _view(self, cut: int, buffer: Buffer) -> torch.Tensor:
        start, stop = self.cuts[cut]
        return buffer.view(self.dtype, stop - start)


class Shelf:
    """One rank's file and pool, and who reads what next."""

    def __init__(self, policy: NvmeOffload, pinned: bool) -> None:
        self._scratch = Scratch(policy.path)
        self._store = FileStore(self._scratch.path, policy.block_bytes, policy.depth, policy.direct, policy.checksums)
        self.pool = Pool(policy.block_bytes, policy.buffers, pinned)
        self._block_bytes = policy.block_bytes
        self._fetched: list[Kept] = []  # in this step, in order
        self._last_step: list[Kept] = []

    @property
    def direct(self) -> bool:
        """Whether the file is read and written past the page cache."""
        return self._store.direct

    def keep(self, numel: int, dtype: torch.dtype, category: str, name: str) -> Kept:
        """A new tensor in the file; a cut of it in fp32 fills a buffer."""
        step = self._block_bytes // max(4, dtype.itemsize)
        return Kept(self._store, self.pool, numel, step, dtype, category, name)

    def fetch(self, kept: Kept, place: torch.Tensor) -> None:
        """place := the whole tensor; the reading of what came after it in the last step begins."""
        if len(self._fetched) >= MOST_FETCHED:  # an evaluation has no end of steps
            self._fetched.clear()
        number = len(self._fetched)
        self._fetched.append(kept)
        for cut, (start, stop) in enumerate(kept.cuts):
            kept.load(cut)
            for following in range(cut + 1, min(len(kept.cuts), cut + AHEAD)):
                kept.launch_if_free(following)
            place[start:stop].copy_(kept.present(cut))
            kept.drop(cut)
        for ahead in self._last_step[number + 1 : number + 2]:
            if self._last_step[number] is kept:
                for cut in range(min(len(ahead.cuts), AHEAD)):
                    ahead.launch_if_free(cut)

    def end_step(self) -> None:
        """All that was written is in the file; what was read ahead and not wanted is let go of."""
        for kept in {*self._last_step, *self._fetched}:
            kept.forget_ahead()
        self._last_step, self._fetched = self._fetched, []
        self._store.drain()
