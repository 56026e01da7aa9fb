"""Tensors in a file, chunk by chunk, and the pool that chunks are read into. [Note: a chunk's states]

absent     the chunk is only in the file
launched   a buffer of the pool is being filled from the file
present    the buffer contains it: `present` is a view of it
           then dropped, or written back and given back when that is done
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .disk import Buffer, FileStore, IoHandle, Pool, Region, Scratch
from .policy import LEAST_BUFFERS, NvmeOffload

MOST_FETCHED = 2**16
"""Maximum number of fetches remembered per step."""


GIVING_BACK = 2
"""Buffers that a present chunk, with its states, may still need: a part of the parameters, old and new."""

AHEAD = 8
"""Chunks that are read ahead, as far as the pool has free buffers: as many as are at the disk concurrently."""


class PagedTensor:
    """(numel,) of `dtype` in the file. `chunks`: [start, stop) of each."""

    def __init__(
        self, store: FileStore, pool: Pool, numel: int, step: int, dtype: torch.dtype, category: str, name: str
    ) -> None:
        self.numel, self.dtype = numel, dtype
        self.chunks = [(start, min(numel, start + step)) for start in range(0, numel, step)]
        self._step, self._pool = step, pool
        sizes = ((stop - start) * dtype.itemsize for start, stop in self.chunks)
        self._regions: list[Region] = [store.allocate(size, category, name) for size in sizes]
        self._here: dict[int, tuple[Buffer, IoHandle | None]] = {}

    def open(self, chunk: int) -> torch.Tensor:
        """absent -> present, with arbitrary content."""
        self._here[chunk] = self._pool.take(), None
        return self.present(chunk)

    def launch(self, chunk: int) -> None:
        """absent -> launched."""
        if chunk not in self._here:
            self._launch(chunk, self._pool.take())

    def launch_if_free(self, chunk: int, spare: int = LEAST_BUFFERS) -> bool:
        """absent -> launched, if the pool has more free buffers than `spare`, which the chunks that are needed now may
        take. Returns True if it is launched or present.
        """
        if chunk not in self._here and self._pool.count - self._pool.taken > spare:
            self._launch(chunk, self._pool.take())
        return chunk in self._here

    def _launch(self, chunk: int, buffer: Buffer) -> None:
        self._here[chunk] = buffer, self._regions[chunk].read(self._view(chunk, buffer))

    def load(self, chunk: int) -> None:
        """-> present."""
        self.launch(chunk)
        buffer, handle = self._here[chunk]
        if handle is not None:
            handle.wait()
            self._here[chunk] = buffer, None

    def copy(self, chunk: int) -> torch.Tensor:
        """Returns a copy of a chunk's values in host memory, outside the pool."""
        self.load(chunk)
        values = self.present(chunk).clone()
        self.drop(chunk)
        return values

    def is_present(self, chunk: int) -> bool:
        """Returns True if the chunk is in memory, and filled."""
        return chunk in self._here and self._here[chunk][1] is None

    def present(self, chunk: int) -> torch.Tensor:
        """Returns the chunk in memory, (stop - start,)."""
        return self._view(chunk, self._here[chunk][0])

    def drop(self, chunk: int) -> None:
        """-> absent, without writing."""
        buffer, handle = self._here.pop(chunk)
        self._pool.give(buffer, after=handle)

    def forget_ahead(self) -> None:
        """Drops all chunks that were read ahead."""
        for chunk in list(self._here):
            self.drop(chunk)

    def write_back(self, chunk: int) -> None:
        """present -> absent, with its current values."""
        buffer, _ = self._here.pop(chunk)
        self._pool.give(buffer, after=self._regions[chunk].write(self._view(chunk, buffer)))

    def write(self, chunk: int, values: torch.Tensor, adds: bool = False) -> None:
        """chunk := values, of any dtype and device, or with `adds` chunk + values."""
        buffer = self._pool.take()
        place = self._view(chunk, buffer)
        place.copy_(values)
        if adds:
            self.load(chunk)
            place.add_(self.present(chunk))
            self.drop(chunk)
        self._pool.give(buffer, after=self._regions[chunk].write(place))

    def write_all(self, values: torch.Tensor, adds: bool = False) -> None:
        """All chunks := values, (numel,), or with `adds` their sum."""
        for chunk, (start, stop) in enumerate(self.chunks):
            self.write(chunk, values[start:stop], adds)

    def put(self, start: int, values: torch.Tensor) -> None:
        """Elements from `start` on := values; the rest of their chunks is unchanged."""
        for chunk, low, high in self._overlaps(start, values.numel()):
            part = values[low - start : high - start]
            if (low, high) == self.chunks[chunk]:
                self.write(chunk, part)
                continue
            self.load(chunk)
            first = self.chunks[chunk][0]
            self.present(chunk)[low - first : high - first].copy_(part)
            self.write_back(chunk)

    def read(self, start: int, place: torch.Tensor) -> None:
        """place := elements from `start` on."""
        for chunk, low, high in self._overlaps(start, place.numel()):
            self.load(chunk)
            first = self.chunks[chunk][0]
            place[low - start : high - start].copy_(self.present(chunk)[low - first : high - first])
            self.drop(chunk)

    def view(self, offset: int, numel: int) -> torch.Tensor:
        """Returns a view of elements of one present chunk."""
        chunk = offset // self._step
        return self.present(chunk).narrow(0, offset - self.chunks[chunk][0], numel)

    def _overlaps(self, start: int, numel: int) -> Iterator[tuple[int, int, int]]:
        for chunk, (first, last) in enumerate(self.chunks):
            low, high = max(first, start), min(last, start + numel)
            if low < high:
                yield chunk, low, high

    def _view(self, chunk: int, buffer: Buffer) -> torch.Tensor:
        start, stop = self.chunks[chunk]
        return buffer.view(self.dtype, stop - start)


class Swapper:
    """One rank's file and pool; records the order in which tensors are read."""

    def __init__(self, policy: NvmeOffload, pinned: bool) -> None:
        self._scratch = Scratch(policy.path)
        self._store = FileStore(self._scratch.path, policy.block_bytes, policy.depth, policy.direct)
        self.pool = Pool(policy.block_bytes, policy.buffers, pinned)
        self._block_bytes = policy.block_bytes
        self._fetched: list[PagedTensor] = []  # in this step, in order
        self._last_step: list[PagedTensor] = []

    def keep(self, numel: int, dtype: torch.dtype, category: str, name: str) -> PagedTensor:
        """Returns a new tensor in the file; one of its chunks in fp32 fills a buffer."""
        step = self._block_bytes // max(4, dtype.itemsize)
        return PagedTensor(self._store, self.pool, numel, step, dtype, category, name)

    def label_files(self) -> None:
        """Reports the file's bytes again."""
        self._store.label_files()

    def fetch(self, kept: PagedTensor, place: torch.Tensor) -> None:
        """place := the whole tensor; starts reading the tensor that followed it in the last step."""
        if len(self._fetched) >= MOST_FETCHED:  # an evaluation has no end of steps
            self._fetched.clear()
        number = len(self._fetched)
        self._fetched.append(kept)
        for chunk, (start, stop) in enumerate(kept.chunks):
            kept.load(chunk)
            for following in range(chunk + 1, min(len(kept.chunks), chunk + AHEAD)):
                kept.launch_if_free(following)
            place[start:stop].copy_(kept.present(chunk))
            kept.drop(chunk)
        for ahead in self._last_step[number + 1 : number + 2]:
            if self._last_step[number] is kept:
                for chunk in range(min(len(ahead.chunks), AHEAD)):
                    ahead.launch_if_free(chunk)

    def end_step(self) -> None:
        """Waits until all writes are in the file; drops chunks that were read ahead and not used."""
        for kept in {*self._last_step, *self._fetched}:
            kept.forget_ahead()
        self._last_step, self._fetched = self._fetched, []
        self._store.drain()
