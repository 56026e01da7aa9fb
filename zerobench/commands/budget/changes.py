"""Limits that a recording changes: before, now, and what moved them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...host.terminal import stdout_console
from ...results.grid import Grid
from ...sizes import printable
from .file import CellBudget
from .judge import most_moved, part_name, show_value
from .lines import lines_behind

HEADER = ["cell", "metric", "before", "now", "difference", "moved most", "line"]


@dataclass(frozen=True)
class Change:
    """One limit. `before` is None for a new metric, `metric` empty for a new cell. `within`: the old one allows it."""

    cell: str
    metric: str
    before: float | None
    now: float
    part: str = ""
    line: str = ""
    within: bool = False

    @property
    def row(self) -> list[str]:
        """The change in words, under HEADER."""
        if not self.metric:
            return [self.cell, f"{self.now:.0f} limits", "–", "–", "new", "", ""]
        now = show_value(self.metric, self.now)
        if self.before is None:
            return [self.cell, self.metric, "–", now, "new", "", ""]
        by = self.now - self.before
        signed = f"{'+' if by > 0 else '−'}{show_value(self.metric, abs(by))}"
        part = self.part or "within its tolerance" * self.within
        return [self.cell, self.metric, show_value(self.metric, self.before), now, signed, part, self.line]


def changes_of(row: dict[str, Any], before: CellBudget, after: CellBudget) -> list[Change]:
    """Returns the recorded limits of a cell whose values differ; a new cell is one change."""
    name = row["name"]
    if not before.limits:
        return [Change(name, "", None, len(after.limits))]
    changes = []
    for metric, limit in after.limits.items():
        was = before.limits.get(metric)
        if was is None:
            changes.append(Change(name, metric, None, limit.value))
        elif was.value != limit.value:
            by = limit.value - was.value
            lines = lines_behind(metric, by, before.lines, after.lines, most=1)
            part = part_name(most_moved(metric, before.limits, row) or metric)
            category = part or (lines[0].category if lines else "")
            within = was.judge(metric, limit.value) == "ok"
            words = lines[0].words if lines else ""
            changes.append(Change(name, metric, was.value, limit.value, category, words, within))
    return changes


def print_changes(changes: list[Change]) -> None:
    """Prints the changes as a table per cell; nothing where there are none."""
    console = stdout_console()
    for cell in dict.fromkeys(one.cell for one in changes):
        mine = [one.row[1:] for one in changes if one.cell == cell]
        if any(not one.metric for one in changes if one.cell == cell):
            console.print(f"{printable(cell)}: new, {mine[0][0]}", markup=False, highlight=False, soft_wrap=True)
            continue
        console.print(printable(cell), style="bold", markup=False, highlight=False, soft_wrap=True)
        console.print(Grid(HEADER[1:], mine, left=("metric", "line")))
