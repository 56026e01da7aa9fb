"""The rates of a disk, as measured by `zerobench calibrate --disk`, and the fraction that the engine's files reach.

    of_raw   = bytes per second (via) / bytes per second (raw)   at the same blocks and depth, measured back to back
    of_bound = of updates, relative to the slower of the disk and the update in memory: an upper bound

A folder of a calibration holds `transfers.parquet` (one DiskRow each), `rates.parquet` (one DiskRate each) and
`provenance.json`. The same bytes are moved in several ways, interleaved, so that a drift of the disk affects all:

raw        threads that call preadv and pwritev, each on its buffer, and nothing else: the disk's own rate
store      the engine's FileStore and Pool, without checksums
checked    the engine's FileStore and Pool, with checksums
update     the engine's update, masters and states in files, with checksums: chunk k + 1 is read, chunk k updated,
           chunk k - 1 written (offload/nvme.py)
in memory  the same update with masters and states in host memory: its computation, without a disk

Updates are AdamW's in fp32 on one rank: a parameter's master and two states are read and written, half of the bytes
each, as `mixed`.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import pandas as pd
import torch
from torch import nn

from ..zero import initialize
from ..zero.offload.disk import FileStore, IoHandle, Pool, Scratch
from ..zero.offload.policy import NvmeOffload, Offload
from .collectives import read_tables, write_tables

RAW, STORE, CHECKED = "raw", "store", "checked"
"""Plain preadv and pwritev in threads; the engine's files without checksums; with them."""

UPDATE, IN_MEMORY = "update", "in memory"
"""The engine's update over files with checksums; the same update in memory."""

GIB = 2**30
RESAMPLES = 1000


@dataclass(frozen=True)
class DiskRow:
    """One repetition: `file_bytes` in blocks of `block_bytes`, `depth` at once."""

    via: str
    kind: str
    """"read", "write", or "mixed": every other block is read, the others are written."""
    block_bytes: int
    depth: int
    direct: bool
    """True if the page cache is bypassed."""
    file_bytes: int
    moved_bytes: int
    """Bytes read and written."""
    repetition: int
    seconds: float
    cpu_seconds: float
    """CPU time of all threads of the process, including the kernel's."""


@dataclass(frozen=True)
class DiskRate:
    """Medians over the repetitions, with 95 % intervals."""

    via: str
    kind: str
    block_bytes: int
    depth: int
    direct: bool
    bytes_per_s: float
    bytes_per_s_low: float
    bytes_per_s_high: float
    of_raw: float
    of_raw_low: float
    of_raw_high: float
    of_bound: float
    of_bound_low: float
    of_bound_high: float
    cpu_s_per_gib: float


@dataclass(frozen=True)
class DiskCalibration:
    """A disk's calibration: transfers, rates and provenance."""

    transfers: pd.DataFrame
    rates: list[DiskRate]
    provenance: dict[str, Any]

    def rate(self, kind: str, block_bytes: int, depth: int, via: str = CHECKED) -> DiskRate:
        """Returns the measured rate. Raises KeyError with the available ones."""
        for row in self.rates:
            if (row.via, row.kind, row.block_bytes, row.depth) == (via, kind, block_bytes, depth):
                return row
        there = ", ".join(f"{row.via} {row.kind} {row.block_bytes} × {row.depth}" for row in self.rates)
        raise KeyError(f"{via} {kind} {block_bytes} × {depth} is not calibrated; there is {there}")


def rates_of(transfers: pd.DataFrame) -> list[DiskRate]:
    """Computes a rate for each way, kind, block size and depth."""
    keys = ["kind", "block_bytes", "depth", "direct", "file_bytes"]
    found = []
    for key, same in transfers.groupby(keys, sort=False):
        speeds = same.assign(speed=same["moved_bytes"] / same["seconds"])
        speed = speeds.pivot(index="repetition", columns="via", values="speed")
        slower = speed[[via for via in (RAW, IN_MEMORY) if via in speed]].min(axis="columns")
        cost = (same["cpu_seconds"] / same["moved_bytes"]).groupby(same["via"]).median()
        kind, block, depth, direct, _ = cast(tuple[str, int, int, bool, int], key)
        for via in (str(one) for one in same["via"].unique()):
            bound = slower if via in (UPDATE, IN_MEMORY) else speed[RAW]
            rate, of_raw, of_bound = (_median((speed[via] / of).to_numpy()) for of in (1.0, speed[RAW], bound))
            found.append(DiskRate(via, kind, block, depth, direct, *rate, *of_raw, *of_bound, float(cost[via] * GIB)))
    return found


def _median(values: np.ndarray) -> tuple[float, float, float]:
    """Returns the median with its bootstrap interval."""
    drawn = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(np.median(values[drawn], axis=1), [0.025, 0.975])
    return float(np.median(values)), float(low), float(high)


def write_disk_calibration(folder: Path, transfers: Sequence[DiskRow], provenance: dict[str, Any]) -> DiskCalibration:
    """Computes the rates and writes all to `folder`; replaces an earlier calibration there."""
    frame = pd.DataFrame([asdict(row) for row in transfers])
    rates = rates_of(frame)
    write_tables(folder, frame, "rates", rates, provenance)
    return DiskCalibration(frame, rates, provenance)


def load_disk_calibration(folder: Path | str) -> DiskCalibration:
    """Reads the result of `zerobench calibrate --disk`. Raises FileNotFoundError if there is none."""
    none = "no calibration of a disk; zerobench calibrate --disk"
    return DiskCalibration(*read_tables(Path(folder), "rates", DiskRate, none))


# -- the measurement -------------------------------------------------------------------------------


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
        with ThreadPoolExecutor(len(self._buffers)) as threads:
            ends = [threads.submit(self._run, buffer, kinds, numbers, lock) for buffer in self._buffers]
        for end in ends:
            end.result()

    def _run(self, buffer: mmap.mmap, kinds: tuple[str, ...], numbers: Iterator[int], lock: threading.Lock) -> None:
        calls = [os.preadv if kind == "read" else os.pwritev for kind in kinds]
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            if calls[number % len(calls)](self._fd, [buffer], number * self._block) != self._block:
                raise OSError(f"only a part of {self._block} bytes at {number * self._block} was moved")
            if not self._direct:
                os.posix_fadvise(self._fd, number * self._block, self._block, os.POSIX_FADV_DONTNEED)


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
    """Returns all rows. `tell` receives the number of finished rounds. Raises OSError (DiskError) if the disk
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


# -- updates ---------------------------------------------------------------------------------------


BYTES_A_PARAMETER = 24


class Weight(nn.Module):
    """A module with one parameter, (numel,), whose gradient is 1."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numel))

    def forward(self) -> torch.Tensor:
        """Returns a scalar."""
        return self.weight.sum()


class Updates:
    """Updates that move `moves_bytes` each, with the optimizer's states in the tier of `offload`."""

    def __init__(self, offload: Offload, file_bytes: int) -> None:
        numel = file_bytes // BYTES_A_PARAMETER
        self.moves_bytes = numel * BYTES_A_PARAMETER
        model = Weight(numel)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        self._engine = initialize(model, optimizer, "zero1", offload=offload)

    def prepare(self) -> None:
        """Makes gradients."""
        self._engine.backward(self._engine())

    def carry(self, kinds: tuple[str, ...]) -> None:
        """Runs a step; returns when all of it is in the files."""
        self._engine.step()
