"""The entry to the replay of memory: plays one step of a strategy, and returns the maxima of its live bytes.

The rank that uses most memory is played. Padded shards are equal, but padding has no optimizer states, and an optimizer
counts its steps once per segment: of two ranks with equally many elements, the one with more segments uses more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..closed_forms import Formula
from ..groups import GroupShape, slice_of
from ..shapes import FULL, NOWHERE, OptimizerShape, PrecisionShape, Schedule, TierShape
from ..strategy import StrategyShape, buffers_of, settle
from .ddp_and_buckets import replay_buckets, replay_ddp
from .live_bytes import InSlots, Replay
from .shards import Shards
from .stage3 import replay_units

MOST_OWNERS = 16
"""Up to this many ranks, each is played if owned matrices make their shards differ; above, only the fullest."""


@dataclass
class Prediction:
    """Bytes on the rank that uses most. `states_bytes`: largest sum over time; `highest`: each category's own maximum;
    `at_most`: each category at the time of the largest sum. `host_bytes`, `host_highest`, `host_at_most`: the same for
    host memory. `file_bytes`: bytes in files.
    """

    states_bytes: int
    highest: dict[str, int]
    at_most: dict[str, int]
    host_bytes: int = 0
    file_bytes: int = 0
    host_highest: dict[str, int] = field(default_factory=dict)
    host_at_most: dict[str, int] = field(default_factory=dict)
    in_flight: dict[str, dict[str, int]] = field(default_factory=dict)
    """Category, or "states" -> term of live_bytes.IN_FLIGHT -> its bytes at that maximum."""

    def of_category(self, category: str, tier: str = "device") -> int | None:
        """The expected maximum of `category`, or None if theory does not predict it."""
        if tier == "host":
            return self.host_bytes if category == "states" else self.host_highest.get(category)
        return self.states_bytes if category == "states" else self.highest.get(category)

    def at_most_states(self, tier: str = "device") -> dict[str, int]:
        """Returns the expected bytes of each category at the maximum of the states."""
        return self.host_at_most if tier == "host" else self.at_most


def predict_states(
    strategy: StrategyShape, schedule: Schedule, groups: GroupShape, optimizer: OptimizerShape,
    precision: PrecisionShape = FULL, tiers: TierShape = NOWHERE, rank: int | None = None,
) -> Prediction:  # fmt: skip
    """Plays a step, and returns the model states' maxima on the rank that uses most, and each category's maximum over
    the ranks. `rank`: the rank whose host memory is played; None: the one that uses most.
    """
    if any(shape.matrix for shape in schedule.shapes) and strategy.theory.optimizer:
        owners = [rank] if rank is not None else range(groups.shard_ranks)
        if len(owners) > MOST_OWNERS:
            owners = fullest_ranks(strategy, schedule, groups, optimizer, precision, tiers)
    else:
        owners = [0]
    played = [_play(strategy, schedule, optimizer, precision, groups, tiers, rank, owner) for owner in owners]
    most = max(played, key=lambda prediction: prediction.states_bytes)
    most.highest = {name: max(other.highest[name] for other in played) for name in most.highest}
    most.host_bytes = max(other.host_bytes for other in played)
    most.host_highest = {name: max(other.host_highest.get(name, 0) for other in played) for name in most.host_highest}
    return most


def _play(
    strategy: StrategyShape, schedule: Schedule, optimizer: OptimizerShape, precision: PrecisionShape,
    groups: GroupShape, tiers: TierShape, rank: int | None, owner: int,
) -> Prediction:  # fmt: skip
    host = Replay(shard=None if rank is None else slice_of(rank, groups)) if tiers.medium else None
    strategy = settle(strategy, schedule.shapes, groups.shard_ranks)
    replay = InSlots(host=host, owner=owner) if schedule.arena else Replay(host=host, owner=owner)
    for _ in range(2 if schedule.arena else 1):  # an arena has all its slots once a step has been played
        replay.files = 0
        if not strategy.theory.optimizer:
            replay_ddp(replay, strategy, schedule, optimizer, precision)
        else:
            play = replay_units if strategy.theory.parameters else replay_buckets
            play(replay, strategy, schedule, groups, optimizer, precision, tiers)
    prediction = Prediction(
        replay.most, replay.highest, replay.at_most, file_bytes=replay.files, in_flight=replay.beyond
    )
    if host is not None:
        prediction.host_bytes, prediction.host_highest, prediction.host_at_most = host.most, host.highest, host.at_most
    return prediction


def explained(formulas: Mapping[str, Formula], prediction: Prediction) -> dict[str, Formula]:
    """Returns the closed forms, each with the terms in flight at its category's maximum."""
    return {
        name: formula.explained(prediction.of_category(name) or 0, prediction.in_flight.get(name, {}))
        for name, formula in formulas.items()
    }


# -- the fullest ranks -----------------------------------------------------------------------------


def fullest_ranks(
    strategy: StrategyShape, schedule: Schedule, groups: GroupShape, optimizer: OptimizerShape,
    precision: PrecisionShape, tiers: TierShape = NOWHERE,
) -> list[int]:  # fmt: skip
    """Returns the ranks that can have the peak, the one with the largest states first.

    Owned matrices make ranks differ at every instant, so that any can have it. Otherwise it is the rank whose optimizer
    keeps most bytes on the device; ties go to the one that keeps most in another tier, then to the lowest.
    """
    n, shapes = groups.shard_ranks, schedule.shapes
    if n <= MOST_OWNERS and strategy.theory.optimizer and any(shape.matrix for shape in shapes):
        # a rank that owns less may receive more of another rank's elements in the same bucket
        played = [_play(strategy, schedule, optimizer, precision, groups, tiers, None, owner) for owner in range(n)]
        return sorted(range(n), key=lambda owner: -played[owner].states_bytes)
    laid_out = buffers_of(settle(strategy, shapes, n), shapes, n)
    buffers = Counter(buffer.pattern for _, buffer in laid_out if shapes[buffer.spans[0].parameter].trainable)
    shards = [(Shards([buffer], n, optimizer, precision, tiers), count) for buffer, count in buffers.items()]
    kept = [  # on the device, and in another tier
        [sum(count * shard.kept_bytes(rank_slice, on_host) for shard, count in shards) for on_host in (False, True)]
        for rank_slice in range(n if shards else 1)
    ]
    most = max(kept)
    return [min(rank for rank in range(groups.world_size) if kept[slice_of(rank, groups) % len(kept)] == most)]
