"""A ledger's records of a run, all in host memory, and its sums.

event       a change of one storage, or the beginning of a phase
interval    one step: the storages alive at its beginning, and its events in order
replay      sizes and categories of all storages, and the sums of each tier by category, after each event
extremes    the largest sums so far: by phase, and by name for whole intervals
history     kept for a snapshot, if requested; a *birth* is one storage on a GPU, with the address at which it was made,
            and when
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..records import BETWEEN, CATEGORIES, STATES, TIERS, LineRow, MemoryRow
from ..zero import labels


@dataclass(eq=False)
class StorageRecord:
    """One storage: category, name, size, tier. `labeled`: its category is from a label, not inferred. `source`: the
    line that made it (probes/source_lines.py). `shape`: of the tensor in which it was first seen.
    `first_name`: from its first label.
    """

    bytes: int
    category: str
    name: str
    module: str
    phase: str
    labeled: bool = False
    tier: str = labels.DEVICE
    source: str = ""
    shape: Sequence[int] = ()
    first_name: str = ""

    @property
    def shown_shape(self) -> str:
        """The shape as in the tables: "4x1024x768"; empty for a scalar and for bytes in no tensor."""
        return "x".join(map(str, self.shape))


class Event(NamedTuple):
    """A change: `stored` grew by `grown` bytes (if freed, by minus its size), or moved to another category, or a phase
    began. `source`: the line that ran, if the step is kept event by event. With a `kind` it changes nothing: a
    collective, a module, a unit, an update. `facts`: column values of its row.
    """

    phase: str
    at: float
    stored: StorageRecord | None = None
    grown: int = 0
    moved: tuple[str, str] | None = None
    source: str = ""
    kind: str = ""
    module: str = ""
    facts: Mapping[str, Any] = {}


class Instant(NamedTuple):
    """Live bytes on the device by category after event `number`, `seconds` after the interval began; `total`: their
    sum; `others`: the sums of the other tiers.
    """

    number: int
    seconds: float
    phase: str
    totals: dict[str, int]
    total: int
    others: dict[str, int]


ASIDE, SAVE = "aside", "save"
"""Phases within a step that no prediction has: the harness's own work, such as reading gradients, which is excluded
from all figures; and a save of a checkpoint, which is excluded from those of traffic.
"""

INSTANTS = 400
"""Number of instants to which an interval's timeline is reduced."""

LARGEST = 20
"""Number of storages at the peak that are listed one by one."""


@dataclass
class Extremes:
    """Largest values over an interval in one tier, in bytes; for whole intervals also the most births."""

    peak: int = -1
    at_peak: Counter[str] = field(default_factory=Counter)
    highest: Counter[str] = field(default_factory=Counter)
    states: int = -1
    at_states: Counter[str] = field(default_factory=Counter)
    alive: list[tuple[int, StorageRecord, str]] = field(default_factory=list)
    """Size, storage and category of everything alive at the peak of a whole interval, largest first."""
    alive_states: list[tuple[int, StorageRecord, str]] = field(default_factory=list)
    """The states alive when their sum is largest, in the same form."""
    made: Counter[str] | None = None
    """By category: the most allocations in one interval, and the most that outlived their phase (`lasting`)."""
    lasting: Counter[str] = field(default_factory=Counter)

    def see(self, totals: Counter[str]) -> bool:
        """Merges the totals of one instant; returns True if they are a new peak."""
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
    """Reduces a timeline to about `most` instants: each stretch's largest, and the first of each phase."""
    width = max(1, -(-len(instants) // most))
    kept = []
    for start in range(0, len(instants), width):
        stretch = instants[start : start + width]
        highest = max(stretch, key=lambda i: i.total)
        before = instants[start - 1].phase if start else ""
        for instant in stretch:
            if instant is highest or instant.phase != before:
                kept.append(instant)
            before = instant.phase
    return kept


# -- intervals -------------------------------------------------------------------------------------


ENTRIES = 200_000
"""Number of last events of an allocator's history, and of last births, that are kept; a history event takes some KB."""


@dataclass(frozen=True)
class Interval:
    """One step. `began`: its first instant, in seconds of the events' clock. `sizes`: bytes of the storages alive then.
    `categories`: the first category of each storage in the interval. `events`: its changes; `log`: with the events that
    change nothing, if they were recorded.
    """

    began: float
    sizes: dict[StorageRecord, int]
    categories: dict[StorageRecord, str]
    events: list[Event]
    log: Sequence[Event] = ()


@dataclass(frozen=True)
class Birth:
    """A storage got memory at `address` on a GPU shortly before `at`, in seconds of the events' clock."""

    address: int
    at: float
    stored: StorageRecord


@dataclass
class History:
    """On a CPU the measured step with the highest peak, the last one in a tie; on CUDA the births."""

    step: Interval | None = None
    births: deque[Birth] = field(default_factory=lambda: deque(maxlen=ENTRIES))


class IntervalReplay:
    """An interval, event by event. `totals`: live bytes by tier and category."""

    def __init__(self, interval: Interval) -> None:
        self.sizes, self.categories = dict(interval.sizes), dict(interval.categories)
        self.totals: dict[str, Counter[str]] = {tier: Counter(dict.fromkeys(CATEGORIES, 0)) for tier in TIERS}
        for stored, size in self.sizes.items():
            self.totals[stored.tier][self.categories[stored]] += size

    def now(self, stored: StorageRecord) -> tuple[int, str]:
        """Returns a storage's size and category after the events so far."""
        return self.sizes.get(stored, 0), self.categories[stored]

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
    alive = [stored for stored, size in replay.sizes.items() if size and stored.tier == labels.DEVICE]
    alive.sort(key=lambda stored: -replay.sizes[stored])
    return [(replay.sizes[stored], stored, replay.categories[stored]) for stored in alive]


class IntervalSums:
    """Extremes of the device by phase and of other tiers by (tier, phase), and the last interval's timeline."""

    def __init__(self) -> None:
        self.extremes: dict[str, Extremes] = {}
        self.elsewhere: dict[tuple[str, str], Extremes] = {}
        self.in_memory: Counter[str] = Counter()
        """The peak of device and host memory together, by phase: on a CPU one allocator manages both."""
        self.timeline: list[Instant] = []

    def add(self, whole: str, interval: Interval) -> int:
        """Adds an interval to the extremes of each phase and of `whole`. Returns its own peak, or -1."""
        replay, instants = IntervalReplay(interval), list[Instant]()
        made, lasting = Counter[str](), Counter[str]()  # allocations by category, and those that outlive their phase
        born: dict[StorageRecord, tuple[str, str]] = {}  # storages of this interval, with phase and category at birth
        on_device, best_at, states_at, phase = replay.totals[labels.DEVICE], -1, -1, ""
        best = self.extremes.setdefault(whole, Extremes())
        self._see_elsewhere(replay, whole, whole)
        for number, event in enumerate(interval.events):
            replay.take(event)
            if event.phase == ASIDE:
                continue
            if event.grown and event.stored is not None and event.stored.tier == labels.DEVICE:
                if event.grown > 0:
                    born[event.stored] = event.phase, replay.categories[event.stored]
                    made[replay.categories[event.stored]] += 1
                elif event.stored in born:
                    birth_phase, category = born.pop(event.stored)
                    lasting[category] += birth_phase != event.phase
            if event.grown >= 0 or event.phase != phase:  # what shrinks within a phase sets no record
                self.extremes.setdefault(event.phase, Extremes()).see(on_device)
                if event.stored is None or event.stored.tier != labels.DEVICE:
                    self._see_elsewhere(replay, event.phase, whole)
                before = best.states
                best_at = number if best.see(on_device) else best_at
                states_at = number if best.states > before else states_at
            total, others = sum(on_device.values()), {tier: sum(replay.totals[tier].values()) for tier in TIERS[1:]}
            for name in (event.phase, whole):
                self.in_memory[name] = max(self.in_memory[name], total + others[labels.HOST])
            instants.append(Instant(number, event.at - interval.began, event.phase, dict(on_device), total, others))
            phase = event.phase
        if whole == "step":
            self.extremes.setdefault(BETWEEN, Extremes()).see(on_device)
        lasting.update(category for _, category in born.values())
        best.made, best.lasting = (best.made or Counter()) | made, best.lasting | lasting
        if best_at >= 0:
            best.alive = alive_after(interval, best_at)
        if states_at >= 0:
            alive = alive_after(interval, states_at)
            best.alive_states = [(size, stored, category) for size, stored, category in alive if category in STATES]
        self.timeline = thin_out(instants, INSTANTS)
        return max((instant.total for instant in instants), default=-1)

    def _see_elsewhere(self, replay: IntervalReplay, *names: str) -> None:
        for tier in TIERS[1:]:
            if replay.totals[tier].total():
                for name in names:
                    self.elsewhere.setdefault((tier, name), Extremes()).see(replay.totals[tier])


# -- rows ------------------------------------------------------------------------------------------


def extremes_rows(rank: int, phase: str, extremes: Extremes) -> Iterator[MemoryRow]:
    """Yields a phase's rows: one per category, then the states and the total."""
    at_peak, at_states, highest, made = extremes.at_peak, extremes.at_states, extremes.highest, extremes.made
    for category in CATEGORIES:
        row = MemoryRow(rank, phase, category, at_peak[category], at_states[category], highest[category])
        if made is not None:
            row.allocations, row.lasting = made[category], extremes.lasting[category]
        yield row
    states = sum(at_peak[category] for category in STATES)
    yield MemoryRow(rank, phase, "states", states, extremes.states, extremes.states)
    yield MemoryRow(rank, phase, "total", extremes.peak, sum(at_states.values()), extremes.peak)


def rows_by_line(
    rank: int, at: str, storages: Iterable[tuple[int, StorageRecord, str]],
    keepers: Mapping[StorageRecord, str] | None = None,
) -> Iterator[LineRow]:  # fmt: skip
    """Yields a row per line of code, module and category, the largest first; `storages`: size, storage, category.
    `keepers`: the objects that keep storages alive. Storages that no module made have a row per label: parameters would
    otherwise be one row, with the first one's name.
    """
    groups: dict[tuple[str, str, str, str], list[tuple[int, StorageRecord]]] = {}
    for size, stored, category in storages:
        key = (category, stored.module, stored.source, "" if stored.module else stored.name)
        groups.setdefault(key, []).append((size, stored))
    sums = {key: sum(size for size, _ in group) for key, group in groups.items()}
    for key in sorted(groups, key=lambda key: (-abs(sums[key]), key)):
        if sums[key]:
            largest = max(groups[key], key=lambda row: abs(row[0]))[1]
            kept_by = keepers.get(largest, "") if keepers else ""
            yield LineRow(rank, at, *key[:3], sums[key], len(groups[key]), largest.name, largest.shown_shape, kept_by)
