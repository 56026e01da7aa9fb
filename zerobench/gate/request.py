"""A marker, read: what a test asks of the gate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .limits import GateError, HandLimit, parse_hand

MOST_RANKS = 64

OPTIONS = ("ranks", "timeout_s", "recorded")
"""Arguments of the marker that are no limits."""


@dataclass(frozen=True)
class Request:
    """Limits and options of a test. `ranks`: None for a test in this process; `recorded`: held against its record."""

    limits: tuple[HandLimit, ...]
    recorded: bool
    ranks: int | None = None
    timeout_s: float = 300.0


def read(markers: Iterable[Any]) -> Request:
    """Reads a test's markers, the closest one first; it wins. Raises GateError, a sentence."""
    arguments: dict[str, Any] = {}
    for marker in reversed(list(markers)):
        if marker.args:
            raise GateError(f'zerobench: {marker.args[0]!r:.60} has no name; write limits as peak="<= 24 GiB"')
        arguments |= marker.kwargs
    ranks, timeout_s = arguments.pop("ranks", None), arguments.pop("timeout_s", 300.0)
    if ranks is not None and (type(ranks) is not int or not 1 <= ranks <= MOST_RANKS):
        raise GateError(f"zerobench: ranks={ranks!r:.60}; it is a whole number from 1 to {MOST_RANKS}")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise GateError(f"zerobench: timeout_s={timeout_s!r:.60}; it is a number of seconds above 0")
    recorded = arguments.pop("recorded", None)
    if recorded not in (None, True, False):
        raise GateError(f"zerobench: recorded={recorded!r:.60}; it is True or False")
    limits = hand_limits(arguments)
    if recorded is False and not limits:
        raise GateError("zerobench: recorded=False and no limit: there is nothing to hold the test against")
    return Request(limits, not limits if recorded is None else recorded, ranks, timeout_s)


def hand_limits(arguments: Mapping[str, Any]) -> tuple[HandLimit, ...]:
    """Reads limits by hand. Raises GateError, a sentence."""
    limits = tuple(parse_hand(argument, value) for argument, value in arguments.items())
    metrics = [limit.metric for limit in limits]
    for limit in limits:
        if metrics.count(limit.metric) > 1:
            raise GateError(f"zerobench: {limit.written}: {limit.metric} has two limits")
    return limits
