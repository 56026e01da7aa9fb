"""The simulated caching allocator: sequences worked by hand after torch's rules, snapshots that torch printed, and what
holds for any sequence.
"""

import itertools
import random
import re
from pathlib import Path

import pytest
import torch

from zerobench.fake import caching_allocator
from zerobench.fake.caching_allocator import CAUSES, CachingAllocator, MemoryBlock

MIB = 2**20
SIZES = {
    "kMinBlockSize": caching_allocator.MIN_BLOCK,
    "kSmallSize": caching_allocator.SMALL_REQUEST,
    "kSmallBuffer": caching_allocator.SMALL_SEGMENT,
    "kMinLargeAlloc": caching_allocator.MIN_LARGE,
    "kRoundLarge": caching_allocator.ROUND_LARGE,
}


def blocks_of(segment: MemoryBlock) -> list[tuple[int, bool]]:
    """Sizes of a segment's blocks in order, each with True where it is given out."""
    while segment.before is not None:
        segment = segment.before
    found, block = [], segment
    while block is not None:
        found += [(block.size, not block.is_free)] if block.mapped else []
        block = block.after
    return found


def test_sizes_are_those_of_the_installed_torch() -> None:
    header = Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h"
    if not header.exists() or "kMinLargeAlloc" not in (text := header.read_text()):
        pytest.skip("this torch has the sizes in its library alone")
    there = {name: int(value) for name, value in re.findall(r"constexpr size_t (k\w+) = (\d+);", text)}
    assert {name: there[name] for name in SIZES} == SIZES
    large = re.search(r"large_segment_size_\{(\d+)\}", text)
    assert large is None or int(large[1]) == caching_allocator.LARGE_SEGMENT


def test_a_snapshot_that_torch_printed_has_these_blocks() -> None:
    """torch.cuda.memory_snapshot() after W (1000, 10), b (10,), X (1000,), and y = X @ W + b with cuBLAS's workspace:
    discuss.pytorch.org, topic 178671.
    """
    memory = CachingAllocator()
    memory.allocate(40_000)
    memory.allocate(40)
    memory.allocate(4_000)
    workspace = memory.allocate(8_519_680)
    product = memory.allocate(40)
    last = memory.allocate(40)
    memory.free(product)
    expected = [(40_448, True), (512, True), (4_096, True), (512, False), (512, True), (2_051_072, False)]
    assert blocks_of(last) == expected
    assert blocks_of(workspace) == [(8_519_680, True), (12_451_840, False)]
    assert (memory.allocated, memory.reserved) == (45_568 + 8_519_680, 2_097_152 + 20_971_520)


def test_segments_by_size_of_the_request() -> None:
    for request, segment in {
        1: 2 * MIB, MIB: 2 * MIB, MIB + 1: 20 * MIB, 10 * MIB - 512: 20 * MIB, 10 * MIB: 10 * MIB,
        10 * MIB + 1: 12 * MIB, 33 * MIB: 34 * MIB,
    }.items():  # fmt: skip
        memory = CachingAllocator()
        memory.allocate(request)
        assert memory.reserved == segment, request


def test_the_smallest_free_block_that_holds_it_is_taken_and_split() -> None:
    memory = CachingAllocator()
    large, other, third = memory.allocate(64 * MIB), memory.allocate(32 * MIB), memory.allocate(16 * MIB)
    for block in (large, other, third):
        memory.free(block)
    taken = memory.allocate(20 * MIB)
    assert taken is other
    assert blocks_of(taken) == [(20 * MIB, True), (12 * MIB, False)]
    assert memory.allocate(31 * MIB) is large  # 12 and 16 MiB are too small
    whole = memory.allocate(16 * MIB - 512)
    assert whole is third
    assert whole.size == 16 * MIB
    assert memory.reserved == 112 * MIB
    assert memory.allocated == (20 + 31 + 16) * MIB


def test_freed_neighbors_merge_and_streams_and_pools_stay_apart() -> None:
    memory = CachingAllocator()
    parts = [memory.allocate(4 * MIB) for _ in range(5)]
    assert memory.reserved == 20 * MIB
    for number in (0, 2, 1):
        memory.free(parts[number])
    assert blocks_of(parts[3]) == [(12 * MIB, False), (4 * MIB, True), (4 * MIB, True)]
    memory.allocate(4 * MIB, stream=1)
    assert memory.reserved == 40 * MIB  # what is free belongs to stream 0
    memory.allocate(MIB)
    assert memory.reserved == 42 * MIB  # and to the pool of large blocks
    memory.allocate(12 * MIB)
    assert memory.reserved == 42 * MIB


def test_an_expandable_segment_grows_in_pages_and_uses_free_memory_before_it() -> None:
    memory = CachingAllocator(expandable=True)
    first = memory.allocate(33 * MIB)
    assert memory.reserved == 40 * MIB
    second = memory.allocate(10 * MIB)
    assert memory.reserved == 60 * MIB  # 7 MiB were free: 3 more are a page
    memory.free(second)
    third = memory.allocate(67 * MIB)
    assert memory.reserved == 100 * MIB  # after the first, over the second's place: nothing between them is lost
    assert third.address == second.address
    memory.free(first)
    small = memory.allocate(512)
    assert memory.reserved == 102 * MIB
    assert small.size == 512


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_of_any_sequence_blocks_lie_apart_within_what_is_reserved(expandable: bool, seed: int) -> None:
    draw, memory = random.Random(seed), CachingAllocator(expandable)
    living: list[tuple[int, MemoryBlock]] = []
    for _ in range(600):
        if living and draw.random() < 0.5:
            memory.free(living.pop(draw.randrange(len(living)))[1])
        else:
            size = round(2 ** draw.uniform(0, 27))
            living.append((size, memory.allocate(size, draw.randrange(2))))
        if draw.random() < 0.01:
            memory.empty_cache()
        causes = memory.causes(0)
        assert list(causes) == list(CAUSES)
        assert min(causes.values()) >= 0
        assert sum(causes.values()) == memory.reserved
        assert causes["requested"] + causes["rounding"] == memory.allocated == sum(block.size for _, block in living)
        assert memory.allocated <= memory.reserved <= memory.peak_reserved
    ends = sorted((block.address, block.address + block.size) for _, block in living)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ends))
    for size, block in living:
        slack = 512 if expandable or size <= MIB else MIB + 512
        assert block.mapped
        assert not block.is_free
        assert size <= block.size < size + slack
        assert block.after is None or block.after.before is block
        assert block.size % 512 == 0
    for _, block in living:
        memory.free(block)
    for pool in memory._pools.values():
        assert not any(
            block.after is not None and block.after.is_free and block.after.mapped for *_, block in pool.free
        )
    memory.empty_cache()
    assert (memory.allocated, memory.reserved) == (0, 0)
