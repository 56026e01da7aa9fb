"""Partition of whole parameters, as torch's ZeroRedundancyOptimizer makes it: the largest parameter first, each to the
rank that has least so far, the lowest of several (`_partition_parameters`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..theory.shapes import OptimizerShape, ParameterShape, master_bytes


def fullest_rank(shapes: Sequence[ParameterShape], ranks: int, optimizer: OptimizerShape) -> int:
    """Returns the rank whose optimizer keeps most bytes for its trainable parameters; the lowest of several."""
    given, kept = [0] * ranks, [0] * ranks
    for shape in sorted(shapes, key=lambda one: -one.numel):
        rank = given.index(min(given))
        given[rank] += shape.numel
        kept[rank] += optimizer.bytes_of(master_bytes(shape), 1) * shape.trainable
    return kept.index(max(kept))
