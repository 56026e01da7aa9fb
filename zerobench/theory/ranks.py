"""The rank that holds most: shards are equal with their padding, but padding has no optimizer states.

Rank r of Z nodes of L owns slice (r mod L) · Z + r div L where collectives take hops through nodes, slice r mod k where
k ranks share a shard, else slice r (comm/hierarchical.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .choices import settle
from .groups import GroupShape
from .layout import FlatBuffer, by_kind, by_unit, lay_out, lay_out_buckets
from .shapes import ParameterShape, trainable
from .strategy import StrategyShape


def fullest_rank(strategy: StrategyShape, shapes: Sequence[ParameterShape], groups: GroupShape) -> int:
    """Returns the rank that owns most of the trained elements, by their bytes in an optimizer; the lowest of several.

    Without a partition all ranks are alike.
    """
    buffers = list(_trained(settle(strategy, shapes, groups.shard_ranks), shapes, groups.shard_ranks))
    owned = [_owned_bytes(buffers, rank_slice) for rank_slice in range(groups.shard_ranks)] if buffers else [0]
    most = max(owned)
    return min(rank for rank in range(groups.world_size) if owned[slice_of(rank, groups) % len(owned)] == most)


def slice_of(rank: int, groups: GroupShape) -> int:
    """Returns the number of the slice that a rank owns of every partitioned buffer."""
    if groups.shard_group:
        return rank % groups.shard_group
    node_size, nodes = groups.nodes
    return rank % node_size * nodes + rank // node_size


def _trained(strategy: StrategyShape, shapes: Sequence[ParameterShape], n: int) -> Iterator[FlatBuffer]:
    if strategy.has_buckets:
        for kind in by_kind(shapes, trainable(shapes)[::-1]):
            yield from lay_out_buckets(shapes, kind, n, strategy.bucket_limit)
    elif strategy.theory.parameters:
        small, units = by_unit(shapes, strategy.persistence_numel)
        for mine in (small, *units.values()):
            for kind in by_kind(shapes, mine):
                if shapes[kind[0]].trainable:
                    yield lay_out(shapes, kind, n)


def _owned_bytes(buffers: Sequence[FlatBuffer], rank_slice: int) -> int:
    return sum(numel * b.master_bytes for b in buffers for _, _, _, numel, _ in b.held(rank_slice))
