"""Bounded host memory on the way between the device and a file.

slab     all of a pool's memory, allocated once: pinned where a GPU copies from and to it, aligned to ALIGN_BYTES
buffer   an equal part of the slab, free or taken; each begins at a multiple of ALIGN_BYTES, as direct I/O demands

Nothing else of the file tier grows with the model: a thread that finds no free buffer waits until one is given back.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ... import labels
from .direct_io import ALIGN_BYTES, aligned
from .io_threads import IoHandle

PATIENCE_S = 600.0
"""Time, in seconds, after which no buffer will be given back any more."""


@dataclass(frozen=True, eq=False)
class Buffer:
    """A part of a pool's slab. `tensor`: (bytes,) uint8."""

    tensor: torch.Tensor

    def view(self, dtype: torch.dtype, numel: int, offset: int = 0) -> torch.Tensor:
        """(numel,) of `dtype`, from byte `offset` on. Raises ValueError where it would reach beyond the buffer."""
        end = offset + numel * dtype.itemsize
        if end > self.tensor.numel() or offset % dtype.itemsize:
            words = f"{numel} elements of {dtype} at byte {offset}"
            size = self.tensor.numel()
            raise ValueError(f"{words}: a buffer has {size} bytes, and elements begin at multiples of their size")
        return self.tensor[offset:end].view(dtype)


def _in_large_pages(address: int, nbytes: int) -> None:
    """Advice, no more: direct I/O handles page by page, and with large ones takes half the CPU time."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mmap.MADV_HUGEPAGE)


class Pool:
    """`count` buffers of `buffer_bytes` (rounded up to ALIGN_BYTES). Any thread may take and give."""

    def __init__(self, buffer_bytes: int, count: int, pinned: bool = False) -> None:
        if buffer_bytes < 1 or count < 1:
            raise ValueError(f"a pool of {count} buffers of {buffer_bytes} bytes: both must be at least 1")
        self.buffer_bytes, self.count = aligned(buffer_bytes), count
        size = self.buffer_bytes * count
        # pinned memory begins with a page, and one byte more than a power of two would double it
        slab = torch.empty(size + (0 if pinned else ALIGN_BYTES), dtype=torch.uint8, pin_memory=pinned)
        labels.label(slab, labels.COMMUNICATION, "nvme pool", tier=labels.HOST)
        begin = -slab.data_ptr() % ALIGN_BYTES
        if not pinned:
            _in_large_pages(slab.data_ptr() + begin, size)
        parts = slab[begin : begin + size].split(self.buffer_bytes)
        self.bytes = slab.numel()
        """Host memory of the pool, alignment included: what it takes from its making to its end."""
        self._buffers = tuple(Buffer(part) for part in parts)
        self._free = deque(self._buffers)
        self._changed = threading.Condition()

    @property
    def taken(self) -> int:
        """Buffers that are not free."""
        return self.count - len(self._free)

    def take(self, timeout_s: float = PATIENCE_S) -> Buffer:
        """A buffer, whatever is in it; waits for one where none is free. Raises TimeoutError after `timeout_s`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._free, timeout_s):
                words = f"all {self.count} buffers of the pool were taken for {timeout_s:g} s"
                raise TimeoutError(f"{words}; make it larger, or give some back")
            return self._free.popleft()

    def take_free(self) -> Buffer | None:
        """A buffer if one is free."""
        with self._changed:
            return self._free.popleft() if self._free else None

    def give(self, buffer: Buffer, after: IoHandle | None = None) -> None:
        """Gives a buffer back, at once or when `after`, which reads or writes it, is done.

        Raises ValueError for a buffer of another pool, and for one that is free already.
        """
        if buffer not in self._buffers:
            raise ValueError("this buffer is another pool's")
        if after is not None:
            after.then(lambda: self.give(buffer))
            return
        with self._changed:
            if buffer in self._free:
                raise ValueError("this buffer was given back already")
            self._free.append(buffer)
            self._changed.notify()

    @contextmanager
    def all_back(self) -> Iterator[Pool]:
        """Checks that buffers taken inside are given back inside. Raises RuntimeError otherwise."""
        before = self.taken
        yield self
        if self.taken != before:
            raise RuntimeError(f"{self.taken - before} of the pool's {self.count} buffers did not come back")
