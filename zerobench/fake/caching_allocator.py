"""Simulates torch's CUDA caching allocator: the bytes that it hands out and reserves for a sequence of allocations.

    block       memory that is handed out, or free; a multiple of 512 bytes
    segment     memory that the allocator has reserved on the device; a row of blocks
    pool        segments of one stream, either for small blocks, up to 1 MiB, or for larger ones; blocks never change
    pools

Rules from c10/cuda/CUDACachingAllocator.cpp (torch 2.7; a test compares the sizes with the installed torch's headers):

1. A request is rounded up to 512 bytes, and takes the smallest free block of its pool that fits it; among equal ones
   the one with the lowest address.
2. If there is none, a segment is reserved: 2 MiB for a small request, 20 MiB for one below 10 MiB, else the request
   rounded up to 2 MiB.
3. A block is split if the remainder is at least 512 bytes in a small pool, or more than 1 MiB in a large one.
4. A freed block merges with its free neighbors in the segment. Segments stay reserved until the cache is emptied, which
   returns segments that are entirely free.

With expandable segments (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True) a pool is one segment that grows at its end,
or where its memory was returned, in pages of 2 MiB (small) or 20 MiB (large), and every block is split.

With max_split_size_mb a block of at least that size is never split, and a smaller request never takes it.

Memory never runs out: nothing is retried, and nothing is released for lack of space.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf

MIN_BLOCK = 512
SMALL_REQUEST = 2**20
SMALL_SEGMENT = 2 * 2**20
LARGE_SEGMENT = 20 * 2**20
MIN_LARGE = 10 * 2**20
ROUND_LARGE = 2 * 2**20

MOST_OVERSIZE = 20 * 2**20
"""Bytes by which a free block of at least max_split_size_mb may exceed a request (max_non_split_rounding_mb)."""

ADDRESS_SPACE = LARGE_SEGMENT * 2**26
"""Address range of an expandable segment in bytes: whole pages, and more than the memory of any device."""


CAUSES = {
    "requested": "of storages and workspaces that are alive",
    "rounding": "live blocks are multiples of 512 bytes; up to 1 MiB of a large one is not split off",
    "waiting": "freed, but another stream may still use it (record_stream)",
    "other streams": "free in segments of a stream that is not the main one, or of a pool of CUDA graphs",
    "small blocks": "free in the segments of 2 MiB, which only requests of up to 1 MiB take",
    "pieces": "free between the live blocks of a segment",
    "free segments": "free as a whole segment, which empty_cache() returns to the device",
}
"""Cause -> the reserved bytes that it counts. All causes add up to these; the first two are the allocated bytes."""


def by_cause(
    requested: int, allocated: int, free: Iterable[tuple[bool, bool, bool, int]], waiting: int = 0
) -> dict[str, int]:  # fmt: skip
    """Returns the reserved bytes by cause. `free`: for each free block its size, after three flags: it is
    the main stream's, it is in a pool of small blocks, and it is a whole segment.
    """
    causes = dict.fromkeys(CAUSES, 0) | {"requested": requested, "rounding": allocated - requested, "waiting": waiting}
    for is_main, is_small, is_whole, size in free:
        cause = "small blocks" if is_small else "free segments" if is_whole else "pieces"
        causes[cause if is_main else "other streams"] += size
    return causes


def round_up(size: int, unit: int) -> int:
    """Rounds `size` up to a multiple of `unit`."""
    return -(-size // unit) * unit


@dataclass(eq=False, slots=True)
class MemoryBlock:
    """`size` bytes at `address`, between two neighbors in its segment. `mapped`: it is backed by memory. `requested`:
    bytes that the last request for it asked for.
    """

    pool: BlockPool
    address: int
    size: int
    before: MemoryBlock | None = None
    after: MemoryBlock | None = None
    is_free: bool = True
    mapped: bool = True
    requested: int = 0


@dataclass
class BlockPool:
    """Free blocks of one stream, small or large. `free`: by size and address; `unmapped`: by address. `most_split`:
    blocks of at least this size are not split.
    """

    is_small: bool
    most_split: float
    free: list[tuple[int, int, MemoryBlock]] = field(default_factory=list)
    unmapped: list[tuple[int, MemoryBlock]] = field(default_factory=list)

    @property
    def page(self) -> int:
        """Bytes by which an expandable segment grows."""
        return SMALL_SEGMENT if self.is_small else LARGE_SEGMENT

    def put(self, block: MemoryBlock) -> None:
        """Adds a free block."""
        if block.mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: MemoryBlock) -> None:
        """Removes a free block."""
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def best(self, size: int) -> MemoryBlock | None:
        """Returns the smallest free block of at least `size` bytes; a block that can grow counts with the size it can
        grow to (rule 1, and the rule of get_free_block for expandable segments).
        """
        start = bisect_left(self.free, (size,))
        if start == len(self.free):
            return None
        while start + 1 < len(self.free) and _grows_to(self.free[start + 1][2]) < _grows_to(self.free[start][2]):
            start += 1
        block = self.free[start][2]
        most = self.most_split if size < self.most_split else size + MOST_OVERSIZE
        return block if block.size < most else None


def _grows_to(block: MemoryBlock) -> int:
    return block.size + (block.after.size if block.after is not None and not block.after.mapped else 0)


class CachingAllocator:
    """A device's allocator. `allocated`, `reserved`: current bytes; `peak_allocated`, `peak_reserved`: their maxima;
    `requested`: the allocated bytes before rounding. `most_split`: max_split_size_mb in bytes; inf: blocks of any size
    are split.
    """

    def __init__(self, expandable: bool = False, most_split: float = inf) -> None:
        self._expandable, self._most_split = expandable, most_split
        self._pools: dict[tuple[bool, int], BlockPool] = {}
        self._next_address = 0
        self.requested = self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0

    def allocate(self, requested: int, stream: int = 0) -> MemoryBlock:
        """Returns a block of at least `requested` > 0 bytes for a stream."""
        size = round_up(requested, MIN_BLOCK)
        pool = self._pool(size <= SMALL_REQUEST, stream)
        block = pool.best(size)
        if block is not None:
            pool.remove(block)
        else:
            block = self._expanded(pool, size) if self._expandable else self._segment(pool, size)
        remaining = block.size - size
        is_split = remaining >= MIN_BLOCK if pool.is_small or self._expandable else remaining > SMALL_REQUEST
        if is_split and (pool.is_small or size < self._most_split):
            pool.put(_split(block, size))
        block.is_free, block.requested = False, requested
        self.requested += requested
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: MemoryBlock) -> None:
        """Frees a block."""
        self.allocated -= block.size
        self.requested -= block.requested
        block.is_free = True
        _merge_neighbors(block)
        block.pool.put(block)

    def empty_cache(self) -> None:
        """Returns free memory to the device: whole segments, or pages of expandable ones (rule 4)."""
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if self._expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def causes(self, main: int) -> dict[str, int]:
        """Returns the reserved bytes by cause (CAUSES). `main`: the main stream."""
        free = (
            (stream == main, is_small, block.before is None and block.after is None, size)
            for (is_small, stream), pool in self._pools.items()
            for size, _, block in pool.free
        )
        return by_cause(self.requested, self.allocated, free)

    def reset_peaks(self) -> None:
        """Restarts the peaks from the current values."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def _pool(self, is_small: bool, stream: int) -> BlockPool:
        key = (is_small, stream)
        if key not in self._pools:
            self._pools[key] = pool = BlockPool(is_small, self._most_split)
            if self._expandable:
                pool.put(MemoryBlock(pool, self._addresses(ADDRESS_SPACE), ADDRESS_SPACE, mapped=False))
        return self._pools[key]

    def _addresses(self, size: int) -> int:
        first, self._next_address = self._next_address, self._next_address + size
        return first

    def _segment(self, pool: BlockPool, size: int) -> MemoryBlock:
        """Reserves a segment (rule 2)."""
        size = pool.page if pool.is_small or size < MIN_LARGE else round_up(size, ROUND_LARGE)
        self._reserve(size)
        return MemoryBlock(pool, self._addresses(size), size)

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _expanded(self, pool: BlockPool, size: int) -> MemoryBlock:
        """Maps memory at the first address of an expandable segment that has room for `size` bytes."""
        block = next(start for start in _starts(pool) if _fits(start, size))
        if not block.mapped:
            self._map(block, min(block.size, size))
        while block.size < size:
            assert block.after is not None
            following = block.after
            self._map(following, min(size - block.size, following.size))
            block = following  # it has merged with what was before it
        pool.remove(block)
        return block

    def _map(self, block: MemoryBlock, size: int) -> None:
        """Maps the first `size` bytes of an unmapped block, in whole pages; it becomes free, with its neighbors."""
        pool = block.pool
        pool.remove(block)
        mapped = round_up(size, pool.page)
        if block.size > mapped:
            rest = _split(block, mapped)
            rest.mapped = False
            pool.put(rest)
        block.mapped = True
        self._reserve(mapped)
        _merge_neighbors(block)
        pool.put(block)

    def _unmap(self, block: MemoryBlock) -> None:
        """Returns the whole pages of a free block to the device."""
        pool = block.pool
        start = round_up(block.address, pool.page)
        stop = (block.address + block.size) // pool.page * pool.page
        if stop <= start:
            return
        pool.remove(block)
        end = block.address + block.size
        if start > block.address:
            middle = _split(block, start - block.address)
            pool.put(block)
            block = middle
        if end > stop:
            pool.put(_split(block, stop - start))
        self.reserved -= block.size
        block.mapped = False
        _merge_neighbors(block)
        pool.put(block)


def _starts(pool: BlockPool) -> Iterator[MemoryBlock]:
    """Yields the blocks where an expandable segment could grow, lowest address first, including a free block before."""
    for _, block in list(pool.unmapped):
        before = block.before
        yield before if before is not None and before.is_free else block


def _fits(block: MemoryBlock | None, size: int) -> bool:
    """Whether consecutive free or unmapped blocks, starting at `block`, have `size` bytes."""
    room = 0
    while block is not None and block.is_free and room < size:
        room += block.size
        block = block.after
    return room >= size


def _split(block: MemoryBlock, size: int) -> MemoryBlock:
    """Shortens a block to `size` bytes and returns the remainder, which is free."""
    rest = MemoryBlock(block.pool, block.address + size, block.size - size, before=block, after=block.after)
    if block.after is not None:
        block.after.before = rest
    block.size, block.after = size, rest
    return rest


def _merge_neighbors(block: MemoryBlock) -> None:
    """Merges a block that is in no pool with those free neighbors that are in the same state, mapped or unmapped."""
    before, after = block.before, block.after
    if before is not None and before.is_free and before.mapped == block.mapped:
        block.pool.remove(before)
        block.address, block.size, block.before = before.address, block.size + before.size, before.before
        if block.before is not None:
            block.before.after = block
    if after is not None and after.is_free and after.mapped == block.mapped:
        block.pool.remove(after)
        block.size, block.after = block.size + after.size, after.after
        if block.after is not None:
            block.after.before = block
