"""ZeRO-1, ZeRO-2 and Megatron's distributed optimizer, event by event.

Parameters lie in buckets that are whole on every rank. Whole gradients live as long as the engine under Megatron, from
a bucket's first gradient to the update under ZeRO-1, and while a bucket fills and is reduced under ZeRO-2. Buckets are
sent in a fixed order, one at a time, as they fill.
"""

from __future__ import annotations

from ..groups import GroupShape
from ..layout import FlatBuffer, by_kind, lay_out_buckets
from ..shapes import OptimizerShape, PrecisionShape, Schedule, bytes_of, micro_batches, trainable
from ..strategy import StrategyShape
from ..tiers import NOWHERE, TierShape
from .live_bytes import Replay, hand_over
from .reductions import Reductions, UnitGradients, whole_bytes
from .shards import Shards


def replay_buckets(
    replay: Replay, strategy: StrategyShape, schedule: Schedule, groups: GroupShape, optimizer: OptimizerShape,
    precision: PrecisionShape, tiers: TierShape = NOWHERE,
) -> None:  # fmt: skip
    """Plays a step in buckets: the bytes of the fullest rank."""
    n = groups.shard_ranks
    shapes, keeps_whole = schedule.shapes, not strategy.theory.gradients and not tiers.gradients
    for_good = strategy.theory.persistent_gradients or (n == 1 and not keeps_whole and not tiers.gradients)
    kinds = by_kind(shapes, trainable(shapes)[::-1])
    buffers = [b for kind in kinds for b in lay_out_buckets(shapes, kind, n, strategy.bucket_limit)]
    replay.hold("parameters", "flat", sum(b.padded_bytes for b in buffers))
    replay.hold("parameters", "frozen", sum(bytes_of(s) for s in shapes if not s.trainable))
    whole = sum(whole_bytes(b, shapes, precision) for b in buffers)
    replay.hold("gradients", "kept", whole if for_good else 0)
    shards = Shards(buffers, n, optimizer, precision, tiers)
    shards.hold(replay, schedule)
    reductions = Reductions(replay, groups, keeps_whole, strategy.reduce_with, tiers, for_good)
    steps = _Buckets(replay, schedule, buffers, precision, reductions)
    for last in micro_batches(schedule):
        reductions.synchronizing = strategy.synchronizes(last)
        steps.backward()
    shards.update(replay, schedule)


class _Buckets:
    """Backward: each gradient goes into its buckets, which are sent when they are full."""

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
                self.expected.append([i for i in inside for _ in range(self._gradients_of(i))])
                self.units.append(UnitGradients.of(len(self.units), numel, shape, precision))

    def _gradients_of(self, parameter: int) -> int:
        """Gradients to wait for: one per use of a tied parameter, and one of a parameter that no step uses."""
        return self.schedule.arrivals.count(parameter) or 1

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
            self.reductions.land()

    def _send_full(self, missing: list[list[int]], sent: int) -> int:
        """Sends, after the first `sent`, the buckets that are complete, in their order; returns how many are sent."""
        while self.reductions.synchronizing and sent < len(missing) and not missing[sent]:
            self.reductions.send(self.units[sent])
            sent += 1
        return sent
