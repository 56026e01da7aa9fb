"""Strategies that keep parameters whole, event by event: DDP; ZeRO-1, ZeRO-2 and Megatron's distributed optimizer.

DDP: no_sync keeps the gradients of the micro-batches before the last in addition to DDP's buckets, another G, since
zero_grad drops the parameters' views of the buckets. Below fp32 there are fp32 masters, and an update also needs a
tile of fp32 gradients. To find unused parameters DDP keeps a 32-bit flag for each parameter.

Buckets: parameters are in buckets that are whole on every rank. Whole gradients live as long as the engine under
Megatron, from a bucket's first gradient to the update under ZeRO-1, and while a bucket fills and is reduced under
ZeRO-2. Buckets are sent in a fixed order, one at a time, as they fill.
"""

from __future__ import annotations

from ..groups import GroupShape
from ..layout import bucket_buffers
from ..shapes import OptimizerShape, PrecisionShape, Schedule, TierShape, trainable
from ..strategy import StrategyShape
from .live_bytes import (
    FLAGS,
    HANDED_OVER,
    TIED,
    TILE,
    UNSYNCHRONIZED,
    Reductions,
    Replay,
    UnitGradients,
    hand_over,
    hold_made_together,
)
from .shards import Shards
from .traffic import flags_bytes


def replay_ddp(
    replay: Replay, strategy: StrategyShape, schedule: Schedule, optimizer: OptimizerShape, precision: PrecisionShape
) -> None:
    """Plays a step of DDP, with fp32 masters for half-precision parameters; every rank has these bytes."""
    shapes, trained = schedule.shapes, [schedule.shapes[i] for i in trainable(schedule.shapes)]
    align = 4 * optimizer.align
    casts = any(shape.is_half for shape in trained) and precision.tile_bytes
    most = max(align, precision.tile_bytes // align * align) if casts and precision.tile_bytes else 0  # bytes of a tile
    kept = 0
    for shape in (shapes[i] for i in sorted(set(schedule.arrivals))):  # states are cut where tiles end
        step = most // 4 if most and shape.numel and shape.matrix is None else max(1, shape.numel)
        for start in range(0, max(1, shape.numel), step):
            numel = min(step, shape.numel - start)
            kept += optimizer.of(shape.matrix is not None).bytes_of(numel, shape.updated_bytes)
    replay.hold("parameters", "all", sum(shape.nbytes for shape in shapes))
    replay.hold("master", "all", sum(shape.master_bytes for shape in trained if shape.is_half))
    replay.hold("optimizer", "all", kept)
    replay.hold("communication", FLAGS, flags_bytes(schedule) if strategy.find_unused_parameters else 0)
    replay.hold("gradients", "buckets", sum(shape.nbytes for shape in trained))
    arrivals = list(dict.fromkeys(schedule.arrivals[::-1]))[::-1]  # autograd hands over the sum of all uses
    for last in schedule.played:
        for shape in (shape for shape in shapes if shape.trainable and shape.uses > 1):
            # all uses except the first in forward wait through most of backward
            replay.hold("gradients", (TIED, shape), (shape.uses - 1) * shape.nbytes)
        for index, i in enumerate(arrivals):
            shape = shapes[i]
            hold_made_together(replay, schedule, arrivals[index:])
            if shape.uses > 1:  # briefly with those of all uses
                replay.drop("gradients", (TIED, shape))
                replay.hold("gradients", HANDED_OVER, (shape.uses + 1) * shape.nbytes)
            replay.hold("gradients", HANDED_OVER, shape.nbytes)
            replay.drop("gradients", HANDED_OVER)
            if strategy.synchronizes(last):  # what no_sync kept is copied into the bucket
                replay.drop("gradients", (UNSYNCHRONIZED, i))
            else:
                replay.hold("gradients", (UNSYNCHRONIZED, i), shape.nbytes)
    if (
        most
    ):  # the largest run of parameters updated together, each cut at a tile, except matrices that are needed whole
        largest = tile = 0
        for shape in trained:
            step = shape.master_bytes if shape.matrix else most
            for start in range(0, shape.master_bytes, step):
                piece = min(step, shape.master_bytes - start)
                tile = piece if tile + piece > most else tile + piece
                largest = max(largest, tile)
        replay.hold("gradients", TILE, largest)


# -- buckets ---------------------------------------------------------------------------------------


def replay_buckets(
    replay: Replay, strategy: StrategyShape, schedule: Schedule, groups: GroupShape, optimizer: OptimizerShape,
    precision: PrecisionShape, tiers: TierShape,
) -> None:  # fmt: skip
    """Plays a step with buckets on the rank that uses most memory."""
    shapes, n = schedule.shapes, groups.shard_ranks
    buffers = bucket_buffers(shapes, n, strategy.bucket_limit)
    units: list[UnitGradients] = []
    expected: list[list[int]] = []  # of each unit: its gradients, one of several uses more than once
    units_of: dict[int, list[int]] = {}  # of each parameter: indices of the units that it is in
    whole = 0
    for buffer in buffers:
        shape = shapes[buffer.spans[0].parameter]
        whole += buffer.padded_numel * shape.gradient_bytes(precision)
        for start, numel in buffer.units:
            inside = [s.parameter for s in buffer.spans if min(start + numel, s.stop) > max(start, s.start)]
            for parameter in inside:
                units_of.setdefault(parameter, []).append(len(units))
            # one per use of a tied parameter, and one if no step uses the parameter
            expected.append([i for i in inside for _ in range(schedule.arrivals.count(i) or 1)])
            own = buffer.shard_numel(replay.owner) if buffer.sizes else numel // buffer.world_size
            units.append(UnitGradients.of(len(units), numel, shape, precision, own))
    replay.hold("parameters", "flat", sum(buffer.padded_bytes for buffer in buffers))
    replay.hold("parameters", "frozen", sum(shape.nbytes for shape in shapes if not shape.trainable))
    replay.hold("gradients", "kept", whole if strategy.theory.persistent_gradients else 0)
    shards = Shards(buffers, n, optimizer, precision, tiers, replay.owner)
    shards.hold(replay, schedule)
    reductions = Reductions(replay, groups, strategy, tiers)
    for last in schedule.played:
        reductions.synchronizing = strategy.synchronizes(last)
        _backward(replay, schedule, reductions, units, [list(parameters) for parameters in expected], units_of)
    shards.update(replay, schedule)


def _backward(
    replay: Replay, schedule: Schedule, reductions: Reductions, units: list[UnitGradients], missing: list[list[int]],
    units_of: dict[int, list[int]],
) -> None:  # fmt: skip
    """Adds each gradient to its units, which are sent when full. `missing`: of each unit, the gradients to come."""
    sent = 0

    def send_full() -> None:
        nonlocal sent
        while reductions.synchronizing and sent < len(units) and not missing[sent]:
            reductions.send(units[sent])
            sent += 1

    for parameter in hand_over(replay, schedule):
        is_tied = schedule.shapes[parameter].uses > 1
        for index in units_of[parameter]:
            reductions.write(units[index])
            missing[index].remove(parameter)
            if not is_tied:
                send_full()
        if is_tied:  # its units are sent when autograd comes to the parameter, and its uses' gradients are gone
            replay.drop("gradients", HANDED_OVER)
            send_full()
    if reductions.synchronizing:
        for unit in units[sent:]:
            reductions.send(unit)
        reductions.finish()
