"""Lines of code and the bytes they allocated, as tables in a budget, and the lines that changed between measurements.

line     storages of one category that one line of code made in one module, on one rank
table    the lines alive at the peak, or those that have grown over the measured steps
folded   a row that represents equal modules, "blocks.0–4.mlp_in", so that a deep model's table is short;
         without a module labels are folded, "blocks.0–4.mlp_in.weight"
rest     the sum of the lines that a short table does not list

The number of a line changes with every edit above it, so lines are matched by category, module, function and label, and
within a function by number, shifted like most lines of the file, then by order. The differences of all changed lines
add up to the difference of the two tables.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from ..records import CATEGORIES, STATES
from ..sizes import show_bytes

MOST = 40
"""Most rows of a table in a budget."""

AT = ("peak", "growth")
"""The tables of a run."""

REST = "all other lines"

_SOURCE = re.compile(r"(?P<backward>backward of )?(?P<file>.+):(?P<number>\d{1,9}) in (?P<function>.+)", re.DOTALL)
_RANGE = re.compile(r"(\d{1,6})–(\d{1,6})")


@dataclass(frozen=True, order=True)
class Line:
    """Storages of one line: like records.LineRow, without its rank."""

    category: str
    module: str
    source: str
    bytes: int
    storages: int
    name: str = ""

    @property
    def path(self) -> str:
        """The module, or the label of storages that no module made, such as a parameter's name."""
        return self.module or self.name

    @property
    def function(self) -> tuple[str, str, str]:
        """The line without its number: "backward of " or empty, file, function."""
        found = _SOURCE.fullmatch(self.source)
        return (found["backward"] or "", found["file"], found["function"]) if found else ("", "", self.source)

    @property
    def number(self) -> int:
        """The line's number in its file; 0 if there is none."""
        found = _SOURCE.fullmatch(self.source)
        return int(found["number"]) if found else 0


@dataclass(frozen=True)
class LineTable:
    """Lines, the largest first. `rest`: bytes of the unlisted lines, none of which is above `rest_most`."""

    lines: tuple[Line, ...] = ()
    rest: int = 0
    rest_most: int = 0

    @property
    def bytes(self) -> int:
        """The sum over all lines."""
        return sum(one.bytes for one in self.lines) + self.rest


Lines = dict[str, LineTable]
"""The tables of a cell: "peak" or "growth" -> table."""


def lines_of(lines: pd.DataFrame) -> Lines:
    """Returns the tables of one cell, each from the run and rank with the most bytes; `lines`: of its runs."""
    found: Lines = {}
    for at in AT:
        mine = lines[lines["at"] == at]
        if not mine.empty:
            sums = mine.groupby(["run_id", "rank"], sort=True)["bytes"].sum()
            run_id, rank = sums.index[int(sums.to_numpy().argmax())]
            mine = mine[(mine["run_id"] == run_id) & (mine["rank"] == rank)]
        found[at] = LineTable(_ordered(map(_line, mine.itertuples())))
    return found if len(lines) else {}


class LinesOfRuns:
    """The lines of many runs, indexed by run."""

    def __init__(self, lines: pd.DataFrame) -> None:
        self._lines, self._rows = lines, lines.groupby("run_id", sort=False).indices

    def of(self, run_ids: Iterable[str]) -> Lines:
        """Returns the tables of the runs of one cell."""
        rows = [row for one in run_ids for row in self._rows.get(one, ())]
        return lines_of(self._lines.iloc[rows])


def _line(row: Any) -> Line:
    return Line(row.category, row.module or "", row.source or "", int(row.bytes), int(row.storages), row.name or "")


def _ordered(lines: Iterable[Line]) -> tuple[Line, ...]:
    return tuple(sorted(lines, key=lambda one: (-abs(one.bytes), one)))


def shortened(table: LineTable, most: int = MOST) -> LineTable:
    """Returns the table with its largest rows, folded ones counting as one, and all others in its rest."""
    rows = fold(table.lines)
    kept, left = rows[:most], rows[most:]
    rest_most = max([table.rest_most, *(abs(one.bytes) for one in left)])
    return LineTable(_ordered(unfold(kept)), table.rest + sum(one.bytes for one in left), rest_most)


# -- folding -------------------------------------------------------------------------------------------


def fold(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Merges lines whose paths differ only in one number, as do their labels if they begin with the same path."""
    folded, depth = list(lines), 0
    while depth <= max((one.path.count(".") for one in folded), default=-1):
        groups: dict[tuple[Any, ...], dict[int, Line]] = {}
        doubles = []
        for one in folded:
            number = _number_at(one.path, depth)
            key = (one.category, one.source, one.bytes, one.storages, *_named(one, depth, None if number < 0 else "*"))
            if groups.setdefault(key, {}).setdefault(number, one) is not one:
                doubles.append(one)
        folded = [*doubles, *(row for mine in groups.values() for row in _fold_group(mine, depth))]
        depth += 1
    return _ordered(folded)


def _number_at(path: str, depth: int) -> int:
    """Returns the number at this depth of a path; -1 if that part is not a number."""
    part = [*path.split("."), *[""] * depth][depth]
    return int(part) if re.fullmatch(r"0|[1-9][0-9]{0,5}", part) else -1


def _named(one: Line, depth: int, part: str | None) -> tuple[str, str]:
    """Returns module and label with this part replaced at this depth, in the label if it begins like the module."""
    module, name = one.module.split("."), one.name.split(".")
    alike = not one.module or name[: depth + 1] == module[: depth + 1]
    for words in [module] * bool(one.module) + [name] * alike:
        if part is not None:
            words[depth] = part
    return ".".join(module), ".".join(name)


def _fold_group(mine: dict[int, Line], depth: int) -> list[Line]:
    """Returns a row per range of consecutive numbers."""
    rows: list[Line] = []
    for first, last in _stretches(sorted(mine)):
        one, count = mine[first], last - first + 1
        module, name = _named(one, depth, None if count == 1 else f"{first}–{last}")
        rows.append(replace(one, module=module, name=name, bytes=one.bytes * count, storages=one.storages * count))
    return rows


def _stretches(numbers: Sequence[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][0] >= 0 and found[-1][1] == number - 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found


def unfold(lines: Iterable[Line], most: int = 100_000) -> tuple[Line, ...]:
    """Undoes `fold`. Raises ValueError for a row whose bytes its modules do not divide, or with too many modules."""
    found = list(lines)
    for depth in range(max((one.path.count(".") for one in found), default=-1) + 1):
        rows: list[Line] = []
        for one in found:
            rows += _unfold_one(one, depth, most)
            if len(rows) > most:
                raise ValueError(f"these lines name more than {most:,} modules")
        found = rows
    return _ordered(found)


def _unfold_one(one: Line, depth: int, most: int) -> list[Line]:
    parts = one.path.split(".")
    found = _RANGE.fullmatch(parts[depth]) if depth < len(parts) else None
    if found is None:
        return [one]
    first, last = int(found[1]), int(found[2])
    count = last - first + 1
    if not 1 <= count <= most:
        raise ValueError(f"{one.path:.80} is no range of modules, as blocks.0–4 is")
    if one.bytes % count or one.storages % count:
        raise ValueError(f"{one.path:.80} is {count} modules, which do not divide {one.bytes} bytes equally")
    each = replace(one, bytes=one.bytes // count, storages=one.storages // count)
    names = [_named(one, depth, str(number)) for number in range(first, last + 1)]
    return [replace(each, module=module, name=name) for module, name in names]


def folded_names(modules: Iterable[str]) -> str:
    """Returns the names of modules in short form: "blocks.0–4.mlp_in"."""
    rows = fold([Line("", module, "", 1, 1) for module in dict.fromkeys(modules) if module])
    return " and ".join(sorted(one.module for one in rows))


# -- in a budget file ----------------------------------------------------------------------------------


def plain(lines: Lines) -> dict[str, list[list[Any]]]:
    """Returns the tables in a budget file's format: rows of bytes, storages, category, module, line and label."""
    shown: dict[str, list[list[Any]]] = {}
    for at, table in lines.items():
        short = shortened(table)
        rows = [[one.bytes, one.storages, one.category, one.module, one.source, one.name] for one in fold(short.lines)]
        shown[at] = rows + [[short.rest, short.rest_most, REST]] * bool(short.rest or short.rest_most)
    return shown


def parse_lines(content: Any) -> Lines:
    """Parses the output of `plain`. Raises ValueError."""
    found: Lines = {}
    if not isinstance(content, dict) or not set(content) <= set(AT):
        raise ValueError(f"lines is {content!r:.80}; it is a mapping with peak and growth")
    for at, rows in content.items():
        if not isinstance(rows, list):
            raise ValueError(f"lines: {at} is {rows!r:.80}; it is a list")
        listed, rest = [], (0, 0)
        for row in rows:
            if _is_row(row, (int, int, str)) and row[2] == REST:
                rest = row[0], row[1]
            elif _is_row(row, (int, int, str, str, str, str)):
                listed.append(Line(row[2], row[3], row[4], row[0], row[1], row[5]))
            else:
                words = "a row is bytes, storages, category, module, line and label"
                raise ValueError(f"lines: {at} has {row!r:.80}; {words}")
        found[at] = LineTable(unfold(listed), *rest)
    return found


def _is_row(row: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(row, list) and [type(value) for value in row] == list(kinds)


NO_LINE = "no line of Python"

SHARE = 0.05
"""Fraction of a metric's difference that a line must explain to be named."""

Key = Callable[[Line], Any]

KEYS: tuple[tuple[Key, bool], ...] = (
    (lambda one: (one.category, one.module, one.function, one.name), False),
    (lambda one: (one.category, one.module, one.function), False),
    (lambda one: (one.category, one.module, one.function[0], one.function[2]), True),
)
"""Keys by which lines are matched, the strictest first, and True if each side's lines must be from one file: a label
may change, and a function may move to another file, or its file be named relative to another folder."""


@dataclass(frozen=True)
class Place:
    """A line of a file, with a message on it. `file` is empty and `line` 0 if no line of Python is known."""

    file: str
    line: int
    sentence: str


@dataclass(frozen=True)
class MovedLine:
    """A line whose bytes differ, `before` and `after`, summed over the paths at which they do. `paths`: those with a
    considerable part of the difference. `source`: the line as it is now, or as it was if it is gone. `is_rest`: stands
    for the lines that a short table does not list.
    """

    category: str
    paths: tuple[str, ...]
    source: str
    before: int
    after: int
    name: str = ""
    is_rest: bool = False

    @property
    def difference(self) -> int:
        """Additional bytes compared with before."""
        return self.after - self.before

    @property
    def about(self) -> str:
        """Paths and label, or else the category; for the rest its largest line."""
        if self.is_rest:
            return f"the largest: {self.source}" if self.source else ""
        return ", ".join(part for part in (folded_names(self.paths), self.name) if part) or self.category

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
        """The line in its file, with its message."""
        return place_of(self.source, self.words)


def place_of(source: str, sentence: str) -> Place:
    """Returns the place that a line of the tables refers to."""
    one = Line("", "", source, 0, 0)
    return Place(one.function[1], one.number, sentence)


def moved_lines(before: LineTable, after: LineTable) -> list[MovedLine]:
    """Returns the lines whose bytes differ, the largest difference first; their differences add up to the tables'."""
    ours, theirs = list(before.lines), list(after.lines)
    pairs: list[tuple[Line | None, Line | None]] = []
    shifts = _shifts(ours, theirs)
    for key, of_one_file in KEYS:
        found = _match(ours, theirs, key, of_one_file, shifts)
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


def _shifts(ours: list[Line], theirs: list[Line]) -> dict[str, int]:
    """Returns file -> the number of lines by which its code has moved down, by majority of the lines unique on both
    sides.
    """
    numbers: dict[Any, tuple[list[int], list[int]]] = {}
    for side, lines in enumerate((ours, theirs)):
        for one in lines:
            key = (one.function, one.category, one.module, one.name, one.bytes)
            numbers.setdefault(key, ([], []))[side].append(one.number)
    counts: dict[str, Counter[int]] = {}
    for ((_, file, _), *_), (before, after) in numbers.items():
        if len(before) == len(after) == 1:
            counts.setdefault(file, Counter())[after[0] - before[0]] += 1
    return {file: min(mine, key=lambda by: (-mine[by], abs(by))) for file, mine in counts.items()}


def _match(
    ours: list[Line], theirs: list[Line], key: Key, of_one_file: bool, shifts: dict[str, int]
) -> list[tuple[Line, Line]]:
    groups: dict[Any, tuple[list[Line], list[Line]]] = {}
    for number, side in enumerate((ours, theirs)):
        for one in side:
            groups.setdefault(key(one), ([], []))[number].append(one)
    pairs: list[tuple[Line, Line]] = []
    for a, b in groups.values():
        if not of_one_file or len({one.function for one in a}) == len({one.function for one in b}) == 1:
            pairs += _in_order(a, b, shifts)
    return pairs


def _in_order(ours: list[Line], theirs: list[Line], shifts: dict[str, int]) -> list[tuple[Line, Line]]:
    """Pairs lines of one function: equal ones first, then those of equal size, then those with the same number, then by
    order.
    """
    likes: tuple[Callable[[int, int], Any], ...] = (
        lambda number, size: (number, size), lambda _, size: size, lambda number, _: number, lambda *_: 0,
    )  # fmt: skip
    ours, theirs = (sorted(side, key=lambda one: one.number) for side in (ours, theirs))
    pairs = []
    for like in likes:
        for one in list(ours):
            wanted = like(one.number + shifts.get(one.function[1], 0), one.bytes)
            other = next((other for other in theirs if like(other.number, other.bytes) == wanted), None)
            if other is not None:
                pairs.append((one, other))
                ours.remove(one)
                theirs.remove(other)
    return pairs


def _without(lines: list[Line], taken: list[Line]) -> list[Line]:
    gone = {id(one) for one in taken}
    return [one for one in lines if id(one) not in gone]


def _apart_from_rest(lines: list[Line], other: LineTable) -> tuple[list[Line], list[Line]]:
    """Splits lines that `other` does not list: those too large for its rest, and those that may be in it."""
    small = set(unfold(row for row in fold(lines) if abs(row.bytes) <= other.rest_most))
    return [one for one in lines if one not in small], [one for one in lines if one in small]


def _by_line(pairs: list[tuple[Line | None, Line | None]]) -> list[MovedLine]:
    """Merges pairs of the same line over the paths at which it changed."""
    found: dict[tuple[str, str, str, bool, bool], list[tuple[str, int, int]]] = {}
    for one, other in pairs:
        now = other or one
        before, after = (side.bytes if side else 0 for side in (one, other))
        if now is not None and before != after:
            key = (now.category, now.source, now.name if now.module else "", after > before, other is None)
            found.setdefault(key, []).append((now.path, before, after))
    moved = []
    for (category, source, name, *_), mine in found.items():
        least = SHARE * max(abs(after - before) for _, before, after in mine)
        paths = tuple(path for path, before, after in mine if abs(after - before) >= least)
        sums = (sum(before for _, before, _ in mine), sum(after for *_, after in mine))
        moved.append(MovedLine(category, paths, source, *sums, name))
    return moved


# -- of a metric ---------------------------------------------------------------------------------------


def categories_of(metric: str) -> tuple[str, tuple[str, ...]] | None:
    """Returns the table, "peak" or "growth", and the categories whose lines explain a metric; None if none do."""
    if metric == "growth_bytes":
        return "growth", CATEGORIES
    if metric in ("peak_bytes", "allocator_peak_bytes", "timed_allocator_peak_bytes"):
        return "peak", CATEGORIES
    if metric == "states_bytes":
        return "peak", STATES
    category = metric.removeprefix("max_").removesuffix("_bytes")
    return ("peak", (category,)) if metric == f"max_{category}_bytes" and category in CATEGORIES else None


def lines_behind(metric: str, by: float, before: Lines, after: Lines, most: int = 3) -> list[MovedLine]:
    """Returns the lines that explain a metric's difference of `by` bytes: those with a considerable change in the same
    direction, the largest first.
    """
    where = categories_of(metric)
    if where is None or where[0] not in before or where[0] not in after or not by:
        return []
    at, categories = where
    moved = moved_lines(before[at], after[at])
    alike = [one for one in moved if (one.difference > 0) == (by > 0) and (one.category in categories or one.is_rest)]
    return [one for one in alike if abs(one.difference) >= SHARE * abs(by)][:most]


def largest_lines(metric: str, lines: Lines, categories: Collection[str] = (), most: int = 3) -> list[Place]:
    """Returns the lines with the most bytes of a metric, or of these of its categories, for a limit without an earlier
    measurement.
    """
    where = categories_of(metric)
    if where is None or where[0] not in lines:
        return []
    moved = [one for one in moved_lines(LineTable(), lines[where[0]]) if one.category in (categories or where[1])]
    return [replace(one.place, sentence=one.words.replace(": +", ": ", 1)) for one in moved[:most]]
