"""The entry to the replay of memory: plays one step of a strategy, and returns the maxima of its live bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..choices import settle
from ..groups import GroupShape
from ..ranks import slice_of
from ..shapes import OptimizerShape, PrecisionShape, Schedule
from ..strategy import StrategyShape
from ..tiers import NOWHERE, TierShape
from .live_bytes import InSlots, Replay

FULL = PrecisionShape()


@dataclass
class Prediction:
    """Bytes on the fullest rank. `states_bytes`: largest sum over time; `highest`: each category's own maximum;
    `at_most`: the categories at the instant of the largest sum.

    `host_bytes`, `host_highest`, `host_at_most`: these of host memory. `file_bytes`: of files.
    """

    states_bytes: int
    highest: dict[str, int]
    at_most: dict[str, int]
    host_bytes: int = 0
    file_bytes: int = 0
    host_highest: dict[str, int] = field(default_factory=dict)
    host_at_most: dict[str, int] = field(default_factory=dict)

    def of_category(self, category: str, tier: str = "device") -> int | None:
        """The expected maximum of `category`, or None where theory says nothing."""
        if tier == "host":
            return self.host_bytes if category == "states" else self.host_highest.get(category)
        return self.states_bytes if category == "states" else self.highest.get(category)

    def at_most_states(self, tier: str = "device") -> dict[str, int]:
        """Returns the expected parts of the states' maximum, by category."""
        return self.host_at_most if tier == "host" else self.at_most


def predict_states(
    strategy: StrategyShape, schedule: Schedule, world_size: int, optimizer: OptimizerShape,
    precision: PrecisionShape = FULL, groups: GroupShape | None = None, tiers: TierShape = NOWHERE,
    rank: int | None = None,
) -> Prediction:  # fmt: skip
    """Plays a step, and returns the model states' maxima on the rank that needs most. `rank`: whose host memory is
    played; None: the fullest.
    """
    groups = groups or GroupShape(world_size)
    shard = None if rank is None else slice_of(rank, groups)
    host = Replay(shard=shard) if tiers.place else None
    strategy = settle(strategy, schedule.shapes, groups.shard_ranks)
    replay = InSlots(host=host) if schedule.arena else Replay(host=host)
    more = {"tiers": tiers} if tiers.place else {}
    for _ in range(2 if schedule.arena else 1):  # an arena has all its slots once a step has been played
        replay.files = 0
        strategy.theory.replay(replay, strategy, schedule, groups, optimizer, precision, **more)
    if host is None:
        return Prediction(replay.most, replay.highest, replay.at_most, file_bytes=replay.files)
    return Prediction(replay.most, replay.highest, replay.at_most, host.most, replay.files, host.highest, host.at_most)
