"""Elements moved in one step of `a` micro-batches, by the paper's convention: all-reduce 2, the others 1 of the whole.

ddp            2ψ                    all-reduce, after the last micro-batch
zero1, megatron  2 · padded          reduce-scatter after the last micro-batch, all-gather
zero2          (a + 1) · padded      a reduce-scatter each micro-batch, one all-gather
zero3          each micro-batch: of a unit that forward uses u times, u + 1 all-gathers of its padded size and one
               reduce-scatter of what is trainable in it; of the root, which stays between forward and backward,
               one all-gather
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .partition import by_kind, by_unit, lay_out, lay_out_buckets
from .shapes import ROOT, ParameterShape, Schedule


def predict_volume(strategy: dict[str, Any], schedule: Schedule, world_size: int) -> int:
    """Elements, padding included, on each rank; nothing moves in a world of one. `strategy`: a resolved section."""
    shapes = schedule.shapes
    trained = [i for i, s in enumerate(shapes) if s.trainable]
    if world_size == 1:
        return 0
    if strategy["name"] == "ddp":
        return 2 * sum(shapes[i].numel for i in trained)
    if strategy["name"] in ("zero1", "zero2", "megatron"):
        kinds = by_kind(shapes, trained[::-1])
        reductions = schedule.micro_batches if strategy["name"] == "zero2" else 1
        whole = sum(_padded(shapes, kind, world_size, strategy["bucket_bytes"]) for kind in kinds)
        return (reductions + 1) * whole
    volume = 0
    for name, mine in by_unit(shapes).items():
        gathers = 1 if name == ROOT else schedule.uses.count(name) + 1
        for kind in by_kind(shapes, mine):
            if name == ROOT or name in schedule.uses:
                volume += (gathers + shapes[kind[0]].trainable) * _padded(shapes, kind, world_size, None)
    return schedule.micro_batches * volume


def _padded(shapes: Sequence[ParameterShape], indices: list[int], world_size: int, bucket_bytes: int | None) -> int:
    if bucket_bytes is None:
        buffers = [lay_out(shapes, indices, world_size)]
    else:
        buffers = lay_out_buckets(shapes, indices, world_size, bucket_bytes)
    return sum(numel for buffer in buffers for _, numel in buffer.units)
