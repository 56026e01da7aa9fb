"""Tensors in files: ZeRO-Infinity's lowest tier (arXiv 2104.07857, section 6.3). [Note: the file tier]

store    one file in this rank's own folder, removed when it is closed
region   a part of the file that belongs to one tensor for good, at a multiple of ALIGN_BYTES
block    the bytes of one request: `block_bytes` of a region, its last block fewer. Each has a checksum in memory, made
         when it is written and checked when it is read
handle   returned immediately by a read or write; waited for before the memory is used again

Requests to one block keep their order, so that a read sees the write before it; others may be reordered.

A checksum as fast as a disk: 2.4 times as fast as zlib's CRC-32 over the bytes (4.4 compared with 1.8 GB/s on a core).

word     8 bytes, little-endian
page     PAGE_WORDS words
chunk    CHUNK_PAGES pages: the sums of its rows, one per page, and of its columns, one per position in the page, modulo
         2^64

The sums, and the bytes after the last page, go through CRC-32. It detects any one or two wrong words, and any sector
that is stale, from another place, or zeros, except for one in 2^32 random errors. It does not detect four words at the
corners of a rectangle of positions and pages that are wrong by amounts that cancel out.
"""

from __future__ import annotations

import ctypes
import uuid
import zlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from ... import labels
from .direct_io import Channel, DiskError, aligned
from .io_threads import Carriers, IoHandle
from .scratch import at_end

PAGE_WORDS = 512

CHUNK_PAGES = 63
"""Below the size that torch would split over its own threads, since every carrier would start a set of them."""


def checksum(piece: memoryview) -> int:
    """Returns a 32-bit checksum of (bytes,) of memory, with any alignment."""
    whole = len(piece) // (8 * PAGE_WORDS) * 8 * PAGE_WORDS
    found = zlib.crc32(piece[whole:])
    if whole:
        for chunk in torch.frombuffer(piece[:whole], dtype=torch.int64).view(-1, PAGE_WORDS).split(CHUNK_PAGES):
            for sums in (chunk.sum(1), chunk.sum(0)):
                found = zlib.crc32(memory_of(sums), found)
    return found


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Returns a contiguous tensor's bytes in host memory, without a copy; the caller keeps the tensor alive."""
    nbytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


BLOCK_BYTES = 4 * 2**20
DEPTH = 8

CHECKERS = 2
"""Threads in addition to those at the disk: while some compute checksums, the others keep the disk busy."""


class Region:
    """`nbytes` of a store's file, from `offset` on, in blocks of the store's size."""

    def __init__(self, store: FileStore, offset: int, nbytes: int, name: str) -> None:
        self.store, self.offset, self.nbytes, self.name = store, offset, nbytes, name
        self._sums: list[int | None] = [None] * -(-nbytes // store.block_bytes)

    def read(self, tensor: torch.Tensor, at: int = 0) -> IoHandle:
        """Launches reading all of `tensor` from byte `at` of the region.

        `tensor`: contiguous, in host memory, any dtype and shape. It begins with a block, and ends with one or with the
        region. The handle raises DiskError, also for a block whose checksum differs from the one made when it was
        written.
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
        self._sums[number] = checksum(piece) if self.store.checksums else 0
        self.store.channel.write(piece, self.offset + number * self.store.block_bytes, self.name)

    def _read(self, number: int, piece: memoryview) -> None:
        offset, path = self.offset + number * self.store.block_bytes, self.store.channel.path
        if self._sums[number] is None:
            raise DiskError(f"{path}: {len(piece)} bytes at {offset} were never written")
        self.store.channel.read(piece, offset, self.name)
        if self.store.checksums and checksum(piece) != self._sums[number]:
            words = "are not the bytes that were written (the checksum differs)"
            raise DiskError(f"{path}: {len(piece)} bytes at {offset} {words}")


class FileStore:
    """A file in `folder`, removed when it is garbage-collected or when the interpreter ends.

    Up to `depth` requests of `block_bytes` are at the disk concurrently, past the page cache if `direct` is wanted and
    possible. `checksums`: 32 bits per block (file_store.py). Raises DiskError if the file cannot be
    created.
    """

    def __init__(
        self, folder: Path | str, block_bytes: int = BLOCK_BYTES, depth: int = DEPTH, direct: bool = True,
        checksums: bool = True,
    ) -> None:  # fmt: skip
        self.block_bytes, self.checksums = block_bytes, checksums
        self.channel = Channel(Path(folder) / f"states-{uuid.uuid4().hex[:8]}.bin", direct, block_bytes, depth)
        self.carriers = Carriers(depth + (CHECKERS if checksums else 0), "states")
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
