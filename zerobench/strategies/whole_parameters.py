"""Partition of whole parameters, as torch's ZeroRedundancyOptimizer makes it: the largest parameter first, each to the
rank that has least so far, the lowest of several (`_partition_parameters`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..theory.shapes import ParameterShape


def fullest_rank(shapes: Sequence[ParameterShape], ranks: int) -> int:
    """Returns the rank whose trainable parameters have most elements, and so the largest optimizer states; the lowest
    of several.
    """
    given, trained = [0] * ranks, [0] * ranks
    for shape in sorted(shapes, key=lambda one: -one.numel):
        rank = given.index(min(given))
        given[rank] += shape.numel
        trained[rank] += shape.numel * shape.trainable
    return trained.index(max(trained))
