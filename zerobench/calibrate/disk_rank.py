"""The measurement behind `zerobench calibrate --disk`: the same bytes in several ways, interleaved, so that a drift of
the disk affects all.

raw        threads that call preadv and pwritev, each on its buffer, and nothing else: the disk's own rate
store      the engine's FileStore and Pool, without checksums
checked    the engine's FileStore and Pool, with checksums
update     the engine's update over files, with checksums, and in memory: its bound (calibrate/disk_update.py)
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..zero.offload.disk import FileStore, IoHandle, Pool, Scratch
from ..zero.offload.policy import NvmeOffload, Offload
from .disk import CHECKED, IN_MEMORY, RAW, STORE, UPDATE, DiskRow
from .disk_update import Updates

WARMUP = 1
KINDS = {"mixed": ("read", "write"), "read": ("read",), "write": ("write",)}
"""Kind -> operations on successive blocks."""

BUFFERS_A_THREAD = 2
"""Buffers of the pool per thread: one at the disk, one in transfer."""

UPDATES = (UPDATE, IN_MEMORY)
"""Updates read as much as they write."""


@dataclass(frozen=True)
class DiskPlan:
    """The measurement in `folder`: every block size at every depth, on files of `file_bytes`."""

    folder: Path
    file_bytes: int
    blocks: tuple[int, ...]
    depths: tuple[int, ...]
    repetitions: int
    direct: bool = True

    @property
    def rounds(self) -> int:
        """Number of calls of `tell`."""
        return len(self.blocks) * len(self.depths) * (self.repetitions + WARMUP)


class Way(Protocol):
    """A way to move a file's bytes. `moves_bytes`: bytes of one `carry`."""

    moves_bytes: int

    def prepare(self) -> None:
        """Prepares files that exist before the measurement; by default nothing."""
        return

    def carry(self, kinds: tuple[str, ...]) -> None:
        """Reads or writes each block, `kinds` in turns; returns when all is done."""


class Raw(Way):
    """Threads that call preadv and pwritev. `path`: an existing file, whose blocks are moved."""

    def __init__(self, path: Path, plan: DiskPlan, block: int, depth: int, direct: bool, stack: ExitStack) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600)
        stack.callback(os.close, self._fd)
        os.posix_fallocate(self._fd, 0, plan.file_bytes)
        self.moves_bytes = plan.file_bytes
        self._blocks, self._block, self._direct = plan.file_bytes // block, block, direct
        self._buffers = [_large_pages(block) for _ in range(depth)]

    def carry(self, kinds: tuple[str, ...]) -> None:
        """Moves all blocks: one thread per buffer, each takes the next block when it has finished one."""
        numbers, lock = iter(range(self._blocks)), threading.Lock()
        errors: list[OSError] = []
        threads = [threading.Thread(target=self._run, args=(b, kinds, numbers, lock, errors)) for b in self._buffers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _run(
        self,
        buffer: mmap.mmap,
        kinds: tuple[str, ...],
        numbers: Iterator[int],
        lock: threading.Lock,
        errors: list[OSError],
    ) -> None:
        calls = [os.preadv if kind == "read" else os.pwritev for kind in kinds]
        try:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                if calls[number % len(calls)](self._fd, [buffer], number * self._block) != self._block:
                    raise OSError(f"only a part of {self._block} bytes at {number * self._block} was moved")
                if not self._direct:
                    os.posix_fadvise(self._fd, number * self._block, self._block, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            errors.append(error)


def _large_pages(nbytes: int) -> mmap.mmap:
    """Allocates memory as a pool does: direct I/O needs half the CPU time on large pages."""
    buffer = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    buffer.write(os.urandom(nbytes))
    return buffer


class FileStoreWay(Way):
    """The engine's files: one region, blocks through a pool, as many in flight as it has buffers."""

    def __init__(self, store: FileStore, plan: DiskPlan, block: int, depth: int) -> None:
        self._store, self._region = store, store.allocate(plan.file_bytes)
        self.moves_bytes = plan.file_bytes
        self._pool = Pool(block, BUFFERS_A_THREAD * depth)
        for _ in range(self._pool.count):
            buffer = self._pool.take()
            buffer.tensor.random_()
            self._pool.give(buffer)

    def carry(self, kinds: tuple[str, ...]) -> None:
        """Waits only for a free buffer, and for all in the end."""
        launches: list[Callable[..., IoHandle]] = [getattr(self._region, kind) for kind in kinds]
        block = self._store.block_bytes
        for at in range(0, self._region.nbytes, block):
            buffer = self._pool.take()
            self._pool.give(buffer, after=launches[at // block % len(launches)](buffer.tensor, at))
        self._store.drain()


def measure(plan: DiskPlan, tell: Callable[[int], None]) -> list[DiskRow]:
    """Returns all rows. `tell` receives the number of finished rounds. Raises OSError (DiskError) where the disk
    refuses.
    """
    rows: list[DiskRow] = []
    done = 0
    for block, depth in itertools.product(plan.blocks, plan.depths):
        with ExitStack() as stack:
            ways, direct = _ways(plan, block, depth, stack)
            for way in ways.values():
                way.prepare()
                way.carry(KINDS["write"])  # blocks must have been written before they are read
            for repetition in range(-WARMUP, plan.repetitions):
                found = _round(plan, ways, direct, block, depth, repetition)
                rows += found if repetition >= 0 else []
                done += 1
                tell(done)
    return rows


def _ways(plan: DiskPlan, block: int, depth: int, stack: ExitStack) -> tuple[dict[str, Way], bool]:
    home = stack.enter_context(Scratch(plan.folder)).path
    stores = {
        name: stack.enter_context(FileStore(home, block, depth, plan.direct, checksums, name))
        for name, checksums in ((STORE, False), (CHECKED, True))
    }
    direct = all(store.direct for store in stores.values())
    ways: dict[str, Way] = {RAW: Raw(home / RAW, plan, block, depth, direct, stack)}
    ways |= {name: FileStoreWay(store, plan, block, depth) for name, store in stores.items()}
    buffers = max(NvmeOffload.buffers, BUFFERS_A_THREAD * depth)
    files = NvmeOffload(
        gradients=False, path=str(home), block_bytes=block, buffers=buffers, depth=depth, direct=plan.direct
    )
    return ways | {
        UPDATE: Updates(files, plan.file_bytes),
        IN_MEMORY: Updates(Offload(gradients=False), plan.file_bytes),
    }, direct


def _round(
    plan: DiskPlan, ways: dict[str, Way], direct: bool, block: int, depth: int, repetition: int
) -> list[DiskRow]:
    """Measures every kind by every way, starting with another way each time."""
    rows = []
    for kind, kinds in KINDS.items():
        names = [via for via in ways if kind == "mixed" or via not in UPDATES]
        turn = repetition % len(names)
        for via in names[turn:] + names[:turn]:
            way = ways[via]
            way.prepare()
            begun, cpu = time.perf_counter(), time.process_time()
            way.carry(kinds)
            seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu
            rows.append(
                DiskRow(
                    via, kind, block, depth, direct, plan.file_bytes, way.moves_bytes, repetition, seconds, cpu_seconds
                )
            )
    return rows
