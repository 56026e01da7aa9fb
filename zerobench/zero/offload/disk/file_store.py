"""Tensors in files: ZeRO-Infinity's lowest tier (arXiv 2104.07857, section 6.3). [Note: the file tier]

store    one file in this rank's own folder, removed when it is closed
region   a part of the file that belongs to one tensor for good, at a multiple of ALIGN_BYTES
block    the bytes of one request: `block_bytes` of a region, its last block fewer
handle   returned immediately by a read or write; waited for before the memory is used again

Requests to one block keep their order, so that a read sees the write before it; others may be reordered.
"""

from __future__ import annotations

import ctypes
import uuid
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from ... import labels
from .direct_io import Channel, DiskError, aligned
from .io_threads import Carriers, IoHandle
from .scratch import at_end


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Returns a contiguous tensor's bytes in host memory, without a copy; the caller keeps the tensor alive."""
    nbytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


BLOCK_BYTES = 4 * 2**20
DEPTH = 8


class Region:
    """`nbytes` of a store's file, from `offset` on, in blocks of the store's size."""

    def __init__(self, store: FileStore, offset: int, nbytes: int, name: str) -> None:
        self.store, self.offset, self.nbytes, self.name = store, offset, nbytes, name
        self._written: set[int] = set()  # numbers of blocks

    def read(self, tensor: torch.Tensor, at: int = 0) -> IoHandle:
        """Launches reading all of `tensor` from byte `at` of the region.

        `tensor`: contiguous, in host memory, any dtype and shape. It begins with a block, and ends with one or with the
        region. The handle raises DiskError.
        """
        return self._launch(self._read, tensor, at)

    def write(self, tensor: torch.Tensor, at: int = 0) -> IoHandle:
        """Launches writing `tensor`, with the arguments of `read`; it must not change until the handle is done."""
        return self._launch(self._write, tensor, at)

    def _launch(self, carry: Callable[[int, memoryview], None], tensor: torch.Tensor, at: int) -> IoHandle:
        memory, size = memory_of(tensor), self.store.block_bytes
        handle = IoHandle(-(-len(memory) // size), keep=tensor)
        for begin in range(0, len(memory), size):
            number = (at + begin) // size
            request = partial(handle.carry, partial(carry, number, memory[begin : begin + size]))
            self.store.carriers.submit((self.offset, number), request)
        self.store.watch(handle)
        return handle

    def _write(self, number: int, piece: memoryview) -> None:
        self._written.add(number)
        self.store.channel.write(piece, self.offset + number * self.store.block_bytes, self.name)

    def _read(self, number: int, piece: memoryview) -> None:
        offset = self.offset + number * self.store.block_bytes
        if number not in self._written:
            raise DiskError(f"{self.store.channel.path}: {len(piece)} bytes at {offset} were never written")
        self.store.channel.read(piece, offset, self.name)


class FileStore:
    """A file in `folder`, removed when it is garbage-collected or when the interpreter ends.

    Up to `depth` requests of `block_bytes` are at the disk concurrently, past the page cache if `direct` is wanted and
    possible. Raises DiskError if the file cannot be created.
    """

    def __init__(
        self, folder: Path | str, block_bytes: int = BLOCK_BYTES, depth: int = DEPTH, direct: bool = True
    ) -> None:
        self.block_bytes = block_bytes
        self.channel = Channel(Path(folder) / f"states-{uuid.uuid4().hex[:8]}.bin", direct, block_bytes, depth)
        self.carriers = Carriers(depth, "states")
        self._under_way: list[IoHandle] = []
        self._sizes: Counter[tuple[str, str]] = Counter()  # by name and category
        self._end = at_end(self, _shut, self.carriers, self.channel)

    def allocate(self, nbytes: int, category: str = labels.OPTIMIZER, name: str = "") -> Region:
        """Reserves a region of `nbytes` on the disk. Raises DiskError if the disk is full."""
        region = Region(self, self.channel.grow(aligned(nbytes)), nbytes, name)
        self._sizes[name, category] += nbytes
        self._label(name, category)
        return region

    def label_files(self) -> None:
        """Reports the bytes again, for an observer that registered after `allocate`."""
        for name, category in self._sizes:
            self._label(name, category)

    def _label(self, name: str, category: str) -> None:
        labels.file(str(self.channel.path), name, category, self._sizes[name, category])

    def drain(self) -> None:
        """Waits for all requests. Raises the first error that `wait` has not raised yet."""
        handles, self._under_way = self._under_way, []
        for handle in handles:
            handle.settle()
        for handle in handles:
            if handle.failed:
                handle.wait()

    def watch(self, handle: IoHandle) -> None:
        """Keeps `handle` for `drain`; drops handles that are done, except those with an unraised error."""
        self._under_way = [one for one in self._under_way if not one.done or one.failed]
        self._under_way.append(handle)


def _shut(carriers: Carriers, channel: Channel) -> None:
    carriers.end()
    channel.close()
