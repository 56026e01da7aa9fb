"""Lines of code and the bytes they allocated, as tables in a budget, and the lines that changed between measurements.

line     storages of one category that one line of code made in one module, on one rank
table    the lines alive at the peak, or those that have grown over the measured steps
folded   a row that represents equal modules, "blocks.0–4.mlp_in", so that a deep model's table is short;
         without a module labels are folded, "blocks.0–4.mlp_in.weight"
rest     the sum of the lines that a short table does not list

The number of a line changes with every edit above it, so lines are joined by category, module, function and label, and
within a function by bytes, then in the order of their numbers. If one of several equal lines is new, the old lines are
the ones whose numbers have moved by as much as the rest of their function. The differences of all changed lines add up
to the difference of the two tables.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pandas as pd

from ..records import CATEGORIES, STATES
from ..sizes import show_bytes

MOST = 40
"""Most rows of a table in a budget."""

MOST_MODULES = 100_000
"""Most modules that folded lines may name."""

AT = ("peak", "growth")
"""The tables of a run."""

REST = "all other lines"

_SOURCE = re.compile(r"(?P<backward>backward of )?(?P<file>.+):(?P<number>\d{1,9}) in (?P<function>.+)", re.DOTALL)
_NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")
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
    kept_by: str = field(default="", compare=False)

    @property
    def path(self) -> str:
        """The module, or the label of storages that no module made, such as a parameter's name."""
        return self.module or self.name

    @property
    def function(self) -> tuple[str, str, str]:
        """The line without its number: "backward of " or empty, file, function."""
        match = _SOURCE.fullmatch(self.source)
        return (match["backward"] or "", match["file"], match["function"]) if match else ("", "", self.source)

    @property
    def number(self) -> int:
        """The line's number in its file; 0 if there is none."""
        match = _SOURCE.fullmatch(self.source)
        return int(match["number"]) if match else 0


@dataclass(frozen=True)
class LineTable:
    """Lines, the largest first. `rest`: bytes of the unlisted lines, none of which is above `rest_most`."""

    lines: tuple[Line, ...] = ()
    rest: int = 0
    rest_most: int = 0

    @property
    def bytes(self) -> int:
        """The sum over all lines."""
        return sum(line.bytes for line in self.lines) + self.rest


Lines = dict[str, LineTable]
"""The tables of a cell: "peak" or "growth" -> table."""


def lines_by_cell(lines: pd.DataFrame, launches: pd.DataFrame) -> dict[str, Lines]:
    """Returns cell id -> the tables of its `launches`; `lines`: the table of lines of all runs."""
    with_cells = lines.merge(launches[["run_id", "cell_id"]], on="run_id")
    return {str(cell_id): line_tables(of_cell) for cell_id, of_cell in with_cells.groupby("cell_id", sort=False)}


def line_tables(lines: pd.DataFrame) -> Lines:
    """Returns the tables of one cell, each from the run and rank with the most bytes; `lines`: of its runs."""
    tables: Lines = {}
    for at in AT if len(lines) else ():
        rows = lines[lines["at"] == at]
        if not rows.empty:
            sums = rows.groupby(["run_id", "rank"], sort=True)["bytes"].sum()
            run_id, rank = sums.index[int(sums.to_numpy().argmax())]
            rows = rows[(rows["run_id"] == run_id) & (rows["rank"] == rank)]
        records: Any = rows.itertuples()
        tables[at] = LineTable(ordered(
            Line(
                row.category, row.module or "", row.source or "", int(row.bytes), int(row.storages), row.name or "",
                row.kept_by or "",
            )
            for row in records
        ))  # fmt: skip
    return tables


def ordered(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Returns the lines, the largest first."""
    return tuple(sorted(lines, key=lambda line: (-abs(line.bytes), line)))


# -- folding -------------------------------------------------------------------------------------------


def fold(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Merges lines whose paths differ only in one number, as do their labels if they begin with the same path."""
    folded, depth = list(lines), 0
    while depth <= max((line.path.count(".") for line in folded), default=-1):
        others, alike = (
            list[Line](),
            dict[Line, list[tuple[int, Line]]](),
        )  # a line with a star at this depth -> its lines
        for line in folded:
            part = line.path.split(".")[depth:][:1]
            if part and _NUMBER.fullmatch(part[0]):
                alike.setdefault(_named(line, depth, "*"), []).append((int(part[0]), line))
            else:
                others.append(line)
        folded = others
        for numbered in alike.values():
            spans: list[tuple[int, int, Line]] = []  # first number, last number, and its line: who keeps it is shown
            for number, line in sorted(numbered, key=lambda pair: pair[0]):
                if spans and spans[-1][1] == number - 1:
                    spans[-1] = spans[-1][0], number, line
                else:
                    spans.append((number, number, line))
            for first, last, line in spans:
                count = last - first + 1
                row = _named(line, depth, str(first) if count == 1 else f"{first}–{last}")
                folded.append(replace(row, bytes=line.bytes * count, storages=line.storages * count))
        depth += 1
    return ordered(folded)


def _named(line: Line, depth: int, part: str) -> Line:
    """Returns the line with this part at this depth of its module, and of its label if it begins like the module."""
    module, name = line.module.split("."), line.name.split(".")
    if not line.module or name[: depth + 1] == module[: depth + 1]:
        name[depth] = part
    if line.module:
        module[depth] = part
    return replace(line, module=".".join(module), name=".".join(name))


def unfold(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Undoes `fold`. Raises ValueError for a row whose bytes its modules do not divide, or with too many modules."""
    pending, unfolded = list(lines), list[Line]()
    while pending:
        line = pending.pop()
        spans = ((depth, _RANGE.fullmatch(part)) for depth, part in enumerate(line.path.split(".")))
        depth, span = next(((depth, span) for depth, span in spans if span), (0, None))
        if span is None:
            unfolded.append(line)
        else:
            first, last = int(span[1]), int(span[2])
            count = last - first + 1
            if not 1 <= count <= MOST_MODULES:
                raise ValueError(f"{line.path:.80} is no range of modules, as blocks.0–4 is")
            if line.bytes % count or line.storages % count:
                raise ValueError(f"{line.path:.80} is {count} modules, which do not divide {line.bytes} bytes equally")
            module = replace(line, bytes=line.bytes // count, storages=line.storages // count)
            pending += [_named(module, depth, str(number)) for number in range(first, last + 1)]
        if len(unfolded) + len(pending) > MOST_MODULES:
            raise ValueError(f"these lines name more than {MOST_MODULES:,} modules")
    return ordered(unfolded)


# -- in a budget file ----------------------------------------------------------------------------------


def plain(lines: Lines, most: int = MOST) -> dict[str, list[list[Any]]]:
    """Returns the tables in a budget file's format: rows of bytes, storages, category, module, line and label; then the
    rest, if a table has more than `most` folded rows.
    """
    shown: dict[str, list[list[Any]]] = {}
    for at, table in lines.items():
        rows = fold(table.lines)
        rest = table.rest + sum(row.bytes for row in rows[most:])
        rest_most = max([table.rest_most, *(abs(row.bytes) for row in rows[most:])])
        shown[at] = [[row.bytes, row.storages, row.category, row.module, row.source, row.name] for row in rows[:most]]
        if rest or rest_most:
            shown[at].append([rest, rest_most, REST])
    return shown


def parse_lines(content: Any) -> Lines:
    """Parses the output of `plain`. Raises ValueError."""
    if not isinstance(content, dict) or not set(content) <= set(AT):
        raise ValueError(f"lines is {content!r:.80}; it is a mapping with peak and growth")
    tables: Lines = {}
    for at, rows in content.items():
        if not isinstance(rows, list):
            raise ValueError(f"lines: {at} is {rows!r:.80}; it is a list")
        listed, rest = [], (0, 0)
        for row in rows:
            kinds = [type(value) for value in row] if isinstance(row, list) else []
            if kinds == [int, int, str] and row[2] == REST:
                rest = row[0], row[1]
            elif kinds == [int, int, str, str, str, str]:
                listed.append(Line(row[2], row[3], row[4], row[0], row[1], row[5]))
            else:
                raise ValueError(
                    f"lines: {at} has {row!r:.80}; a row is bytes, storages, category, module, line and label"
                )
        tables[at] = LineTable(unfold(listed), *rest)
    return tables


# -- changed lines -------------------------------------------------------------------------------------

NO_LINE = "no line of Python"

SHARE = 0.05
"""Fraction of a metric's difference that a line must explain to be named."""


@dataclass(frozen=True)
class CodeLine:
    """A line of a file, with a message on it. `file` is empty and `line` 0 if no line of Python is known."""

    file: str
    line: int
    sentence: str


@dataclass(frozen=True)
class MovedLine:
    """A line whose bytes differ, summed over the paths at which they do."""

    category: str
    paths: tuple[str, ...]
    """The paths with a considerable part of the difference."""
    source: str
    """The line as it is now, or as it was if it is gone."""
    before: int
    after: int
    name: str = ""
    is_rest: bool = False
    """If true, it stands for the lines that a short table does not list."""
    kept_by: str = ""

    @property
    def difference(self) -> int:
        """Additional bytes compared with before."""
        return self.after - self.before

    @property
    def about(self) -> str:
        """Paths and label, or else the category; for the rest its largest line."""
        if self.is_rest:
            return f"the largest: {self.source}" if self.source else ""
        rows = fold([Line("", path, "", 1, 1) for path in dict.fromkeys(self.paths) if path])
        modules = " and ".join(sorted(row.module for row in rows))
        return ", ".join(part for part in (modules, self.name) if part) or self.category

    @property
    def line(self) -> str:
        """The line: "model.py:31 in forward"."""
        return REST if self.is_rest else self.source or NO_LINE

    @property
    def sentence(self) -> str:
        """The line and its difference: "model.py:31 in forward: +12.0 MiB (blocks.3, logits)"."""
        signed = f"{'+' if self.difference > 0 else '−'}{show_bytes(abs(self.difference))}"
        kept = f", kept by {self.kept_by}" if self.kept_by else ""
        return f"{self.line}: {signed}" + (f" ({self.about})" if self.about else "") + kept

    @property
    def code_line(self) -> CodeLine:
        """The line in its file, with its message."""
        source = _SOURCE.fullmatch(self.source)
        return (
            CodeLine(source["file"], int(source["number"]), self.sentence) if source else CodeLine("", 0, self.sentence)
        )


KEYS: tuple[Callable[[Line], Any], ...] = (
    lambda line: (line.category, line.module, line.function, line.name),
    lambda line: (line.category, line.module, line.function),
    lambda line: (line.category, line.module, line.function[0], line.function[2]),
)
"""Keys by which lines are joined, the strictest first: a label may change, and a function may move to another file, or
its file be named relative to another folder."""

AGREE: tuple[Callable[[Line], Any], ...] = (lambda line: line.bytes, lambda _: ())
"""Lines with the same key are joined first if their bytes are equal, then regardless of their bytes."""


def moved_lines(before: LineTable, after: LineTable) -> list[MovedLine]:
    """Returns the lines whose bytes differ, the largest difference first; their differences add up to the tables'."""
    pairs, gone, new = _joined(list(before.lines), list(after.lines))
    in_rest_after, in_rest_before = _in_rest(gone, after), _in_rest(new, before)
    removed = [(line, None) for line in gone if line not in in_rest_after]
    moved = _by_line([*pairs, *removed, *((None, line) for line in new if line not in in_rest_before)])
    was = before.rest + sum(line.bytes for line in in_rest_after)
    now = after.rest + sum(line.bytes for line in in_rest_before)
    if was != now:
        largest = max([*in_rest_before, *in_rest_after], key=lambda line: abs(line.bytes), default=None)
        moved.append(MovedLine("", (), largest.source if largest else "", was, now, is_rest=True))
    return sorted(moved, key=lambda line: (-abs(line.difference), line.source, line.category))


def _joined(before: list[Line], after: list[Line]) -> tuple[list[tuple[Line, Line]], list[Line], list[Line]]:
    """Returns pairs of a line and the same line after, and the lines that are on one side only."""
    pairs = list[tuple[Line, Line]]()
    shifts: dict[Any, Counter[int]] = {}  # function or file -> how far the numbers of its paired lines have moved
    for key, agree in product(KEYS, AGREE):
        groups: dict[Any, tuple[list[Line], list[Line]]] = {}
        for side, lines in enumerate((before, after)):
            for line in _joinable(lines, key):
                groups.setdefault((key(line), agree(line)), ([], []))[side].append(line)
        # groups with equal numbers of lines first: they determine the shift of the others
        for was, now in sorted(groups.values(), key=lambda sides: len(sides[0]) != len(sides[1])):
            for line, same in _aligned(was, now, shifts):
                pairs.append((line, same))
                for scope in (line.function[1:], line.function[1]):
                    shifts.setdefault(scope, Counter())[same.number - line.number] += 1
        paired = {id(line) for pair in pairs for line in pair}
        before, after = ([line for line in side if id(line) not in paired] for side in (before, after))
    return pairs, before, after


def _aligned(was: list[Line], now: list[Line], shifts: dict[Any, Counter[int]]) -> list[tuple[Line, Line]]:
    """Pairs the lines of the shorter side in their order, each with the line nearest to its number plus the shift of
    its function, or else of its file.
    """
    if not was or not now:
        return []
    function = was[0].function
    votes = shifts.get(function[1:]) or shifts.get(function[1]) or Counter([0])
    shift = votes.most_common(1)[0][0]
    expected, numbers = [line.number + shift for line in was], [line.number for line in now]
    if len(was) > len(now):
        return [(was[index], line) for index, line in zip(_nearest(numbers, expected), now, strict=True)]
    return [(line, now[index]) for index, line in zip(_nearest(expected, numbers), was, strict=True)]


def _nearest(few: list[int], many: list[int]) -> list[int]:
    """Returns for each of `few` the index of its nearest number in `many`, in order and each index once."""
    indices: list[int] = []
    for left, number in zip(range(len(few), 0, -1), few, strict=True):
        first, last = indices[-1] + 1 if indices else 0, len(many) - left
        index = min(bisect_left(many, number, first, last), last)
        is_below_nearer = index > first and number - many[index - 1] < many[index] - number
        indices.append(index - is_below_nearer)
    return indices


def _joinable(lines: list[Line], key: Callable[[Line], Any]) -> list[Line]:
    """Returns the lines, ordered by number. If the key does not contain the file, leaves out functions that several
    files have, since such a line cannot be matched with certainty.
    """
    files: dict[Any, set[str]] = {}
    for line in lines if key is KEYS[-1] else ():
        files.setdefault(key(line), set()).add(line.function[1])
    return sorted((line for line in lines if len(files.get(key(line), ())) < 2), key=lambda line: line.number)


def _in_rest(lines: list[Line], other: LineTable) -> list[Line]:
    """Returns the lines that may be in the rest of `other`, which does not list them."""
    small = set(unfold(row for row in fold(lines) if abs(row.bytes) <= other.rest_most))
    return [line for line in lines if line in small]


def _by_line(pairs: Iterable[tuple[Line | None, Line | None]]) -> list[MovedLine]:
    """Merges pairs of the same line over the paths at which it changed."""
    changes: dict[tuple[str, str, str, bool, bool], list[tuple[str, int, int]]] = {}
    keepers: dict[tuple[str, str, str, bool, bool], str] = {}
    for was, now in pairs:
        before, after = (side.bytes if side else 0 for side in (was, now))
        shown = now or was
        if shown is not None and before != after:
            name = shown.name if shown.module else ""
            key = (shown.category, shown.source, name, after > before, now is None)
            changes.setdefault(key, []).append((shown.path, before, after))
            keepers[key] = keepers.get(key) or shown.kept_by
    moved = []
    for key, rows in changes.items():
        category, source, name, *_ = key
        least = SHARE * max(abs(after - before) for _, before, after in rows)
        paths = tuple(path for path, before, after in rows if abs(after - before) >= least)
        before, after = sum(row[1] for row in rows), sum(row[2] for row in rows)
        moved.append(MovedLine(category, paths, source, before, after, name, kept_by=keepers[key]))
    return moved


# -- of a metric ---------------------------------------------------------------------------------------


def categories_behind(metric: str) -> tuple[str, tuple[str, ...]] | None:
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
    at, categories = categories_behind(metric) or ("", ())
    if at not in before or at not in after or not by:
        return []
    same_way = [line for line in moved_lines(before[at], after[at]) if (line.difference > 0) == (by > 0)]
    lines = [line for line in same_way if line.category in categories or line.is_rest]
    return [line for line in lines if abs(line.difference) >= SHARE * abs(by)][:most]


def largest_lines(metric: str, lines: Lines, categories: Collection[str] = (), most: int = 3) -> list[CodeLine]:
    """Returns the lines with the most bytes of a metric, or of these of its categories, for a limit without an earlier
    measurement.
    """
    at, all_categories = categories_behind(metric) or ("", ())
    moved = moved_lines(LineTable(), lines.get(at, LineTable()))
    largest = [line for line in moved if line.category in (categories or all_categories)][:most]
    return [replace(line.code_line, sentence=line.sentence.replace(": +", ": ", 1)) for line in largest]
