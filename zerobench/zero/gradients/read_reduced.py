"""The reduced gradients of an engine between `backward` and `step`, where they lie, to be looked at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..optim.segments import OptimizerSegment
    from ..strategy import Strategy


def reduced_gradients(engine: Strategy) -> Iterator[torch.Tensor]:
    """(numel,) each, in their own dtype and tier, still multiplied by the loss scale: this rank's part of the means
    over the ranks. A tensor is to be read before the next is asked for. No collective, and nothing is changed.

    Of the ranks that share a shard each yields another part; replicas yield the same (`replicas`).
    """
    for bucket in engine.gradients.buckets:
        bucket.settle()
    for tile in filter(None, engine.update.tiles):
        there = [segment for segment in tile if _has_come(engine, segment)]
        before = [segment.used for segment in there]
        for segment in there:  # ranks agree on what was used in `step`; of a unit that was reduced all of it is there
            segment.used = True
        try:
            with tile[0].shard_range.reading():
                for segment in there:
                    gradient = segment.gradient()
                    assert gradient is not None
                    yield gradient
        finally:
            for segment, used in zip(there, before, strict=True):
                segment.used = used


def replicas(engine: Strategy) -> int:
    """How many ranks hold the same part."""
    return engine.comm.ranks // engine.comm.size


def _has_come(engine: Strategy, segment: OptimizerSegment) -> bool:
    """Reduced; or, on one rank alone, where nothing is sent, written."""
    if segment.bucket.is_alone:
        return segment.segment.parameter in engine.update.used
    return segment.bucket.is_reduced
