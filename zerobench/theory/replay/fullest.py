"""The rank that holds most: shards are equal with their padding, but padding has no optimizer states, and an optimizer
counts its steps once per segment, so that of two ranks with as many elements the one with more segments holds more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ..choices import settle
from ..groups import GroupShape
from ..layout import FlatBuffer, by_kind, by_unit, lay_out, lay_out_buckets
from ..ranks import slice_of
from ..shapes import OptimizerShape, ParameterShape, PrecisionShape, trainable
from ..strategy import StrategyShape
from ..tiers import NOWHERE, TierShape
from .shards import Shards


def fullest_rank(
    strategy: StrategyShape, shapes: Sequence[ParameterShape], groups: GroupShape, optimizer: OptimizerShape,
    precision: PrecisionShape, tiers: TierShape = NOWHERE,
) -> int:  # fmt: skip
    """Returns the rank whose optimizer keeps most bytes on the device, of several the one that keeps most in
    another tier, the lowest of these. Without a partition all ranks are alike.
    """
    n = groups.shard_ranks
    buffers = Counter(buffer.pattern for buffer in _trained(settle(strategy, shapes, n), shapes, n))
    shards = [(Shards([one], n, optimizer, precision, tiers), count) for one, count in buffers.items()]
    kept = [_kept_bytes(shards, rank_slice) for rank_slice in range(n)] if shards else [(0, 0)]
    most = max(kept)
    return min(rank for rank in range(groups.world_size) if kept[slice_of(rank, groups) % len(kept)] == most)


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


def _kept_bytes(shards: Sequence[tuple[Shards, int]], rank_slice: int) -> tuple[int, int]:
    """Returns the bytes of optimizer states on the device and in another tier. `shards`: of a pattern, and how many."""
    here, away = (sum(count * one.kept_bytes(rank_slice, away) for one, count in shards) for away in (False, True))
    return here, away
