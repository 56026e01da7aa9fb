"""Lines of code that hold bytes, as tables that a budget keeps.

line      storages of one category that one line of code made in one module, of one rank
table     the lines that live at the peak, or those that have grown over the measured steps
folded    a row that stands for equal modules: "blocks.0–4.mlp_in", so that a deep model's table is short
rest      the sum of the lines that a short table does not list
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

MOST = 40
"""Rows of a table that a budget keeps."""

AT = ("peak", "growth")
"""The tables of a run."""

REST = "all other lines"

_SOURCE = re.compile(r"(?P<backward>backward of )?(?P<file>.+):(?P<number>\d{1,9}) in (?P<function>.+)", re.DOTALL)
_RANGE = re.compile(r"(\d{1,6})–(\d{1,6})")


@dataclass(frozen=True, order=True)
class Line:
    """Storages of one line: as records.LineRow, without its rank."""

    category: str
    module: str
    source: str
    bytes: int
    storages: int
    name: str = ""

    @property
    def function(self) -> tuple[str, str, str]:
        """The line without its number: "backward of " or nothing, file, function."""
        found = _SOURCE.fullmatch(self.source)
        return (found["backward"] or "", found["file"], found["function"]) if found else ("", "", self.source)

    @property
    def number(self) -> int:
        """The line's number in its file; 0 where there is none."""
        found = _SOURCE.fullmatch(self.source)
        return int(found["number"]) if found else 0


@dataclass(frozen=True)
class LineTable:
    """Lines, the largest first. `rest`: bytes of those that are not listed, none above `rest_most`."""

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
    """Returns the tables of one cell, of the run and rank that hold most of each; `lines`: the table of its runs."""
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
    """The lines of many runs, found by run without a look at all of them."""

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
    """Returns the table with its largest rows, folded ones counting as one, and the others in its rest."""
    rows = fold(table.lines)
    kept, left = rows[:most], rows[most:]
    rest_most = max([table.rest_most, *(abs(one.bytes) for one in left)])
    return LineTable(_ordered(unfold(kept)), table.rest + sum(one.bytes for one in left), rest_most)


# -- folding -------------------------------------------------------------------------------------------


def fold(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Merges lines that differ in one number of their module alone, and of their label where it begins alike."""
    folded, depth = list(lines), 0
    while depth <= max((one.module.count(".") for one in folded), default=-1):
        groups: dict[tuple[Any, ...], dict[int, Line]] = {}
        doubles = []
        for one in folded:
            number = _number_at(one.module, depth)
            key = (one.category, one.source, one.bytes, one.storages, *_named(one, depth, None if number < 0 else "*"))
            if groups.setdefault(key, {}).setdefault(number, one) is not one:
                doubles.append(one)
        folded = [*doubles, *(row for mine in groups.values() for row in _fold_group(mine, depth))]
        depth += 1
    return _ordered(folded)


def _number_at(module: str, depth: int) -> int:
    """Returns the number that is a module's part at this depth; -1 where it is none."""
    part = [*module.split("."), *[""] * depth][depth]
    return int(part) if re.fullmatch(r"0|[1-9][0-9]{0,5}", part) else -1


def _named(one: Line, depth: int, part: str | None) -> tuple[str, str]:
    """Returns module and label with another part at this depth, the label's where it begins as the module."""
    module, name = one.module.split("."), one.name.split(".")
    alike = name[: depth + 1] == module[: depth + 1]
    for words in (module, *([name] if alike else [])):
        if part is not None:
            words[depth] = part
    return ".".join(module), ".".join(name)


def _fold_group(mine: dict[int, Line], depth: int) -> list[Line]:
    """Returns a row per stretch of numbers without a gap."""
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
    """Undoes `fold`. Raises ValueError for a row whose bytes its modules do not divide, or of too many modules."""
    found = list(lines)
    for depth in range(max((one.module.count(".") for one in found), default=-1) + 1):
        rows: list[Line] = []
        for one in found:
            rows += _unfold_one(one, depth, most)
            if len(rows) > most:
                raise ValueError(f"the modules of these lines are more than {most:,}")
        found = rows
    return _ordered(found)


def _unfold_one(one: Line, depth: int, most: int) -> list[Line]:
    parts = one.module.split(".")
    found = _RANGE.fullmatch(parts[depth]) if depth < len(parts) else None
    if found is None:
        return [one]
    first, last = int(found[1]), int(found[2])
    count = last - first + 1
    if not 1 <= count <= most:
        raise ValueError(f"{one.module:.80} is no range of modules, as blocks.0–4 is")
    if one.bytes % count or one.storages % count:
        raise ValueError(f"{one.module:.80} is {count} modules, which do not divide {one.bytes} bytes equally")
    each = replace(one, bytes=one.bytes // count, storages=one.storages // count)
    names = [_named(one, depth, str(number)) for number in range(first, last + 1)]
    return [replace(each, module=module, name=name) for module, name in names]


def folded_names(modules: Iterable[str]) -> str:
    """Returns the names of modules in few words: "blocks.0–4.mlp_in"."""
    rows = fold([Line("", module, "", 1, 1) for module in dict.fromkeys(modules) if module])
    return " and ".join(sorted(one.module for one in rows))


# -- in a budget file ----------------------------------------------------------------------------------


def plain(lines: Lines) -> dict[str, list[list[Any]]]:
    """Returns the tables as a budget file has them: rows of bytes, storages, category, module, line and label."""
    shown: dict[str, list[list[Any]]] = {}
    for at, table in lines.items():
        short = shortened(table)
        rows = [[one.bytes, one.storages, one.category, one.module, one.source, one.name] for one in fold(short.lines)]
        shown[at] = rows + [[short.rest, short.rest_most, REST]] * bool(short.rest or short.rest_most)
    return shown


def parse_lines(content: Any) -> Lines:
    """Reads what `plain` has written. Raises ValueError, a sentence."""
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
