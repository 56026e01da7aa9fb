"""Bytes of the model states: the paper's floors, and what is in flight by the schedule of each strategy.

With P, G, O the bytes of parameters, gradients and optimizer states (Adam: 4ψ, 4ψ, 8ψ in fp32; below it 2ψ, 2ψ and,
with the fp32 masters, 12ψ)::

    ddp     P   + G   + O          zero2   P   + G/N + O/N
    zero1   P   + G   + O/N        zero3   P/N + G/N + O/N           (ZeRO, arXiv 1910.02054, figure 1)

Real runs hold more for a while: the gradient that autograd has just made (under DDP three of a tied
parameter), buckets and units on their way, the receive side of an exchange. That part is replayed event by
event in the order of the model's own schedule (shapes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .choices import settle
from .groups import GroupShape
from .replay.buckets import replay_buckets
from .replay.ddp import replay_ddp
from .replay.live_bytes import InSlots, Replay
from .replay.stage3 import replay_units
from .shapes import (
    OptimizerShape,
    ParameterShape,
    PrecisionShape,
    Schedule,
    bytes_of,
    gradient_bytes,
    is_half,
    master_bytes,
)
from .tiers import NOWHERE, TierShape

FULL = PrecisionShape()


@dataclass
class Prediction:
    """`states_bytes`: largest sum over time. `floor_bytes`: the paper's formula. `highest`: each category's maximum."""

    states_bytes: int
    floor_bytes: int
    highest: dict[str, int]
    host_bytes: int = 0
    """Largest sum over time of the states in host memory."""
    file_bytes: int = 0

    host_highest: dict[str, int] = field(default_factory=dict)
    """Each category's maximum in host memory."""

    def of_category(self, category: str, tier: str = "device") -> int | None:
        """The expected maximum of `category`, or None where theory says nothing."""
        if tier == "host":
            return self.host_bytes if category == "states" else self.host_highest.get(category)
        return self.states_bytes if category == "states" else self.highest.get(category)


def predicts(strategy: dict[str, Any]) -> bool:
    """Whether theory has a schedule for a strategy: DDP and ours. The peers are measured only."""
    return strategy["name"] in _REPLAYS


def predict_states(
    strategy: dict[str, Any], schedule: Schedule, world_size: int, optimizer: OptimizerShape,
    precision: PrecisionShape = FULL, groups: GroupShape | None = None, tiers: TierShape = NOWHERE,
) -> Prediction:  # fmt: skip
    """What the states of one step need on the rank that needs most. `strategy`: a resolved section."""
    groups, host = groups or GroupShape(world_size), Replay() if tiers.place else None
    strategy = settle(strategy, schedule.shapes, groups.sharers)
    replay = InSlots(host=host) if schedule.arena else Replay(host=host)
    more = {"tiers": tiers} if tiers.place else {}
    for _ in range(2 if schedule.arena else 1):  # its slots are all there once a step has been
        replay.files = 0
        _REPLAYS[strategy["name"]](replay, strategy, schedule, groups, optimizer, precision, **more)
    floor = _floor(strategy["name"], schedule.shapes, groups.sharers, optimizer.states, precision)
    floor = max(0, floor - _away(strategy["name"], schedule.shapes, groups.sharers, optimizer.states, precision, tiers))
    if host is None:
        return Prediction(replay.most, floor, replay.highest, 0, replay.files)
    return Prediction(replay.most, floor, replay.highest, host.most, replay.files, host.highest)


_SHARED: dict[str, tuple[bool, bool, bool]] = {
    "ddp": (False, False, False),
    "zero1": (False, False, True),
    "megatron": (False, False, True),
    "zero2": (False, True, True),
    "zero3": (True, True, True),
}
"""Whether parameters, gradients and optimizer states are shared by the ranks."""


def _floor(name: str, shapes: Sequence[ParameterShape], n: int, states: int, precision: PrecisionShape) -> int:
    """The formula. Where gradients are cast at once, as under Megatron, the fp32 copy of a shard is part of it."""
    trained = [s for s in shapes if s.trainable]
    parameters = sum(bytes_of(s) for s in shapes)
    gradients = sum(s.numel * gradient_bytes(s, precision) for s in trained)
    kept = sum((states + is_half(s)) * master_bytes(s) for s in trained)
    if precision.tile_bytes is None:
        kept += sum(master_bytes(s) for s in trained if gradient_bytes(s, precision) < 4)
    ranks = (n if shared else 1 for shared in _SHARED[name])
    return sum(-(-size // each) for size, each in zip((parameters, gradients, kept), ranks, strict=True))


def _away(
    name: str, shapes: Sequence[ParameterShape], n: int, states: int, precision: PrecisionShape, tiers: TierShape
) -> int:
    """Of the formula, what leaves the device."""
    trained = [s for s in shapes if s.trainable]
    whole = n if not _SHARED[name][1] and tiers.gradients else 1  # streamed: whole gradients are gone, not 1/N of them
    gone = tiers.fraction * tiers.optimizer * sum((states + is_half(s)) * master_bytes(s) for s in trained)
    gone += tiers.fraction * tiers.gradients * whole * sum(s.numel * gradient_bytes(s, precision) for s in trained)
    return int((gone + tiers.parameters * sum(bytes_of(s) for s in shapes)) / n)


_REPLAYS: dict[str, Callable[..., None]] = {
    "ddp": replay_ddp,
    "zero1": replay_buckets,
    "megatron": replay_buckets,
    "zero2": replay_buckets,
    "zero3": replay_units,
}
