"""Differences of one commit from its parent: the parts of a metric, and the lines of code that made the storages.

A *part* is a category of a metric of bytes, a collective of a volume. A line keeps its identity across the commit: its
number before is converted to its number after by git's own difference of the two trees, so that lines that only lie
further down have not moved.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pandas as pd

from ...probes.source_lines import BACKWARD_OF
from ...records import CATEGORIES, COLLECTIVES
from ..budget.line_table import LineTable, lines_of
from ..budget.lines import MovedLine, categories_of, moved_lines
from ..revisions import git
from .measure import Measured
from .search import Found, same

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_SOURCE = re.compile(rf"(?P<mark>(?:{BACKWARD_OF})?)(?P<file>.*):(?P<line>\d+) in (?P<function>.*)")


def parts_moved(found: Found) -> dict[str, float]:
    """Returns the difference of each part of the metric that moved, the largest first."""
    metric, cell = found.target.metric, found.target.cell
    rows = [one.cells.get(cell, {}) for one in (found.before, found.after)]
    if metric == "growth_bytes":
        before, after = (_growth(one, cell) for one in (found.before, found.after))
        moved = {name: float(after[name] - before[name]) for name in CATEGORIES}
    else:
        moved = {name: (rows[1].get(column) or 0) - (rows[0].get(column) or 0) for name, column in _parts(metric)}
    return {name: by for name, by in sorted(moved.items(), key=lambda one: -abs(one[1])) if by}


def _parts(metric: str) -> list[tuple[str, str]]:
    """Returns the parts of a metric and their columns."""
    if metric.startswith(("volume", "wire", "payload")):
        return [(name, f"volume_{name}_psi") for name in COLLECTIVES]
    if metric.startswith("max_"):
        return [(metric.removeprefix("max_").removesuffix("_bytes"), metric)]
    at = "peak" if metric == "peak_bytes" else "max"
    return [(name, f"{at}_{name}_bytes") for name in CATEGORIES] if metric.endswith("_bytes") else []


def lines_moved(found: Found, repository: Path, prefix: str = "") -> list[MovedLine]:
    """Returns the lines whose bytes moved at the peak, or in what has grown, the largest move first.

    `prefix`: the folder of the repository in which the command ran, to which its files' names are relative.
    """
    places = LineMap(repository, found.before.commit.hash, found.after.commit.hash, prefix)
    before, after = (_lines_of(one, found.target.cell) for one in (found.before, found.after))
    before = before.assign(source=[places.after(source) for source in before["source"]])
    at, _ = categories_of(found.target.metric) or ("peak", ())
    moves = moved_lines(lines_of(before).get(at, LineTable()), lines_of(after).get(at, LineTable()))
    net: dict[str, int] = defaultdict(int)  # of a line whose storages have only got another category it is 0
    for one in moves:
        net[one.source] += one.difference
    return sorted(moves, key=lambda one: (-abs(net[one.source]), -abs(one.difference), -one.difference))


def _lines_of(one: Measured, cell: str) -> pd.DataFrame:
    """Returns a cell's rows of lines."""
    return one.lines[one.lines["run_id"] == one.cells.get(cell, {}).get("run_id")]


def _growth(one: Measured, cell: str) -> dict[str, int]:
    """Returns the bytes by category of what has grown."""
    found: dict[str, int] = defaultdict(int)
    for line in lines_of(_lines_of(one, cell)).get("growth", LineTable()).lines:
        found[line.category] += line.bytes
    return found


class LineMap:
    """The places of one commit's lines in another: a line that was edited in place keeps its place."""

    def __init__(self, repository: Path, old: str, new: str, prefix: str = "") -> None:
        self._prefix = prefix
        self._files: dict[str, str] = {}
        self._hunks: dict[str, list[tuple[int, int, int, int]]] = defaultdict(list)
        options = ("--unified=0", "--find-renames", "--no-color", "--no-ext-diff", "--src-prefix=a/", "--dst-prefix=b/")
        file = ""
        for line in git(repository, "diff", *options, old, new).splitlines():
            if line.startswith("--- a/"):
                file = line[len("--- a/") :].rstrip("\t")
            elif line.startswith("rename from "):
                file = line.removeprefix("rename from ")
            elif line.startswith("rename to "):
                self._files[file] = line.removeprefix("rename to ")
            elif hunk := _HUNK.match(line):
                start, count, to, lines = (int(part) if part else 1 for part in hunk.groups())
                self._hunks[file].append((start, count, to, lines))

    def after(self, source: str) -> str:
        """Converts "train.py:12 in step" to the file and number after; a line that is gone keeps its old words."""
        found = _SOURCE.fullmatch(source or "")
        if found is None:
            return source
        inside = self._prefix + found["file"]
        file = inside if inside in self._hunks or inside in self._files else found["file"]
        number = self._number(file, int(found["line"]))
        if number is None:
            return source
        file = self._files.get(file, file).removeprefix(self._prefix)
        return f"{found['mark']}{file}:{number} in {found['function']}"

    def _number(self, file: str, line: int) -> int | None:
        shift = 0
        for start, count, to, lines in self._hunks.get(file, ()):
            first = start if count else start + 1  # without old lines, a hunk stands behind its first
            if line < first:
                break
            if line < first + count:
                place = line - first
                return to + place if place < lines else None
            shift += lines - count
        return line + shift


def also_moved(found: Found, metrics: tuple[str, ...]) -> dict[str, tuple[Any, Any]]:
    """Returns the metrics of the cell, but the target's, that the commit moved: their values before and after."""
    cell, others = found.target.cell, [name for name in metrics if name != found.target.metric]
    both = {name: (found.before.value(cell, name), found.after.value(cell, name)) for name in others}
    return {name: (a, b) for name, (a, b) in both.items() if not same(a, b)}
