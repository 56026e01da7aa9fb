"""Live bytes while a schedule is played event by event; among them the gradients of units from autograd to the shards.

An allocation has a category and a name. A name in flight, or the first word of a name, is the term that a formula shows
for it; all other allocations are part of the formula. The gradients of a unit, as gradients/flow.py moves them::

filling     the unit's full gradients: from the first write; in stage 1 until the update, under Megatron permanently
sent        the send and receive buffers, in the wire's dtype; one unit at a time
completed   only this rank's slice, until the update

A step's first reduce-scatter, if in the gradients' dtype, writes the slice in place; otherwise it is allocated later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from ..groups import GroupShape
from ..shapes import ROOT, ParameterShape, PrecisionShape, Schedule, TierShape
from ..strategy import StrategyShape

STATES = ("parameters", "gradients", "master", "optimizer", "communication")

AUTOGRAD, TIED = "gradients of autograd", "gradients of tied parameters"
UNSYNCHRONIZED = "gradients of earlier micro-batches"
OPEN, WIRE, RECEIVED = "open units", "cast for sending", "received"
SUM_SO_FAR, TO_HOST = "sums so far of open units", "on the way to host memory"
TILE, SLOT, FLAGS = "tile of an update", "slots of the arena", "flags of used parameters"
UNIT, CODES, SECONDARY = "units in use", "quantized gathers", "secondary shards"

IN_FLIGHT = {
    AUTOGRAD, TIED, UNSYNCHRONIZED, OPEN, WIRE, RECEIVED, SUM_SO_FAR, TO_HOST, TILE, SLOT, FLAGS, UNIT, CODES,
    SECONDARY,
}  # fmt: skip

HANDED_OVER, MADE_TOGETHER = (AUTOGRAD, "handed over"), (AUTOGRAD, "made together")


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
        term = name[0] if isinstance(name, tuple) else name
        if term in IN_FLIGHT:
            self.in_flight[category, term] = self.in_flight.get((category, term), 0) + size

    def _in_flight(self, *categories: str) -> dict[str, int]:
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
    categories: dict[int, str] = field(default_factory=dict)
    """Number of the slot -> category."""

    def hold(self, category: str, name: Any, size: int) -> None:
        if not self._takes_slot(name):
            return super().hold(category, name, size)
        if (category, name) in self.taken:
            return None
        free = self.free.setdefault(size, [])
        number = free.pop() if free else len(self.categories)
        super().drop(self.categories.get(number, category), (SLOT, number))
        self.taken[category, name], self.categories[number] = (size, number), category
        return super().hold(category, (SLOT, number), size)

    def drop(self, category: str, name: Any) -> None:
        if self._takes_slot(name):
            size, number = self.taken.pop((category, name), (0, -1))
            if size:
                self.free[size].append(number)
        else:
            super().drop(category, name)

    def rename(self, category: str, name: Any, new: Any) -> None:
        if slot := self.taken.pop((category, name), None):
            self.taken[category, new] = slot

    @staticmethod
    def _takes_slot(name: Any) -> bool:
        return isinstance(name, tuple) and name[0] in (OPEN, WIRE, TO_HOST)


# -- gradients that autograd makes -----------------------------------------------------------------


def hand_over(
    replay: Replay, schedule: Schedule, before: Callable[[int], None] = lambda _: None
) -> Iterator[int]:  # fmt: skip
    """Yields parameters as gradients arrive, each live meanwhile. `before`: called before one is made."""
    for index, i in enumerate(schedule.arrivals):
        before(i)
        hold_made_together(replay, schedule, schedule.arrivals[index:])
        replay.hold("gradients", HANDED_OVER, schedule.shapes[i].nbytes)
        yield i
        replay.drop("gradients", HANDED_OVER)


def hold_made_together(replay: Replay, schedule: Schedule, arrivals: Sequence[int]) -> None:
    """Allocates the gradients that are made together with the first of `arrivals`, while that one is handed over: the
    gradient of a weight's bias, or all remaining gradients of its block.
    """
    shapes, first = schedule.shapes, schedule.shapes[arrivals[0]]
    others = [i for i in arrivals[1:2] if first.beside == i]
    if schedule.by_block and first.unit != ROOT:
        others = list(takewhile(lambda i: shapes[i].unit == first.unit, arrivals[1:]))
    replay.hold("gradients", MADE_TOGETHER, sum(shapes[i].nbytes for i in others))


# -- gradients of units, from autograd to the shards -----------------------------------------------


@dataclass(frozen=True)
class UnitGradients:
    """A unit's gradients: `numel` padded elements, bytes as summed and as sent; `own`: of the shard."""

    name: Any
    numel: int
    gradient_bytes: int
    wire_bytes: int
    casts: bool
    align: int
    own: int
    is_owned: bool

    @staticmethod
    def of(name: Any, numel: int, shape: ParameterShape, precision: PrecisionShape, own: int) -> UnitGradients:
        """Returns the gradients of a unit of `numel` elements that holds a parameter of `shape`."""
        sizes = shape.gradient_bytes(precision), shape.wire_bytes(precision)
        is_owned = shape.matrix is not None
        return UnitGradients(name, numel, *sizes, shape.casts(precision), shape.align, own, is_owned)


class Reductions:
    """The reductions of one step on a rank."""

    def __init__(self, replay: Replay, groups: GroupShape, strategy: StrategyShape, tiers: TierShape) -> None:
        self.replay, self.groups, self.tiers = replay, groups, tiers
        self.keeps_whole = not strategy.theory.gradients and not tiers.gradients  # until the update, as in stage 1
        self.is_permanent = strategy.theory.persistent_gradients
        self.reduces = groups.shard_ranks > 1 or tiers.gradients
        self.receives = strategy.reduce_with == "reduce_scatter"
        self.synchronizing = True
        self._in_wire_dtype: dict[Any, bool] = {}  # of each unit that is filling
        self._completed: set[Any] = set()
        self.sent: UnitGradients | None = None
        """The unit whose reduction has not completed."""

    def write(self, unit: UnitGradients) -> None:
        """Adds a gradient to the unit. Sums kept under no_sync are in the gradients' dtype, and are cast when sent."""
        if self.keeps_whole and not self.is_permanent:
            self.replay.hold("gradients", ("whole", unit.name), unit.numel * unit.gradient_bytes)
        if not self.reduces and not self.keeps_whole:
            self._hold_shard(unit)
        if not self.reduces or unit.name in self._in_wire_dtype:
            return
        self._in_wire_dtype[unit.name] = self.synchronizing and not self.keeps_whole
        if not self.keeps_whole:
            category = "communication" if self.synchronizing else "gradients"
            size = unit.wire_bytes if self.synchronizing else unit.gradient_bytes
            self.replay.hold(category, (OPEN, unit.name), unit.numel * size)
        elif unit.name in self._completed:  # the whole gradients start again from zero
            self.replay.hold("gradients", (SUM_SO_FAR, unit.name), unit.own * unit.gradient_bytes)

    def send(self, unit: UnitGradients) -> None:
        """Sends a complete unit: the reduction before it completes first, then the unit is cast, freed and sent."""
        if not self.reduces:
            return
        self.write(unit)
        self.complete()
        if unit.casts and not self._in_wire_dtype[unit.name]:
            self.replay.hold("communication", (WIRE, unit.name), unit.numel * unit.wire_bytes)
            for category in ("communication", "gradients"):
                self.replay.drop(category, (OPEN, unit.name))
        if self.receives:
            if not unit.casts and not self.tiers.gradients:
                self._hold_shard(unit)
            self._receive(unit, slice(1))
        self.sent = unit

    def complete(self) -> None:
        """Completes the reduction that was sent last."""
        unit, self.sent = self.sent, None
        if unit is None:
            return
        if self.receives:
            self._receive(unit, slice(1, None))
        self.replay.drop("communication", (RECEIVED, unit.name))
        self._hold_shard(unit)
        self._free_copied()
        is_read = self.groups.on_gpu and self.tiers.medium == "host" and self.tiers.gradients
        # at most one of these is alive; on a GPU the copy to host memory may still read it
        for category, term in (("communication", OPEN), ("gradients", OPEN), ("communication", WIRE)):
            if is_read:
                self.replay.rename(category, (term, unit.name), (TO_HOST, term))
            else:
                self.replay.drop(category, (term, unit.name))
        self.replay.drop("gradients", (SUM_SO_FAR, unit.name))
        del self._in_wire_dtype[unit.name]
        self._completed.add(unit.name)

    def finish(self) -> None:
        """Completes the reduction that was sent last, and the copies to host memory."""
        self.complete()
        self._free_copied()

    def _free_copied(self) -> None:
        for category, term in (("communication", OPEN), ("gradients", OPEN), ("communication", WIRE)):
            self.replay.drop(category, (TO_HOST, term))

    def _receive(self, unit: UnitGradients, which: slice) -> None:
        own = unit.own if unit.is_owned else None
        for size in self.groups.reduction_bytes(unit.numel, unit.wire_bytes, own)[which]:
            self.replay.hold("communication", (RECEIVED, unit.name), size)

    def _hold_shard(self, unit: UnitGradients) -> None:
        if self.keeps_whole:
            return
        on_host, host = self.tiers.gradients_on_host(unit.own, unit.align), self.replay.host
        if host is not None and self.tiers.medium == "host" and (unit.name in self._completed or unit.casts):
            # it is added to, or cast into, the gradient that host memory keeps
            host.hold("gradients", "arrived", on_host * unit.wire_bytes)
            host.drop("gradients", "arrived")
        self.replay.hold("gradients", ("shard", unit.name), (unit.own - on_host) * unit.gradient_bytes)
