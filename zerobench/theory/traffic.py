"""Elements moved in one step of `a` micro-batches, by the paper's convention: all-reduce 2, the others 1 of the whole.
Of these r are reduced: all (`accumulate` "every", for zero2 and zero3) or the last (for ddp, zero1, megatron).

ddp            2rψ                   all-reduce
zero1, zero2   (r + 1) · padded      reduce-scatters, one all-gather; megatron likewise
zero3          each micro-batch: of a unit that forward uses u times, u + 1 all-gathers of its padded size; of the root,
               which stays between forward and backward, one all-gather. And r reduce-scatters of what is trainable
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
    reductions = schedule.micro_batches if strategy["accumulate"] == "every" else 1
    if strategy["name"] == "ddp":
        return 2 * reductions * sum(shapes[i].numel for i in trained)
    if strategy["name"] in ("zero1", "zero2", "megatron"):
        kinds = by_kind(shapes, trained[::-1])
        whole = sum(_padded(shapes, kind, world_size, strategy["bucket_bytes"]) for kind in kinds)
        return (reductions + 1) * whole
    volume = 0
    for name, mine in by_unit(shapes).items():
        gathers = 1 if name == ROOT else schedule.uses.count(name) + 1
        for kind in by_kind(shapes, mine):
            if name == ROOT or name in schedule.uses:
                moves = schedule.micro_batches * gathers + reductions * shapes[kind[0]].trainable
                volume += moves * _padded(shapes, kind, world_size, None)
    return volume


def _padded(shapes: Sequence[ParameterShape], indices: list[int], world_size: int, bucket_bytes: int | None) -> int:
    if bucket_bytes is None:
        buffers = [lay_out(shapes, indices, world_size)]
    else:
        buffers = lay_out_buckets(shapes, indices, world_size, bucket_bytes)
    return sum(numel for buffer in buffers for _, numel in buffer.units)
