"""Elements moved in one step of m micro-batches, by the paper's convention: all-reduce 2, the others 1 of the whole.
Of these r are reduced: all (`accumulate` "every", for zero2 and zero3) or the last (for ddp, zero1, megatron).

ddp        2rψ                   all-reduce
buckets    (r + 1) · padded      zero1, zero2, megatron: reduce-scatters and one all-gather; all-reduces count twice
units      zero3: r reduce-scatters of the padded size of what is trained, and all-gathers, a micro-batch:
             of the root 1, or 2 if it is not kept from forward to backward
             of a unit that forward uses u times u, and 1 more if backward comes back; 1 if it stays between these
             of what stays for good none, but 1 a step of what is trained

bf16 halves bytes, and no volume.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .partition import by_kind, by_unit, lay_out, lay_out_buckets
from .shapes import ROOT, Schedule

REDUCTION = {"reduce_scatter": 1, "all_reduce": 2}


def predict_volume(strategy: dict[str, Any], schedule: Schedule, world_size: int) -> int:
    """Elements, padding included, on each rank; nothing moves in a world of one. `strategy`: a resolved section."""
    if world_size == 1:
        return 0
    reductions = schedule.micro_batches if strategy["accumulate"] == "every" else 1
    if strategy["name"] == "ddp":
        return 2 * reductions * sum(s.numel for s in schedule.shapes if s.trainable)
    if strategy["name"] == "zero3":
        return _volume_of_units(strategy, schedule, world_size, reductions)
    trained = [i for i, s in enumerate(schedule.shapes) if s.trainable]
    moves = reductions * REDUCTION[strategy.get("reduce_with", "reduce_scatter")] + 1
    kinds = by_kind(schedule.shapes, trained[::-1])
    runs = [lay_out_buckets(schedule.shapes, kind, world_size, strategy["bucket_bytes"]) for kind in kinds]
    return moves * sum(buffer.padded_numel for run in runs for buffer in run)


def _volume_of_units(strategy: dict[str, Any], schedule: Schedule, n: int, reductions: int) -> int:
    small, units = by_unit(schedule.shapes, strategy["persistence_numel"])
    volume = (reductions + 1) * _padded(schedule, small, n)[0]
    for name, mine in units.items():
        trained, frozen = _padded(schedule, mine, n)
        gathers = _gathers(strategy, schedule, name)
        volume += schedule.micro_batches * gathers * (trained + frozen) + bool(gathers) * reductions * trained
    return volume


def _gathers(strategy: dict[str, Any], schedule: Schedule, name: str) -> int:
    """All-gathers of a unit in one micro-batch."""
    if name == ROOT:
        return 1 if strategy["keep_root"] else 2
    returns = schedule.returns or (True,) * len(schedule.uses)
    uses = [back for use, back in zip(schedule.uses, returns, strict=True) if use == name]
    if not strategy["reshard_after_forward"]:
        return min(1, len(uses))
    return len(uses) + any(uses)


def _padded(schedule: Schedule, indices: Sequence[int], n: int) -> tuple[int, int]:
    """Elements of what is trained and of what is frozen."""
    sizes = {True: 0, False: 0}
    for kind in by_kind(schedule.shapes, indices):
        sizes[schedule.shapes[kind[0]].trainable] += lay_out(schedule.shapes, kind, n).padded_numel
    return sizes[True], sizes[False]
