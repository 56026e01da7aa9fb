"""Series of a history: the values of a metric of a cell, and the entries at which they moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...results.provenance import torch_minor
from ..bisect.search import METRICS, same
from ..budget.line_table import Lines, lines_of
from ..budget.lines import MovedLine, lines_behind
from .entries import Entry, History

USUAL = ("peak_bytes", "growth_bytes", "states_bytes", "volume_psi", "wire_bytes")
"""Metrics that are shown unless others are asked for."""


@dataclass(frozen=True)
class Point:
    """An entry of a series. `value` is None where the cell has failed there, as `status` and `reason` say.

    `gap`: commits since the point before at which the cell was not measured; None where that is not known.

    `before`: the value of the entry before that has one, where this one is a step; else None. `unknown`: commits since
    that one, which may have made the step instead, as they have no value. `torch`: versions before
    and after where they differ at a step. `lines`: the lines of code behind the step.
    """

    entry: Entry
    value: Any
    status: str
    gap: int | None
    reason: str = ""
    before: Any = None
    unknown: int = 0
    torch: tuple[str, str] | None = None
    lines: tuple[MovedLine, ...] = ()

    @property
    def is_step(self) -> bool:
        """True where the value differs from the one before."""
        return self.before is not None

    @property
    def difference(self) -> float | None:
        """The value less the one before, at a step."""
        return self.value - self.before if self.is_step else None


@dataclass(frozen=True)
class Series:
    """The points of a cell, in the order of the entries; entries without the cell have none."""

    metric: str
    cell: str
    points: list[Point]

    @property
    def steps(self) -> list[Point]:
        """The points at which the value moved."""
        return [one for one in self.points if one.is_step]

    @property
    def exact(self) -> bool:
        """True for a metric that repeats exactly: only of such a one a difference is a step."""
        return self.metric in METRICS


def series_of(history: History, metrics: Sequence[str]) -> list[Series]:
    """Returns a series per metric and cell that has any value of it, in the order of metrics and first appearance."""
    cells = list(dict.fromkeys(name for entry in history.entries for name in entry.cells))
    found = [Series(metric, cell, _points(history, metric, cell)) for metric in metrics for cell in cells]
    return [one for one in found if any(point.value is not None for point in one.points)]


def _points(history: History, metric: str, cell: str) -> list[Point]:
    points: list[Point] = []
    before: Point | None = None
    gap: int | None = 0
    unknown = 0
    for entry in history.entries:
        gap = None if gap is None or entry.gap is None else gap + entry.gap
        if (row := entry.cells.get(cell)) is None:
            gap = None if gap is None else gap + 1
            continue
        unknown += gap or 0
        value = row[metric] if row["status"] == "ok" else None
        point = Point(entry, value, row["status"], gap, row["reason"] or "")
        gap = 0
        if before is not None and value is not None and metric in METRICS and not same(before.value, value):
            point = replace(_step(metric, cell, before, point), unknown=unknown)
        points.append(point)
        before, unknown = (point, 0) if value is not None else (before, unknown + 1)
    return points


def _step(metric: str, cell: str, before: Point, point: Point) -> Point:
    versions = [torch_minor(one.entry.cells[cell]["torch_version"]) for one in (before, point)]
    was, now = (_lines(one.entry, cell) for one in (before, point))
    lines = lines_behind(metric, point.value - before.value, was, now)
    moved = (versions[0], versions[1]) if versions[0] != versions[1] else None
    return replace(point, before=before.value, torch=moved, lines=tuple(lines))


def _lines(entry: Entry, cell: str) -> Lines:
    return lines_of(entry.lines[entry.lines["run_id"] == entry.cells[cell]["run_id"]])
