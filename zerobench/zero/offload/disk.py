"""Tensors in files: ZeRO-Infinity's lowest tier (arXiv 2104.07857, section 6.3), in bounded host memory.

[Note: the file tier]
    scratch   a rank's own folder, removed when the rank ends, with a lock that names its machine
    store     one file in this folder
    region    a part of the file that belongs to one tensor for good, at a multiple of ALIGN_BYTES
    block     the bytes of one request: `block_bytes` of a region, its last block fewer
    handle    returned immediately by a read or write; waited for before the memory is used again
    carriers  threads that run requests. Those to one block keep their order, so that a read sees the write before it;
              others may be reordered

[Note: direct I/O]
    direct    past the page cache (O_DIRECT), if the file system supports it; addresses, offsets and lengths are then
              multiples of ALIGN_BYTES
    buffered  otherwise, through the page cache, whose pages are dropped as soon as they are clean
    piece     the memory of one call: (bytes,), with any start and end
    bounce    aligned memory, one per thread, for the part of a piece that is not aligned: usually the last bytes of a
              tensor, less than a page. Only pages that were needed are resident

[Note: the pool]
    slab      all memory between the device and the file, allocated once: pinned if a GPU copies from and to it
    buffer    an equal part of the slab, free or taken; each begins at a multiple of ALIGN_BYTES

Nothing else here grows with the model: a thread that finds no free buffer waits until one is given back.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import shutil
import tempfile
import threading
import uuid
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from .. import labels
from ..labels import EngineThread

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


def free_bytes(target: Path | int) -> int:
    """Returns the free bytes in the file system of a folder or an open file."""
    status = os.statvfs(target)
    return status.f_bavail * status.f_frsize


# -- folders ----------------------------------------------------------------------------------------------------------


NAME = "zerobench-scratch-"
LOCK = "lock"


class Scratch:
    """A new folder in `parent`, removed with its content when it is garbage-collected or its interpreter ends.
    Leftovers of ended processes in `parent` are removed first. Raises DiskError if no folder can be created there.
    """

    def __init__(self, parent: Path | str) -> None:
        home, name = Path(parent), uuid.uuid4().hex[:12]
        sweep(home)
        unlocked = home / f".{NAME}{name}"
        self.path = home / f"{NAME}{name}"
        try:
            unlocked.mkdir(0o700)
            lock = hold(unlocked / LOCK)
            unlocked.rename(self.path)  # only now do others look at it
        except OSError as error:
            raise DiskError(f"no folder can be made in {home}: {os.strerror(error.errno or 0)}", error.errno) from error
        self._end = at_end(self, _remove, self.path, lock)


def hold(lock: Path) -> int:
    """Makes a file that names this machine, locked (flock) until the returned descriptor is closed."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(descriptor, platform.node().encode())
    return descriptor


def sweep(parent: Path | str) -> list[Path]:
    """Removes scratch folders in `parent` whose processes have ended, and returns them: a killed rank cannot clean up
    itself. Other machines' folders stay: their locks may be invisible here (NFS with `nolock`, Lustre with
    `localflock`), and so do all in a file system without locks.
    """
    own = f"{NAME}{'[0-9a-f]' * 12}"  # others are a user's
    gone = [folder for folder in Path(parent).glob(own) if not is_held(folder / LOCK)]
    for folder in gone:
        shutil.rmtree(folder, ignore_errors=True)
    return gone


def problems_of_path(path: str) -> list[str]:
    """Returns an error message if files cannot be stored in the folder `path` on this machine."""
    home = Path(path).expanduser()
    if not os.path.exists(home):  # a name that is too long is none either
        return [f"{path}: there is no such folder; make it, or name another"]
    if not home.is_dir():
        return [f"{path}: is no folder; name one on the disk to be used"]
    try:
        with tempfile.NamedTemporaryFile(dir=home, prefix=f".{NAME}") as file:
            file.write(bytes(ALIGN_BYTES))
            file.flush()
    except OSError as error:
        free = f" ({free_bytes(home)} bytes are free)"
        return [f"{path}: cannot be written to: {os.strerror(error.errno or 0)}{free}; name another folder"]
    return []


def is_held(file: Path) -> bool:
    """Returns True if a running process holds this lock, or if that cannot be determined."""
    try:
        lock = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # its owner, or another process, is removing it
        return False
    except OSError:  # another user's
        return True
    try:
        if os.read(lock, 4096) not in (b"", platform.node().encode()):  # another machine's
            return True
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # it is held, or there are no locks
        return True
    finally:
        os.close(lock)
    return False


def at_end(owner: object, act: Callable[..., None], *arguments: Any) -> weakref.finalize[..., object]:
    """weakref.finalize for resources of this process only: a forked child ends with copies of its parent's objects."""
    process = os.getpid()

    def end() -> None:
        if os.getpid() == process:
            act(*arguments)

    return weakref.finalize(owner, end)


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


# -- requests, and the threads that run them --------------------------------------------------------------------------


Act = Callable[[], None]


class IoHandle:
    """`count` pending requests. `keep`: the object that they read from or write into, released when all are done."""

    def __init__(self, count: int, keep: Any = None) -> None:
        self._left, self._keep = count, keep
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._over: Future[None] = Future()
        self._raised = False
        if not count:
            self._over.set_result(None)

    @property
    def done(self) -> bool:
        """True if all requests have ended, successfully or not."""
        return self._over.done()

    @property
    def failed(self) -> bool:
        """True if a request failed and its error has not been raised yet."""
        return self._error is not None and not self._raised

    def settle(self) -> None:
        """Returns when all requests have ended, successfully or not."""
        self._over.result()

    def wait(self) -> None:
        """Returns when all requests have ended. Raises the error of the first that failed: DiskError."""
        self.settle()
        self._raised = True
        if self._error is not None:
            raise self._error

    def then(self, act: Act) -> None:
        """Calls `act` when all requests have ended, successfully or not, in the last one's thread; now if they have."""
        self._over.add_done_callback(lambda _: act())

    def carry(self, request: Act) -> None:
        """Runs one of the requests; an error is kept for `wait`, and the remaining requests are then skipped."""
        error = None
        if self._error is None:
            try:
                request()
            except Exception as caught:
                error = caught
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if self._left:
                return
            self._keep = None
        self._over.set_result(None)


class Carriers:
    """`count` threads that run requests."""

    def __init__(self, count: int, name: str) -> None:
        self._ready: SimpleQueue[tuple[Hashable, Act] | None] = SimpleQueue()
        self._behind: dict[Hashable, deque[Act]] = {}
        self._lock = threading.Lock()
        self._threads = [EngineThread(target=self._run, name=f"{name}-{n}", daemon=True) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, block: Hashable, act: Act) -> None:
        """Lets a thread call `act`, which must not raise, once all earlier requests for `block` have ended."""
        with self._lock:
            if block in self._behind:
                self._behind[block].append(act)
                return
            self._behind[block] = deque()
        self._ready.put((block, act))

    def end(self) -> None:
        """Ends the threads; no requests may be pending."""
        for _ in self._threads:
            self._ready.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (request := self._ready.get()) is not None:
            block, act = request
            act()
            del act, request
            with self._lock:
                behind = self._behind[block]
                if behind:
                    self._ready.put((block, behind.popleft()))
                else:
                    del self._behind[block]


# -- the pool ---------------------------------------------------------------------------------------------------------


PATIENCE_S = 600.0
"""Time, in seconds, after which a wait for a buffer is given up."""


class Pool:
    """`count` buffers, (buffer_bytes,) uint8, of bytes rounded up to ALIGN_BYTES. Thread-safe."""

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
        self._free = deque(slab[begin : begin + size].split(self.buffer_bytes))
        self._changed = threading.Condition()

    @property
    def taken(self) -> int:
        """Number of buffers that are not free."""
        return self.count - len(self._free)

    def take(self, timeout_s: float = PATIENCE_S) -> torch.Tensor:
        """Returns a buffer with arbitrary content; waits if none is free. Raises TimeoutError after `timeout_s`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._free, timeout_s):
                raise TimeoutError(
                    f"all {self.count} buffers of the pool were taken for {timeout_s:g} s; make it larger, or give some"
                    " back"
                )
            return self._free.popleft()

    def give(self, buffer: torch.Tensor, after: IoHandle | None = None) -> None:
        """Gives a buffer back, immediately or when `after`, which reads or writes it, is done."""
        if after is not None:
            after.then(lambda: self.give(buffer))
            return
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()


# -- the disk: every byte between memory and a file -------------------------------------------------------------------


class Channel:
    """A new file at `path` for at most `depth` concurrent pieces of at most `piece_bytes`. `direct`: whether direct I/O
    is wanted; the attribute: whether it is used. Raises DiskError if the file cannot be created.
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
        address = ctypes.addressof(ctypes.c_char.from_buffer(piece)) if len(piece) else 0
        whole = 0 if address % ALIGN_BYTES else len(piece) // ALIGN_BYTES * ALIGN_BYTES
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
                    moved = call(self._fd, _unmoved(parts, done), offset + done)
            except OSError as error:
                raise self._failed(kind, offset, nbytes, error) from error
            done += moved
            labels.transfer(kind, moved, name)
            if not moved or (self.direct and done % ALIGN_BYTES):
                break
        if done < nbytes:
            size = os.fstat(self._fd).st_size
            raise DiskError(
                f"{self.path}: {kind} of {nbytes} bytes at {offset} ended after {done}; the file has {size} bytes, of"
                f" {self.bytes} that were reserved"
            )

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
        return DiskError(
            f"{self.path}: {kind} of {nbytes} bytes at {offset} failed: the disk is full: {nbytes} bytes are needed and"
            f" {free} are free",
            errno.ENOSPC,
        )


def _unmoved(parts: Sequence[memoryview], done: int) -> list[memoryview]:
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


# -- tensors in a file ------------------------------------------------------------------------------------------------


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
        """Launches reading all of `tensor` from byte `at` of the region. `tensor`: contiguous, in host memory, any
        dtype and shape. It begins with a block, and ends with one or with the region. The handle raises DiskError.
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
    """A file in `folder`, removed when it is garbage-collected or when the interpreter ends. Up to `depth` requests of
    `block_bytes` are at the disk concurrently, past the page cache if `direct` is wanted and possible. Raises DiskError
    if the file cannot be created.
    """

    def __init__(
        self, folder: Path | str, block_bytes: int = BLOCK_BYTES, depth: int = DEPTH, direct: bool = True
    ) -> None:
        self.block_bytes = block_bytes
        self.channel = Channel(Path(folder) / f"states-{uuid.uuid4().hex[:8]}.bin", direct, block_bytes, depth)
        self.carriers = Carriers(depth, "states")
        self._under_way: list[IoHandle] = []
        self._sizes: Counter[tuple[str, str]] = Counter()  # by name and category
        self._end = at_end(self, _close, self.carriers, self.channel)

    def allocate(self, nbytes: int, category: str = labels.OPTIMIZER, name: str = "") -> Region:
        """Reserves a region of `nbytes` on the disk. Raises DiskError if the disk is full."""
        region = Region(self, self.channel.grow(aligned(nbytes)), nbytes, name)
        self._sizes[name, category] += nbytes
        labels.file(str(self.channel.path), name, category, self._sizes[name, category])
        return region

    def label_files(self) -> None:
        """Reports the bytes again, for an observer that registered after `allocate`."""
        for (name, category), size in self._sizes.items():
            labels.file(str(self.channel.path), name, category, size)

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
        self._under_way = [pending for pending in self._under_way if not pending.done or pending.failed]
        self._under_way.append(handle)


def _close(carriers: Carriers, channel: Channel) -> None:
    carriers.end()
    channel.close()
