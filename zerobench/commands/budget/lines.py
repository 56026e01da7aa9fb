"""Lines of code that have moved between two measurements: bytes of a line before, and now.

A line's number changes with every edit above it, so lines are matched by category, module, function and label, and
inside of a function by their order. The differences of all moved lines add up to that of the two tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ...records import CATEGORIES, STATES
from ...sizes import show_bytes
from .line_table import REST, Line, Lines, LineTable, fold, folded_names, unfold

NO_LINE = "no line of Python"

SHARE = 0.05
"""Part of a metric's difference that a line must explain to be named."""

Key = Callable[[Line], Any]

KEYS: tuple[tuple[Key, bool], ...] = (
    (lambda one: (one.category, one.module, one.function, one.name), False),
    (lambda one: (one.category, one.module, one.function), False),
    (lambda one: (one.category, one.module, one.function[0], one.function[2]), True),
)
"""By what lines are matched, the strictest first, and True where each side's must be of one file: a label may change,
and a function may move to another file, or its file be named from another folder."""


@dataclass(frozen=True)
class Place:
    """A line of a file, with a sentence on it. `file` is empty and `line` 0 where no line of Python is known."""

    file: str
    line: int
    sentence: str


@dataclass(frozen=True)
class MovedLine:
    """A line whose bytes differ, `before` and `after`, over those `modules` in which they do. Its `source` is the line
    as it is now, or as it was where it is gone. `is_rest`: the lines that a short table does not list.
    """

    category: str
    modules: tuple[str, ...]
    source: str
    before: int
    after: int
    name: str = ""
    is_rest: bool = False

    @property
    def difference(self) -> int:
        """Bytes more than before."""
        return self.after - self.before

    @property
    def about(self) -> str:
        """Modules and label, or the category; of the rest its largest line."""
        if self.is_rest:
            return f"the largest: {self.source}" if self.source else ""
        return ", ".join(part for part in (folded_names(self.modules), self.name) if part) or self.category

    @property
    def line(self) -> str:
        """The line: "model.py:31 in forward"."""
        return REST if self.is_rest else self.source or NO_LINE

    @property
    def words(self) -> str:
        """The line and its difference: "model.py:31 in forward: +12.0 MiB (blocks.3, logits)"."""
        signed = f"{'+' if self.difference > 0 else '−'}{show_bytes(abs(self.difference))}"
        return f"{self.line}: {signed}" + (f" ({self.about})" if self.about else "")

    @property
    def place(self) -> Place:
        """The line in its file, and its words."""
        return place_of(self.source, self.words)


def place_of(source: str, sentence: str) -> Place:
    """Returns the place that a line of the tables names."""
    one = Line("", "", source, 0, 0)
    return Place(one.function[1], one.number, sentence)


def moved_lines(before: LineTable, after: LineTable) -> list[MovedLine]:
    """Returns the lines whose bytes differ, the largest difference first; their differences add up to the tables'."""
    ours, theirs = list(before.lines), list(after.lines)
    pairs: list[tuple[Line | None, Line | None]] = []
    for key, of_one_file in KEYS:
        found = _match(ours, theirs, key, of_one_file)
        pairs += found
        ours = _without(ours, [one for one, _ in found])
        theirs = _without(theirs, [other for _, other in found])
    new, absorbed = _apart_from_rest(theirs, before)
    gone, forgotten = _apart_from_rest(ours, after)
    moved = _by_line([*pairs, *((one, None) for one in gone), *((None, one) for one in new)])
    was, now = before.rest + sum(one.bytes for one in forgotten), after.rest + sum(one.bytes for one in absorbed)
    if was != now:
        largest = max([*absorbed, *forgotten], key=lambda one: abs(one.bytes), default=None)
        moved.append(MovedLine("", (), largest.source if largest else "", was, now, is_rest=True))
    return sorted(moved, key=lambda one: (-abs(one.difference), one.source, one.category))


def _match(ours: list[Line], theirs: list[Line], key: Key, of_one_file: bool) -> list[tuple[Line, Line]]:
    groups: dict[Any, tuple[list[Line], list[Line]]] = {}
    for number, side in enumerate((ours, theirs)):
        for one in side:
            groups.setdefault(key(one), ([], []))[number].append(one)
    pairs: list[tuple[Line, Line]] = []
    for a, b in groups.values():
        if not of_one_file or len({one.function for one in a}) == len({one.function for one in b}) == 1:
            pairs += _in_order(a, b)
    return pairs


def _in_order(ours: list[Line], theirs: list[Line]) -> list[tuple[Line, Line]]:
    """Pairs lines of one function: equal ones first, then those of the same number, then by their order."""
    likes: tuple[Key, ...] = (
        lambda one: (one.number, one.bytes), lambda one: one.bytes, lambda one: one.number, lambda _: 0,
    )  # fmt: skip
    ours, theirs = (sorted(side, key=lambda one: one.number) for side in (ours, theirs))
    pairs = []
    for like in likes:
        for one in list(ours):
            other = next((other for other in theirs if like(other) == like(one)), None)
            if other is not None:
                pairs.append((one, other))
                ours.remove(one)
                theirs.remove(other)
    return pairs


def _without(lines: list[Line], taken: list[Line]) -> list[Line]:
    gone = {id(one) for one in taken}
    return [one for one in lines if id(one) not in gone]


def _apart_from_rest(lines: list[Line], other: LineTable) -> tuple[list[Line], list[Line]]:
    """Splits lines that `other` does not list: those that are too large for its rest, and those that may be in it."""
    small = set(unfold(row for row in fold(lines) if abs(row.bytes) <= other.rest_most))
    return [one for one in lines if one not in small], [one for one in lines if one in small]


def _by_line(pairs: list[tuple[Line | None, Line | None]]) -> list[MovedLine]:
    """Merges pairs of one line over the modules in which it has moved."""
    found: dict[tuple[Any, ...], MovedLine] = {}
    for one, other in pairs:
        now = other or one
        was, bytes_now = (side.bytes if side else 0 for side in (one, other))
        if now is None or was == bytes_now:
            continue
        key = (now.category, now.source, now.name, bytes_now > was, other is None)
        so_far = found.get(key, MovedLine(now.category, (), now.source, 0, 0, now.name))
        found[key] = replace(
            so_far,
            modules=(*so_far.modules, now.module),
            before=so_far.before + was,
            after=so_far.after + bytes_now,
        )
    return list(found.values())


# -- of a metric ---------------------------------------------------------------------------------------


def categories_of(metric: str) -> tuple[str, tuple[str, ...]] | None:
    """Returns the table, "peak" or "growth", and the categories whose lines explain a metric; None where none do."""
    if metric == "growth_bytes":
        return "growth", CATEGORIES
    if metric in ("peak_bytes", "allocator_peak_bytes", "timed_allocator_peak_bytes"):
        return "peak", CATEGORIES
    if metric == "states_bytes":
        return "peak", STATES
    category = metric.removeprefix("max_").removesuffix("_bytes")
    return ("peak", (category,)) if metric == f"max_{category}_bytes" and category in CATEGORIES else None


def lines_behind(metric: str, by: float, before: Lines, after: Lines, most: int = 3) -> list[MovedLine]:
    """Returns the lines that explain a metric's difference of `by` bytes: those that moved in its direction, enough to
    matter, the largest first.
    """
    where = categories_of(metric)
    if where is None or where[0] not in before or where[0] not in after or not by:
        return []
    at, categories = where
    moved = moved_lines(before[at], after[at])
    alike = [one for one in moved if (one.difference > 0) == (by > 0) and (one.category in categories or one.is_rest)]
    return [one for one in alike if abs(one.difference) >= SHARE * abs(by)][:most]


def largest_lines(metric: str, lines: Lines, most: int = 3) -> list[Place]:
    """Returns the lines that hold most of a metric's bytes, for a limit that has no measurement before."""
    where = categories_of(metric)
    if where is None or where[0] not in lines:
        return []
    nothing = LineTable()
    moved = [one for one in moved_lines(nothing, lines[where[0]]) if one.category in where[1]]
    return [replace(one.place, sentence=one.words.replace(": +", ": ", 1)) for one in moved[:most]]
