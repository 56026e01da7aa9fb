"""All-gathers of a ZeRO-3 unit, counted from the order in which its modules run."""

from __future__ import annotations

from collections import Counter

from .choices import frees_root, reads
from .shapes import ROOT, Schedule
from .strategy import StrategyShape


def gathers_of(strategy: StrategyShape, schedule: Schedule, name: str) -> int:
    """All-gathers of a unit in one micro-batch."""
    if name == ROOT:
        return 1 + (returns_of_root(schedule) if frees_root(strategy, schedule.shapes) else not strategy.keep_root)
    returns = schedule.returns or (True,) * len(schedule.uses)
    uses = [back for use, back in zip(schedule.uses, returns, strict=True) if use == name]
    if not strategy.reshard_after_forward:
        return min(1, len(uses))
    return len(uses) + any(uses)


def returns_of_root(schedule: Schedule) -> int:
    """All-gathers of the root in backward, where it is freed while backward runs in another unit."""
    left, whole, gathers = Counter(schedule.arrivals), True, 0
    for i in schedule.arrivals:
        shape = schedule.shapes[i]
        if shape.unit != ROOT:
            whole = False
        elif not whole and reads(shape, left[i]):
            whole, gathers = True, gathers + 1
        left[i] -= 1
    return gathers
