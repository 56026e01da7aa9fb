"""History: what a ledger keeps of a run for a snapshot, where one is asked for; nothing of it is on the device.

interval    one step as it happened: what lived at its beginning, and its events in order
birth       one storage on a GPU, with the address at which it was made, and when

Sums of a ledger over intervals: an interval's events are replayed in order, and the largest sums are kept.

replay      sizes and categories of all storages, and the sums of each tier by category, after each event
extremes    the largest sums so far: of each phase, and of whole intervals by their name
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..records import BETWEEN, CATEGORIES, STATES, TIERS
from ..zero import labels
from .ledger_maxima import ASIDE, INSTANTS, Births, Event, Extremes, Instant, StorageRecord, thin_out

ENTRIES = 200_000
"""Events of an allocator's history, and births, that are kept, the last ones; of the history some KB each."""


@dataclass(frozen=True)
class Interval:
    """One step. `began`: its first instant, in seconds of the clock of events. `sizes`: bytes of what lived then.
    `categories`: the first of each storage of the interval.
    """

    began: float
    sizes: dict[StorageRecord, int]
    categories: dict[StorageRecord, str]
    events: list[Event]


class Listener(Protocol):
    """Listener to a ledger's intervals as they happen (event_log.py)."""

    def begin(self) -> None:
        """Takes note that an interval begins."""

    def changed(self) -> None:
        """Takes note that the next event changes a storage's size."""

    def marked(self, operator: str, args: Sequence[object]) -> None:
        """Takes an operator of torch's profiler."""

    def end(self, interval: Interval) -> None:
        """Takes an interval that is over."""


@dataclass(frozen=True)
class Birth:
    """A storage got memory at `address` on a GPU shortly before `at`, in seconds of the clock of events."""

    address: int
    at: float
    stored: StorageRecord


@dataclass
class History:
    """On a CPU the measured step with the highest peak, of equal ones the last; on CUDA the births."""

    step: Interval | None = None
    births: deque[Birth] = field(default_factory=lambda: deque(maxlen=ENTRIES))


class IntervalReplay:
    """An interval, event by event. `totals`: live bytes by tier and category."""

    def __init__(self, interval: Interval) -> None:
        self.sizes, self.categories = dict(interval.sizes), dict(interval.categories)
        self.totals: dict[str, Counter[str]] = {tier: Counter(dict.fromkeys(CATEGORIES, 0)) for tier in TIERS}
        for stored, size in self.sizes.items():
            self.totals[stored.tier][self.categories[stored]] += size

    def take(self, event: Event) -> None:
        """Applies the next event."""
        stored = event.stored
        if stored is None:
            return
        tier, size = self.totals[stored.tier], self.sizes.get(stored, 0)
        if event.moved is not None:
            old, new = event.moved
            tier[old] -= size
            tier[new] += size
            self.categories[stored] = new
        else:
            tier[self.categories[stored]] += event.grown
            self.sizes[stored] = size + event.grown


def alive_after(interval: Interval, last: int) -> list[tuple[int, StorageRecord, str]]:
    """Returns the device's storages alive after event number `last`, with their categories then, largest first."""
    replay = IntervalReplay(interval)
    for event in interval.events[: last + 1]:
        replay.take(event)
    here = [(size, stored) for stored, size in replay.sizes.items() if size and stored.tier == labels.DEVICE]
    return sorted(((size, stored, replay.categories[stored]) for size, stored in here), key=lambda one: -one[0])


class IntervalSums:
    """The extremes of the device by phase, those of other tiers by (tier, phase), and the last interval's timeline."""

    def __init__(self) -> None:
        self.extremes: dict[str, Extremes] = {}
        self.elsewhere: dict[tuple[str, str], Extremes] = {}
        self.in_memory: Counter[str] = Counter()
        """The peak of device and host memory together, by phase: on a CPU one allocator has both."""
        self.timeline: list[Instant] = []

    def add(self, whole: str, interval: Interval) -> int:
        """Adds an interval to the extremes of each phase and of `whole`. Returns its own peak, -1 without any."""
        replay, births, instants = IntervalReplay(interval), Births(), list[Instant]()
        on_device, best_at, states_at = replay.totals[labels.DEVICE], -1, -1
        best = self.extremes.setdefault(whole, Extremes())
        self._see_elsewhere(replay, whole, whole)
        for number, event in enumerate(interval.events):
            replay.take(event)
            if event.phase == ASIDE:
                continue
            if event.grown and event.stored is not None and event.stored.tier == labels.DEVICE:
                births.see(event.stored, event.grown, event.phase, replay.categories[event.stored])
            self.extremes.setdefault(event.phase, Extremes()).see(on_device)
            if event.stored is None or event.stored.tier != labels.DEVICE:
                self._see_elsewhere(replay, event.phase, whole)
            before = best.states
            best_at = number if best.see(on_device) else best_at
            states_at = number if best.states > before else states_at
            instants.append(self._instant(number, event, interval.began, replay, whole))
        if whole == "step":
            self.extremes.setdefault(BETWEEN, Extremes()).see(on_device)
        best.see_births(births.end())
        if best_at >= 0:
            best.alive = alive_after(interval, best_at)
        if states_at >= 0:
            best.alive_states = [one for one in alive_after(interval, states_at) if one[2] in STATES]
        self.timeline = thin_out(instants, INSTANTS)
        return max((instant.totals.total() for instant in instants), default=-1)

    def _instant(self, number: int, event: Event, began: float, replay: IntervalReplay, whole: str) -> Instant:
        """Returns the instant after an event, and takes the sum of device and host memory into account."""
        on_device = replay.totals[labels.DEVICE]
        others = {tier: replay.totals[tier].total() for tier in TIERS[1:]}
        together = on_device.total() + others[labels.HOST]
        for name in (event.phase, whole):
            self.in_memory[name] = max(self.in_memory[name], together)
        return Instant(number, event.at - began, event.phase, on_device.copy(), others)

    def _see_elsewhere(self, replay: IntervalReplay, *names: str) -> None:
        for tier in TIERS[1:]:
            if replay.totals[tier].total():
                for name in names:
                    self.elsewhere.setdefault((tier, name), Extremes()).see(replay.totals[tier])
