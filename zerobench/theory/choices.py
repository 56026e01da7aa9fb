"""The engine's rules for `auto` in a strategy's section (zero/options.py, zero/units/root.py), written apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .shapes import ROOT, ParameterShape, bytes_of
from .strategy import AUTO, StrategyShape

BUCKETS_PER_SHARD = 2
LEAST_BYTES, MOST_BYTES = 2**20, 25 * 2**20


def frees_root(strategy: StrategyShape, shapes: Sequence[ParameterShape]) -> bool:
    """True where ZeRO-3 frees its root unit while backward runs in other units (zero/units/root.py)."""
    root = [shape for shape in shapes if shape.unit == ROOT]
    return strategy.keep_root == AUTO and len(root) < len(shapes) and not any(shape.pinned for shape in root)


def reads(shape: ParameterShape, left: int) -> bool:
    """True where backward reads a parameter as it makes its gradient. `left`: gradients to come, this one included."""
    return shape.reads[left - 1] if 0 < left <= len(shape.reads) else True


def settle(strategy: StrategyShape, shapes: Sequence[ParameterShape], shard_ranks: int) -> StrategyShape:
    """Replaces an automatic bucket_bytes by a number: half of psi/N in bytes, within limits. `shard_ranks`: N."""
    if strategy.bucket_bytes != AUTO:
        return strategy
    psi_bytes = sum(bytes_of(shape) for shape in shapes if shape.trainable)
    size = min(max(psi_bytes // shard_ranks // BUCKETS_PER_SHARD, LEAST_BYTES), MOST_BYTES)
    return replace(strategy, bucket_bytes=size)
