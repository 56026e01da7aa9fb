"""Offsets, padding, shards and segments; and theory's own arithmetic beside the engine's."""

from __future__ import annotations

import pytest

from zerobench.theory import partition
from zerobench.theory.partition import lay_out
from zerobench.theory.shapes import ParameterShape
from zerobench.zero import exchange
from zerobench.zero.layout import buckets, one_unit

NUMELS = [(0, 1), (1, 703), (2, 0), (3, 16), (4, 5000), (5, 17), (6, 64)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("bucket_numel", [16, 256, 1000, 10**6])
def test_segments_cover_every_element_once_and_cuts_are_aligned(world_size: int, bucket_numel: int) -> None:
    layouts = buckets(NUMELS, bucket_numel, world_size, align=16)
    seen = {parameter: [0] * numel for parameter, numel in NUMELS}
    for layout in layouts:
        assert layout.padded_numel == layout.shard_numel * world_size
        assert layout.shard_numel % 16 == 0
        for rank in range(world_size):
            for segment in layout.segments(rank):
                assert segment.start % 16 == 0
                assert 0 <= segment.offset <= layout.shard_numel - segment.numel
                for element in range(segment.start, segment.stop):
                    seen[segment.parameter][element] += 1
    assert all(count == 1 for counts in seen.values() for count in counts)


def test_only_the_last_bucket_is_padded_at_its_end() -> None:
    layouts = buckets([(0, 1000), (1, 1000)], 600, 3, align=16)
    assert [layout.padded_numel for layout in layouts] == [624, 624, 624, 144]
    assert sum(layout.numel for layout in layouts) == 2000


def test_gaps_are_all_that_no_parameter_owns() -> None:
    layout = one_unit([(0, 10), (1, 20)], 2, align=16)
    assert layout.gaps == ((10, 6), (36, 28))
    assert layout.padded_numel == 64


def test_a_unit_without_elements_is_empty() -> None:
    assert buckets([(0, 0)], 100, 2) == []
    assert one_unit([(0, 0)], 2).padded_numel == 0


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("bucket_bytes", [1024, 4096, None])
def test_theory_lays_out_as_the_engine_does(world_size: int, bucket_bytes: int | None) -> None:
    shapes = [ParameterShape(numel, 4, True, "") for _, numel in NUMELS]
    theory = lay_out(shapes, range(len(shapes)), world_size, bucket_bytes)
    if bucket_bytes is None:
        engine = [one_unit(NUMELS, world_size, align=16)]
    else:
        engine = buckets(NUMELS, bucket_bytes // 4, world_size, align=16)
    assert [numel for _, numel in theory.units] == [layout.padded_numel for layout in engine]
    for rank in range(world_size):
        segments = [s for layout in engine for s in layout.segments(rank)]
        assert theory.owned(rank, set(range(7))) == (sum(s.numel for s in segments), len(segments))


def test_theory_and_the_exchange_mean_the_same_slots() -> None:
    assert (partition.PIECE_BYTES, partition.SLOTS) == (exchange.REDUCE_PIECE_BYTES, exchange.SLOTS)
    sizes = [partition.slots_bytes(size, n) for size, n in ((2048, 2), (3072, 4), (50 * 2**20, 2), (50 * 2**20, 64))]
    assert sizes == [1024, 3 * 768, 2 * 2**20, 2 * 2**20]
