"""Strategies that keep parameters whole, event by event: DDP; ZeRO-1, ZeRO-2 and Megatron's distributed optimizer.

DDP: no_sync keeps the gradients of the micro-batches before the last in addition to DDP's buckets, another G, since
zero_grad drops the parameters' views of the buckets. Below fp32 there are fp32 masters, and an update also needs a
tile of fp32 gradients. To find unused parameters DDP keeps a 32-bit flag for each parameter.

Buckets: parameters are in buckets that are whole on every rank. Whole gradients live as long as the engine under
Megatron, from a bucket's first gradient to the update under ZeRO-1, and while a bucket fills and is reduced under
ZeRO-2. Buckets are sent in a fixed order, one at a time, as they fill.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..groups import GroupShape
from ..layout import FlatBuffer, buckets_of
from ..shapes import (
    OptimizerShape,
    ParameterShape,
    PrecisionShape,
    Schedule,
    bytes_of,
    is_half,
    master_bytes,
    micro_batches,
    optimizer_of,
    trainable,
    updated_bytes,
)
from ..strategy import StrategyShape
from ..tiers import NOWHERE, TierShape
from .live_bytes import Replay, hand_over, hold_beside, hold_fresh, hold_waiting
from .reductions import Reductions, UnitGradients, whole_bytes
from .shards import Shards
from .traffic import flags_bytes


def replay_ddp(
    replay: Replay, strategy: StrategyShape, schedule: Schedule, _: GroupShape, optimizer: OptimizerShape,
    precision: PrecisionShape,
) -> None:  # fmt: skip
    """Plays a step of DDP, with fp32 masters for half-precision parameters; every rank has these bytes."""
    shapes, used = schedule.shapes, sorted(set(schedule.arrivals))
    half, last_only = any(is_half(shapes[i]) for i in trainable(shapes)), strategy.accumulate == "last"
    align = 4 * optimizer.align
    most = max(align, precision.tile_bytes // align * align) if half and precision.tile_bytes else 0
    replay.hold("parameters", "all", sum(bytes_of(s) for s in shapes))
    replay.hold("master", "all", sum(master_bytes(shapes[i]) for i in trainable(shapes) if is_half(shapes[i])))
    kept = sum(_kept_bytes(shapes[i], 0 if shapes[i].matrix else most // 4, optimizer) for i in used)
    replay.hold("optimizer", "all", kept)
    replay.hold("communication", "flags", flags_bytes(schedule) if strategy.find_unused_parameters else 0)
    replay.hold("gradients", "buckets", sum(bytes_of(shapes[i]) for i in trainable(shapes)))
    for last in micro_batches(schedule):
        hold_waiting(replay, shapes)
        arrivals = list(dict.fromkeys(schedule.arrivals[::-1]))[::-1]  # autograd hands over the sum of all uses
        for index, i in enumerate(arrivals):
            hold_beside(replay, schedule, arrivals[index:])
            hold_fresh(replay, shapes[i])
            replay.drop("gradients", "fresh")
            if last or not last_only:  # what no_sync kept is copied into the bucket
                replay.drop("gradients", ("unsynced", i))
            else:
                replay.hold("gradients", ("unsynced", i), bytes_of(shapes[i]))
    if most:
        replay.hold("gradients", "tile", _largest_tile([shapes[i] for i in trainable(shapes)], most))


def _kept_bytes(shape: ParameterShape, most: int, optimizer: OptimizerShape) -> int:
    """Returns the bytes of a parameter's optimizer states, cut at `most` elements (0: not cut)."""
    cuts = range(0, shape.numel, most) if most and shape.numel else (0,)
    parts = (min(most or shape.numel, shape.numel - start) for start in cuts)
    return sum(optimizer_of(optimizer, shape).bytes_of(numel, updated_bytes(shape)) for numel in parts)


def _largest_tile(shapes: Sequence[ParameterShape], most: int) -> int:
    """Returns the bytes of the largest run of parameters updated together, each cut at `most` bytes except
    matrices that are needed whole.
    """
    largest = tile = 0
    cut = ((master_bytes(shape), master_bytes(shape) if shape.matrix else most) for shape in shapes)
    for piece in (min(step, size - start) for size, step in cut for start in range(0, size, step)):
        tile = piece if tile + piece > most else tile + piece
        largest = max(largest, tile)
    return largest


# -- buckets ---------------------------------------------------------------------------------------


def replay_buckets(
    replay: Replay, strategy: StrategyShape, schedule: Schedule, groups: GroupShape, optimizer: OptimizerShape,
    precision: PrecisionShape, tiers: TierShape = NOWHERE,
) -> None:  # fmt: skip
    """Plays a step with buckets on the rank that uses most memory."""
    n = groups.shard_ranks
    shapes, keeps_whole = schedule.shapes, not strategy.theory.gradients and not tiers.gradients
    for_good = strategy.theory.persistent_gradients
    buffers = buckets_of(shapes, n, strategy.bucket_limit)
    replay.hold("parameters", "flat", sum(b.padded_bytes for b in buffers))
    replay.hold("parameters", "frozen", sum(bytes_of(s) for s in shapes if not s.trainable))
    whole = sum(whole_bytes(b, shapes, precision) for b in buffers)
    replay.hold("gradients", "kept", whole if for_good else 0)
    shards = Shards(buffers, n, optimizer, precision, tiers, replay.owner)
    shards.hold(replay, schedule)
    reductions = Reductions(replay, groups, keeps_whole, strategy.reduce_with, tiers, for_good)
    steps = _Buckets(replay, schedule, buffers, precision, reductions)
    for last in micro_batches(schedule):
        reductions.synchronizing = strategy.synchronizes(last)
        steps.backward()
    shards.update(replay, schedule)


class _Buckets:
    """Backward: each gradient is added to its buckets, which are sent when full."""

    def __init__(
        self, replay: Replay, schedule: Schedule, buffers: list[FlatBuffer], precision: PrecisionShape,
        reductions: Reductions,
    ) -> None:  # fmt: skip
        self.replay, self.schedule, self.reductions = replay, schedule, reductions
        self.units: list[UnitGradients] = []
        self.expected: list[list[int]] = []  # of each bucket: its gradients, one of several uses more than once
        self.places: dict[int, list[int]] = {}  # of each parameter: its buckets
        for buffer in buffers:
            shape = schedule.shapes[buffer.spans[0].parameter]
            for start, numel in buffer.units:
                inside = [s.parameter for s in buffer.spans if min(start + numel, s.stop) > max(start, s.start)]
                for parameter in inside:
                    self.places.setdefault(parameter, []).append(len(self.units))
                # one per use of a tied parameter, and one if no step uses the parameter
                self.expected.append([i for i in inside for _ in range(self.schedule.arrivals.count(i) or 1)])
                own = buffer.shard_numel(replay.owner) if buffer.sizes else numel // buffer.world_size
                self.units.append(UnitGradients.of(len(self.units), numel, shape, precision, own))

    def backward(self) -> None:
        missing = [list(parameters) for parameters in self.expected]
        sent = 0
        for parameter in hand_over(self.replay, self.schedule):
            is_tied = self.schedule.shapes[parameter].uses > 1
            for bucket in self.places[parameter]:
                self.reductions.write(self.units[bucket])
                missing[bucket].remove(parameter)
                sent = sent if is_tied else self._send_full(missing, sent)
            if is_tied:  # its buckets are sent when autograd comes to the parameter, and its uses' gradients are gone
                self.replay.drop("gradients", "fresh")
                sent = self._send_full(missing, sent)
        if self.reductions.synchronizing:
            for unit in self.units[sent:]:
                self.reductions.send(unit)
            self.reductions.finish()

    def _send_full(self, missing: list[list[int]], sent: int) -> int:
        """Sends the complete buckets after the first `sent`, in order; returns the new number of sent buckets."""
        while self.reductions.synchronizing and sent < len(missing) and not missing[sent]:
            self.reductions.send(self.units[sent])
            sent += 1
        return sent
