"""The interface to the disk: every byte between memory and a file goes through `read` and `write` here.

direct     past the page cache (O_DIRECT), if the file system supports it; addresses, offsets and lengths are then
           multiples of ALIGN_BYTES
buffered   otherwise, through the page cache, whose pages are dropped as soon as they are clean
piece      the memory of one call: (bytes,), with any start and end
bounce     aligned memory, one per thread, for the part of a piece that is not aligned: usually the last bytes of a
           tensor, less than a page. Only pages that were needed are resident

Bounded host memory between the device and a file:

slab     all of a pool's memory, allocated once: pinned if a GPU copies from and to it, aligned to ALIGN_BYTES
buffer   an equal part of the slab, free or taken; each begins at a multiple of ALIGN_BYTES, as direct I/O demands

Nothing else in the file tier grows with the model: a thread that finds no free buffer waits until one is given back.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ... import labels
from .io_threads import IoHandle

ALIGN_BYTES = 4096
"""Alignment of addresses, offsets and lengths for direct I/O on every common disk (512 suffices on some)."""

CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class DiskError(OSError):
    """A failed file operation; the message names file, offset, bytes and cause. `errno`: the system's, if known."""

    def __init__(self, sentence: str, code: int | None = None) -> None:
        super().__init__(sentence)
        self.errno = code


def aligned(nbytes: int) -> int:
    """Returns `nbytes` rounded up to a multiple of ALIGN_BYTES."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def free_bytes(place: Path | int) -> int:
    """Returns the free bytes in the file system of a folder or an open file."""
    told = os.statvfs(place)
    return told.f_bavail * told.f_frsize


class Channel:
    """A new file at `path` for at most `depth` concurrent pieces of at most `piece_bytes`. `direct`: whether direct I/O
    is wanted; the attribute: whether it is used.

    Raises DiskError if the file cannot be created.
    """

    def __init__(self, path: Path, direct: bool, piece_bytes: int, depth: int) -> None:
        self.path, self._piece_bytes = path, aligned(piece_bytes)
        self.bytes = 0
        self.direct = direct and hasattr(os, "O_DIRECT") and _takes_direct(path)
        try:
            self._fd = os.open(path, CREATE | (os.O_DIRECT if self.direct else 0), 0o600)
        except OSError as error:
            raise DiskError(f"{path} cannot be made: {os.strerror(error.errno or 0)}", error.errno) from error
        self._own = threading.local()
        self._slots = threading.Semaphore(depth)

    def grow(self, nbytes: int) -> int:
        """Reserves `nbytes` more on the disk and returns their offset. Raises DiskError if the disk is full."""
        begin, free = self.bytes, free_bytes(self._fd)
        if nbytes > free:
            raise self._full("grow", begin, nbytes, free)
        try:
            if nbytes:
                os.posix_fallocate(self._fd, begin, nbytes)
        except OSError as error:
            os.ftruncate(self._fd, begin)
            raise self._failed("grow", begin, nbytes, error) from error
        self.bytes = begin + nbytes
        return begin

    def read(self, piece: memoryview, offset: int, name: str) -> None:
        """Fills `piece` from byte `offset` of the file, for the tensor `name`. Raises DiskError."""
        parts, loose = self._parts(piece)
        self._move(labels.READ, parts, offset, len(piece), name)
        if loose:
            piece[-loose:] = parts[-1][:loose]
        self._forget(offset, len(piece))

    def write(self, piece: memoryview, offset: int, name: str) -> None:
        """Writes `piece` at byte `offset`, and arbitrary bytes up to the end of its page. Raises DiskError."""
        parts, loose = self._parts(piece)
        if loose:
            parts[-1][:loose] = piece[-loose:]
        self._move(labels.WRITE, parts, offset, len(piece), name)
        self._forget(offset, len(piece))

    def close(self) -> None:
        """Closes and removes the file."""
        os.close(self._fd)
        self.path.unlink(missing_ok=True)

    def _parts(self, piece: memoryview) -> tuple[list[memoryview], int]:
        """Returns memory for the system call in place of `piece`, and how many bytes at its end are in the bounce."""
        if not self.direct:
            return [piece], 0
        whole = 0 if address_of(piece) % ALIGN_BYTES else len(piece) // ALIGN_BYTES * ALIGN_BYTES
        loose = len(piece) - whole
        parts = [piece[:whole]] if whole else []
        if loose:
            if not hasattr(self._own, "bounce"):
                self._own.bounce = memoryview(mmap.mmap(-1, self._piece_bytes))
            parts.append(self._own.bounce[: aligned(loose)])
        return parts, loose

    def _move(self, kind: str, parts: Sequence[memoryview], offset: int, nbytes: int, name: str) -> None:
        """Repeats the call after a short transfer, until all bytes are transferred or no more are."""
        call = {labels.READ: os.preadv, labels.WRITE: os.pwritev}[kind]
        wanted, done = sum(len(part) for part in parts), 0
        while done < wanted:
            try:
                with self._slots:
                    moved = call(self._fd, _from(parts, done), offset + done)
            except OSError as error:
                raise self._failed(kind, offset, nbytes, error) from error
            done += moved
            labels.transfer(kind, moved, name)
            if not moved or (self.direct and done % ALIGN_BYTES):
                break
        if done < nbytes:
            size = os.fstat(self._fd).st_size
            words = f"{kind} of {nbytes} bytes at {offset} ended after {done}; the file has {size} bytes"
            raise DiskError(f"{self.path}: {words}, of {self.bytes} that were reserved")

    def _forget(self, offset: int, nbytes: int) -> None:
        """Removes the pool's data from the page cache: written pages go to the disk, clean ones are dropped."""
        if not self.direct:
            os.posix_fadvise(self._fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def _failed(self, kind: str, offset: int, nbytes: int, error: OSError) -> DiskError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return self._full(kind, offset, nbytes, free_bytes(self._fd))
        why = os.strerror(error.errno or 0)
        if error.errno == errno.EFBIG:
            why += ", for this process or this file system (ulimit -f)"
        return DiskError(f"{self.path}: {kind} of {nbytes} bytes at {offset} failed: {why}", error.errno)

    def _full(self, kind: str, offset: int, nbytes: int, free: int) -> DiskError:
        words = f"{kind} of {nbytes} bytes at {offset} failed: the disk is full: {nbytes} bytes are needed"
        return DiskError(f"{self.path}: {words} and {free} are free", errno.ENOSPC)


def address_of(piece: memoryview) -> int:
    """Returns the address of a piece's memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(piece)) if len(piece) else 0


def _from(parts: Sequence[memoryview], done: int) -> list[memoryview]:
    """Returns the rest of `parts` after their first `done` bytes."""
    left = []
    for part in parts:
        if done < len(part):
            left.append(part[done:])
        done = max(0, done - len(part))
    return left


def _takes_direct(path: Path) -> bool:
    """Returns True if a page can be written directly next to `path`: some file systems fail in open, some in write."""
    probe = path.with_name(f"{path.name}.probe")
    try:
        fd = os.open(probe, CREATE | os.O_DIRECT, 0o600)
    except OSError:
        probe.unlink(missing_ok=True)  # some refuse only when it is made
        return False
    try:
        with mmap.mmap(-1, ALIGN_BYTES) as page:
            return os.pwritev(fd, [page], 0) == ALIGN_BYTES
    except OSError:
        return False
    finally:
        os.close(fd)
        probe.unlink(missing_ok=True)


PATIENCE_S = 600.0
"""Time, in seconds, after which a wait for a buffer is given up."""


@dataclass(frozen=True, eq=False)
class Buffer:
    """A part of a pool's slab. `tensor`: (bytes,) uint8."""

    tensor: torch.Tensor

    def view(self, dtype: torch.dtype, numel: int, offset: int = 0) -> torch.Tensor:
        """Returns (numel,) of `dtype`, from byte `offset` on."""
        return self.tensor[offset : offset + numel * dtype.itemsize].view(dtype)


class Pool:
    """`count` buffers of `buffer_bytes` (rounded up to ALIGN_BYTES). Thread-safe."""

    def __init__(self, buffer_bytes: int, count: int, pinned: bool = False) -> None:
        self.buffer_bytes, self.count = aligned(buffer_bytes), count
        size = self.buffer_bytes * count
        # Large pinned memory begins at a page boundary, and one byte more than a power of two would double it. CUDA
        # takes small pinned memory from the middle of a page.
        slab = torch.empty(size + (0 if pinned else ALIGN_BYTES), dtype=torch.uint8, pin_memory=pinned)
        if pinned and slab.data_ptr() % ALIGN_BYTES:
            slab = torch.empty(size + ALIGN_BYTES, dtype=torch.uint8, pin_memory=True)
        self.slab = labels.Held(slab, labels.COMMUNICATION, "nvme pool", labels.HOST)
        labels.label(*self.slab)
        begin = -slab.data_ptr() % ALIGN_BYTES
        parts = slab[begin : begin + size].split(self.buffer_bytes)
        self._free = deque(Buffer(part) for part in parts)
        self._changed = threading.Condition()

    @property
    def taken(self) -> int:
        """Number of buffers that are not free."""
        return self.count - len(self._free)

    def take(self, timeout_s: float = PATIENCE_S) -> Buffer:
        """Returns a buffer with arbitrary content; waits if none is free. Raises TimeoutError after `timeout_s`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._free, timeout_s):
                words = f"all {self.count} buffers of the pool were taken for {timeout_s:g} s"
                raise TimeoutError(f"{words}; make it larger, or give some back")
            return self._free.popleft()

    def give(self, buffer: Buffer, after: IoHandle | None = None) -> None:
        """Gives a buffer back, immediately or when `after`, which reads or writes it, is done."""
        if after is not None:
            after.then(lambda: self.give(buffer))
            return
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()
