"""What a ledger adds up: storages, instants, and the largest values over a stretch of time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..records import CATEGORIES, STATES, MemoryRow
from ..zero import labels


@dataclass(eq=False)
class StorageRecord:
    """One storage: what it is, how large, in which tier. `labeled`: somebody said so, it is not inferred."""

    bytes: int
    category: str
    name: str
    module: str
    phase: str
    labeled: bool = False
    tier: str = labels.DEVICE


@dataclass(frozen=True)
class Event:
    """`stored` grew by `grown` bytes (freed: by minus its size), or moved to another category, or a phase began."""

    phase: str
    at: float
    stored: StorageRecord | None = None
    grown: int = 0
    moved: tuple[str, str] | None = None


@dataclass(frozen=True)
class Instant:
    """Live bytes on the device by category after event `number`, `seconds` after the stretch began; `others`: the sums
    of the other tiers.
    """

    number: int
    seconds: float
    phase: str
    totals: Counter[str]
    others: dict[str, int]


ASIDE = "aside"
"""The phase of what the harness itself does within a step, its look at the gradients: no part of any figure."""

INSTANTS = 400
"""What a stretch's timeline is thinned out to."""


class Births:
    """How often memory is asked for in one stretch, by category: `made` all told, `lasting` what outlives its phase."""

    def __init__(self) -> None:
        self.made: Counter[str] = Counter()
        self.lasting: Counter[str] = Counter()
        self._alive: dict[
            StorageRecord, tuple[str, str]
        ] = {}  # those of this stretch, with phase and category at birth

    def see(self, stored: StorageRecord, grown: int, phase: str, category: str) -> None:
        """A storage has grown, or has gone where `grown` is below 0."""
        if grown > 0:
            self.made[category] += 1
            self._alive[stored] = phase, category
        elif stored in self._alive:
            born_in, as_what = self._alive.pop(stored)
            self.lasting[as_what] += born_in != phase

    def end(self) -> Births:
        """The stretch is over: what is alive now has outlived it."""
        for _, category in self._alive.values():
            self.lasting[category] += 1
        return self


@dataclass
class Extremes:
    """Largest values over a stretch of time in one tier, in bytes; of whole stretches the most births."""

    peak: int = -1
    at_peak: Counter[str] = field(default_factory=Counter)
    highest: Counter[str] = field(default_factory=Counter)
    states: int = -1
    at_states: Counter[str] = field(default_factory=Counter)
    largest: list[tuple[int, StorageRecord, str]] = field(default_factory=list)
    made: Counter[str] | None = None
    lasting: Counter[str] = field(default_factory=Counter)

    def see_births(self, births: Births) -> None:
        """Takes in those of one stretch."""
        self.made, self.lasting = (self.made or Counter()) | births.made, self.lasting | births.lasting

    def see(self, totals: Counter[str]) -> bool:
        """Takes in the totals of one instant; True if they are a new peak."""
        for category, value in totals.items():
            if value > self.highest[category]:
                self.highest[category] = value
        states = sum(totals[category] for category in STATES)
        if states > self.states:
            self.states, self.at_states = states, Counter(totals)
        total = sum(totals.values())
        if total <= self.peak:
            return False
        self.peak, self.at_peak = total, Counter(totals)
        return True


def thin_out(instants: list[Instant], most: int) -> list[Instant]:
    """About `most` of them: of each stretch the one with the largest sum, and the first of each phase."""
    width = max(1, -(-len(instants) // most))
    kept = []
    for start in range(0, len(instants), width):
        stretch = instants[start : start + width]
        highest = max(stretch, key=lambda i: sum(i.totals.values()))
        before = instants[start - 1].phase if start else ""
        kept += [i for i, last in zip(stretch, [before, *(i.phase for i in stretch)], strict=False)
                 if i is highest or i.phase != last]  # fmt: skip
    return kept


def extremes_rows(rank: int, phase: str, extremes: Extremes) -> Iterator[MemoryRow]:
    """A phase's rows: one a category, then the states and the total."""
    at_peak, at_states, highest, made = extremes.at_peak, extremes.at_states, extremes.highest, extremes.made
    for category in CATEGORIES:
        row = MemoryRow(rank, phase, category, at_peak[category], at_states[category], highest[category])
        if made is not None:
            row.allocations, row.lasting = made[category], extremes.lasting[category]
        yield row
    states = sum(at_peak[category] for category in STATES)
    yield MemoryRow(rank, phase, "states", states, extremes.states, extremes.states)
    yield MemoryRow(rank, phase, "total", extremes.peak, sum(at_states.values()), extremes.peak)
