"""Live bytes while a schedule is played event by event, and their maxima."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from ..shapes import ROOT, ParameterShape, Schedule, bytes_of

STATES = ("parameters", "gradients", "master", "optimizer", "communication")

IN_FLIGHT = {
    "fresh": "gradients of autograd", "beside": "gradients of autograd", "waiting": "gradients of tied parameters",
    "unsynced": "gradients of earlier micro-batches", "full": "open units", "wire": "cast for sending",
    "received": "received", "carried": "sums so far of open units", "tile": "tile of an update",
    "slot": "slots of the arena", "codes": "quantized gathers", "secondary": "secondary shards",
    "flags": "flags of used parameters", "unit": "units in use", "leaving": "on the way to host memory",
}  # fmt: skip
"""Name of an allocation, or its first word -> its term in flight; other allocations are part of the formula."""


@dataclass
class Replay:
    """Live bytes by (category, name) while a schedule is played, their sums, and the maxima of the sums."""

    live: dict[tuple[str, Any], int] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STATES, 0))
    highest: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STATES, 0))
    most: int = 0
    at_most: dict[str, int] = field(default_factory=dict)
    """The sum of each category when their total was largest."""
    host: Replay | None = None
    """Live bytes of host memory in the same events; None if nothing leaves the device."""
    files: int = 0
    """Bytes in files, which are never freed."""
    shard: int | None = None
    """Shard whose host memory is played; None: the shard of the rank that uses most host memory."""
    owner: int = 0
    """Rank whose owned matrices are played."""
    in_flight: dict[tuple[str, str], int] = field(default_factory=dict)
    """(category, term of IN_FLIGHT) -> live bytes."""
    beyond: dict[str, dict[str, int]] = field(default_factory=dict)
    """Category, or "states" -> term -> bytes when that category's sum was largest."""

    def hold(self, category: str, name: Any, size: int) -> None:
        """Allocates `name` with `size` bytes, or resizes it if it is alive."""
        self._change(category, name, size - self.live.get((category, name), 0))
        self.live[category, name] = size
        if self.totals[category] > self.highest[category]:
            self.highest[category] = self.totals[category]
            self.beyond[category] = self._in_flight(category)
        if (together := sum(self.totals.values())) > self.most:
            self.most, self.at_most, self.beyond["states"] = together, dict(self.totals), self._in_flight(*STATES)

    def drop(self, category: str, name: Any) -> None:
        """Frees `name`."""
        self._change(category, name, -self.live.pop((category, name), 0))

    def rename(self, category: str, name: Any, new: Any) -> None:
        """Gives an allocation, if it is alive, another name."""
        size = self.live.get((category, name), 0)
        self.drop(category, name)
        self.hold(category, new, size)

    def _change(self, category: str, name: Any, size: int) -> None:
        self.totals[category] += size
        term = IN_FLIGHT.get(name[0] if isinstance(name, tuple) else name)
        if term is not None:
            self.in_flight[category, term] = self.in_flight.get((category, term), 0) + size

    def _in_flight(self, *categories: str) -> dict[str, int]:
        """The terms of `categories` at present."""
        terms: dict[str, int] = {}
        for (category, term), size in self.in_flight.items():
            if size and category in categories:
                terms[term] = terms.get(term, 0) + size
        return terms


@dataclass
class InSlots(Replay):
    """With an arena: full gradients take a free slot of their size, or a new slot, which stays allocated; a slot is
    counted under the category of its last content. Shards are not in slots.
    """

    free: dict[int, list[int]] = field(default_factory=dict)
    """Size -> numbers of free slots; the last one freed is taken first."""
    taken: dict[tuple[str, Any], tuple[int, int]] = field(default_factory=dict)
    """(category, name) -> (size, number of the slot)."""
    under: dict[int, str] = field(default_factory=dict)
    """Number of the slot -> category."""

    def hold(self, category: str, name: Any, size: int) -> None:
        if not self._comes_and_goes(name):
            return super().hold(category, name, size)
        if (category, name) in self.taken:
            return None
        free = self.free.setdefault(size, [])
        number = free.pop() if free else len(self.under)
        super().drop(self.under.get(number, category), ("slot", number))
        self.taken[category, name], self.under[number] = (size, number), category
        return super().hold(category, ("slot", number), size)

    def drop(self, category: str, name: Any) -> None:
        if self._comes_and_goes(name):
            size, number = self.taken.pop((category, name), (0, -1))
            if size:
                self.free[size].append(number)
        else:
            super().drop(category, name)

    def rename(self, category: str, name: Any, new: Any) -> None:
        if slot := self.taken.pop((category, name), None):
            self.taken[category, new] = slot

    @staticmethod
    def _comes_and_goes(name: Any) -> bool:
        return isinstance(name, tuple) and name[0] in ("full", "wire", "leaving")


def hand_over(
    replay: Replay, schedule: Schedule, before: Callable[[int], None] = lambda _: None
) -> Iterator[int]:  # fmt: skip
    """Yields the parameters in the order in which their gradients arrive; each gradient is live while handed over.

    `before`: called with the next parameter, before its gradient is made.
    """
    for index, i in enumerate(schedule.arrivals):
        before(i)
        hold_beside(replay, schedule, schedule.arrivals[index:])
        replay.hold("gradients", "fresh", bytes_of(schedule.shapes[i]))
        yield i
        replay.drop("gradients", "fresh")


def hold_beside(replay: Replay, schedule: Schedule, arrivals: Sequence[int]) -> None:
    """Allocates the gradients that are made together with the first of `arrivals`, while that one is handed over: the
    gradient of a weight's bias, or all remaining gradients of its block.
    """
    shapes, first = schedule.shapes, schedule.shapes[arrivals[0]]
    waits = [i for i in arrivals[1:2] if first.beside == i]
    if schedule.by_block and first.unit != ROOT:
        waits = list(takewhile(lambda i: shapes[i].unit == first.unit, arrivals[1:]))
    replay.hold("gradients", "beside", sum(bytes_of(shapes[i]) for i in waits))


def hold_fresh(replay: Replay, shape: ParameterShape) -> None:
    """Allocates the gradient that autograd hands over; for a tied parameter, briefly with those of all uses."""
    if shape.uses > 1:
        replay.drop("gradients", ("waiting", shape))
        replay.hold("gradients", "fresh", (shape.uses + 1) * bytes_of(shape))
    replay.hold("gradients", "fresh", bytes_of(shape))


def hold_waiting(replay: Replay, shapes: Sequence[ParameterShape]) -> None:
    """Allocates tied parameters' gradients: all uses except the first in forward wait through most of backward."""
    for shape in shapes:
        if shape.trainable and shape.uses > 1:
            replay.hold("gradients", ("waiting", shape), (shape.uses - 1) * bytes_of(shape))
