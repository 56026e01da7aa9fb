"""DDP, event by event.

no_sync keeps the gradients of the micro-batches before the last beside DDP's buckets, another G: after zero_grad the
parameters have lost their views of the buckets. Below fp32 there are fp32 masters, and an
update needs a tile of fp32 gradients besides. To find unused parameters DDP keeps a 32-bit flag for each.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..control import flags_bytes
from ..groups import GroupShape
from ..layout import ALIGN_BYTES
from ..shapes import OptimizerShape, PrecisionShape, Schedule, bytes_of, is_half, master_bytes, trainable
from ..strategy import StrategyShape
from .live_bytes import Replay, hold_beside, hold_fresh, hold_waiting


def replay_ddp(
    replay: Replay, strategy: StrategyShape, schedule: Schedule, _: GroupShape, optimizer: OptimizerShape,
    precision: PrecisionShape,
) -> None:  # fmt: skip
    """Plays a step of DDP, with fp32 masters where parameters are half: the bytes of any rank."""
    shapes, used = schedule.shapes, sorted(set(schedule.arrivals))
    half, last_only = any(is_half(shapes[i]) for i in trainable(shapes)), strategy.accumulate == "last"
    most = (precision.tile_bytes or 0) // ALIGN_BYTES * ALIGN_BYTES if half else 0
    replay.hold("parameters", "all", sum(bytes_of(s) for s in shapes))
    replay.hold("master", "all", sum(master_bytes(shapes[i]) for i in trainable(shapes) if is_half(shapes[i])))
    kept = [(master_bytes(shapes[i]), -(-master_bytes(shapes[i]) // most) if most else 1) for i in used]
    replay.hold("optimizer", "all", sum(optimizer.bytes_of(size, tensors) for size, tensors in kept))
    replay.hold("communication", "flags", flags_bytes(schedule) if strategy.find_unused_parameters else 0)
    replay.hold("gradients", "buckets", sum(bytes_of(shapes[i]) for i in trainable(shapes)))
    for micro in range(min(schedule.micro_batches, 3)):  # the fourth is like the third
        last = micro == schedule.micro_batches - 1
        hold_waiting(replay, shapes)
        arrivals = list(dict.fromkeys(schedule.arrivals[::-1]))[::-1]  # autograd hands over the sum of all uses
        for place, i in enumerate(arrivals):
            hold_beside(replay, shapes, arrivals[place : place + 2])
            hold_fresh(replay, shapes[i])
            replay.drop("gradients", "fresh")
            if last or not last_only:  # what no_sync kept is copied into the bucket
                replay.drop("gradients", ("unsynced", i))
            else:
                replay.hold("gradients", ("unsynced", i), bytes_of(shapes[i]))
    if half:
        replay.hold("gradients", "tile", _largest_tile([master_bytes(shapes[i]) for i in trainable(shapes)], most))


def _largest_tile(sizes: Sequence[int], most: int) -> int:
    """Returns the bytes of the largest run of parameters, each cut at `most` bytes, that are updated together."""
    largest = tile = 0
    for piece in (min(most, size - start) for size in sizes for start in range(0, size, most)):
        tile = piece if tile + piece > most else tile + piece
        largest = max(largest, tile)
    return largest
