"""Units that are open at once: of gradients from a unit's first to its last, and of ZeRO-3's parameters while in use.

A unit is a bucket, or what a module group of ZeRO-3 has of one dtype, trained or frozen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .layout import by_kind, by_unit, lay_out, lay_out_buckets
from .shapes import ROOT, ParameterShape, Schedule, trainable
from .strategy import StrategyShape

Weight = Callable[["Unit"], int]
"""Bytes of a unit."""


@dataclass(frozen=True)
class Unit:
    """A unit of `numel` elements with padding, `own` without. `shape`: of one of its parameters, which are of one kind.

    `module`: its group of modules under ZeRO-3. `stays`: small parameters that are whole for good.
    """

    numel: int
    own: int
    shape: ParameterShape
    parameters: tuple[int, ...]
    module: str = ROOT
    stays: bool = False


def units_of(strategy: StrategyShape, shapes: Sequence[ParameterShape], n: int) -> list[Unit]:
    """All units of a partitioned strategy, its `bucket_bytes` settled; frozen parameters are in no bucket."""
    return list(_buckets(strategy, shapes, n) if strategy.has_buckets else _module_units(strategy, shapes, n))


def _buckets(strategy: StrategyShape, shapes: Sequence[ParameterShape], n: int) -> Iterator[Unit]:
    for kind in by_kind(shapes, trainable(shapes)[::-1]):
        for buffer in lay_out_buckets(shapes, kind, n, strategy.bucket_limit):
            for start, numel in buffer.units:
                inside = {s.parameter: min(start + numel, s.stop) - max(start, s.start) for s in buffer.spans}
                own = {parameter: common for parameter, common in inside.items() if common > 0}
                yield Unit(numel, sum(own.values()), shapes[kind[0]], tuple(own))


def _module_units(strategy: StrategyShape, shapes: Sequence[ParameterShape], n: int) -> Iterator[Unit]:
    small, modules = by_unit(shapes, strategy.persistence_numel)
    for module, mine in [(ROOT, small), *modules.items()]:
        for kind in by_kind(shapes, mine):
            buffer = lay_out(shapes, kind, n)
            yield Unit(buffer.padded_numel, buffer.numel, shapes[kind[0]], tuple(kind), module, mine is small)


def most_open(strategy: StrategyShape, schedule: Schedule, units: Sequence[Unit], weight: Weight) -> int:
    """Returns the largest sum of weights of units whose gradients have begun to come and are not complete.

    One more, the largest, is being reduced meanwhile.
    """
    if not units:
        return 0
    changes = [0] * (len(schedule.arrivals) + 2)
    for unit, (first, last) in zip(units, _open_from_to(strategy, schedule, units), strict=True):
        changes[first] += weight(unit)
        changes[last + 1] -= weight(unit)
    return max(accumulate(changes)) + max(map(weight, units))


def _open_from_to(strategy: StrategyShape, schedule: Schedule, units: Sequence[Unit]) -> Iterator[tuple[int, int]]:
    """Places among the arrivals of a unit's first gradient, and of the last that it waits for."""
    end, arrivals = len(schedule.arrivals), schedule.arrivals
    firsts = {parameter: place for place, parameter in reversed(list(enumerate(arrivals)))}
    lasts = {parameter: place for place, parameter in enumerate(arrivals)}
    sent = 0
    for unit in units:
        first = min((firsts.get(parameter, end) for parameter in unit.parameters), default=end)
        if strategy.has_buckets:  # buckets are sent in one order, and one that misses a gradient waits for the end
            sent = max([sent, *(lasts.get(parameter, end) for parameter in unit.parameters)])
            yield min(first, sent), sent
        elif unit.stays or unit.module == ROOT:
            yield first, end
        else:  # backward has passed a module once it has passed those inside
            inside = (place for place, i in enumerate(arrivals) if _is_inside(schedule.shapes[i].unit, unit.module))
            yield first, max(first, max(inside, default=first))


def most_in_use(strategy: StrategyShape, schedule: Schedule, units: Sequence[Unit], weight: Weight) -> int:
    """Returns the largest sum of weights of ZeRO-3 units that are whole at once: the root, those that forward uses more
    than once, and one with those around and inside of it and those prefetched; all, if forward reshards nothing.
    """
    large = [unit for unit in units if not unit.stays]
    if not strategy.reshard_after_forward:
        return sum(map(weight, large))
    count = Counter(schedule.uses)
    lasting = [unit for unit in large if unit.module == ROOT or count[unit.module] > 1]
    row = [unit for module in schedule.uses for unit in large if unit.module == module]
    windows = [_window(row, place, by) for place in range(len(row)) for by in (strategy.prefetch, -strategy.prefetch)]
    return sum(map(weight, lasting)) + max((sum(map(weight, one - {*lasting})) for one in windows), default=0)


def _window(row: Sequence[Unit], place: int, ahead: int) -> set[Unit]:
    """Units that may be whole while one is in use: those of its module, around it and inside of it, and the next ones
    that are prefetched, which in backward (`ahead` below zero) are those before it.
    """
    module = row[place].module
    family = [p for p, other in enumerate(row) if _is_inside(other.module, module) or _is_inside(module, other.module)]
    steps = range(ahead + 1) if ahead > 0 else range(ahead, 1)
    return {row[p + by] for p in family for by in steps if 0 <= p + by < len(row)}


def _is_inside(module: str, other: str) -> bool:
    return module == other or (other != ROOT and module.startswith(f"{other}."))
