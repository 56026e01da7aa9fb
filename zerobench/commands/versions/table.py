"""Bytes by category and volume of each loop, release by release.

A *value* is the range over the launches of a loop, nearly always a single number: a metric that differs from launch to
launch is *unsteady* (a buffer may be freed a moment later, in another thread). A *step* is a value whose range has
nothing in common with that of the release before.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from ...records import CATEGORIES, COLLECTIVES
from ...results.grid import Grid
from ...sizes import printable, show_bytes
from ..bisect.report import show_value
from ..bisect.search import same
from .environments import Release

METRICS = (
    "peak_bytes", *(f"peak_{name}_bytes" for name in CATEGORIES), "growth_bytes", "states_bytes",
    *(f"max_{name}_bytes" for name in CATEGORIES), "volume_psi", *(f"volume_{name}_psi" for name in COLLECTIVES),
    "wire_bytes", "control_bytes",
)  # fmt: skip
"""Metrics of the table; a row that is 0 in every release is left out."""

ALWAYS = ("peak_bytes", "growth_bytes", "volume_psi")


@dataclass(frozen=True)
class Value:
    """A metric of a loop over its launches: the least and the largest."""

    low: float
    high: float

    @property
    def steady(self) -> bool:
        """True where all launches agree."""
        return same(self.low, self.high)

    def step_from(self, before: Value) -> float | None:
        """Returns how far it lies from an earlier value at least; None where they have a number in common."""
        if self.low > before.high and not same(self.low, before.high):
            return self.low - before.high
        if self.high < before.low and not same(self.high, before.low):
            return self.high - before.low
        return None

    def __str__(self) -> str:
        return show_value(self.low) if self.steady else f"{show_value(self.low)} to {show_value(self.high)}"


@dataclass(frozen=True)
class MeasuredRelease:
    """A release, and a row per launch of each loop. `problems`: loop -> why it has none; "" -> why none has."""

    release: Release
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The label, and the torch that was measured where the label does not say it."""
        versions = sorted({row["torch_version"] for rows in self.rows.values() for row in rows})
        unsaid = [one for one in versions if one.partition("+")[0] not in self.release.label]
        return ", ".join([self.release.label, *(f"torch {one}" for one in unsaid)])

    def value(self, loop: str, metric: str) -> Value | None:
        """Returns a metric of a loop; None where it was not measured."""
        numbers = [row[metric] for row in self.rows.get(loop, ()) if row[metric] is not None]
        return Value(min(numbers), max(numbers)) if numbers else None


def rows_of(found: Sequence[MeasuredRelease], loop: str) -> list[list[str]]:
    """Returns a row per metric: its name, and its value in each release, with the step where it has moved."""
    rows = []
    for metric in METRICS:
        values = [one.value(loop, metric) for one in found]
        if any(one is not None and one.high for one in values) or metric in ALWAYS:
            rows.append([metric, *(_cell(metric, values, place) for place in range(len(values)))])
    return rows


def step(values: Sequence[Value | None], place: int) -> float | None:
    """Returns the step of a value from the last one before it; None where there is none."""
    value, before = values[place], next((one for one in reversed(values[:place]) if one is not None), None)
    return None if value is None or before is None else value.step_from(before)


def _cell(metric: str, values: Sequence[Value | None], place: int) -> str:
    value, by = values[place], step(values, place)
    if value is None:
        return "–"
    if by is None:
        return str(value)
    size = show_bytes(abs(by)) if metric.endswith("_bytes") else show_value(abs(by))
    before = next(one for one in reversed(values[:place]) if one is not None)
    least = "" if value.steady and before.steady else "at least "
    return f"{value} ({least}{'+' if by > 0 else '−'}{size})"


def print_text(found: Sequence[MeasuredRelease], loops: Sequence[str], world_size: int, console: Console) -> None:
    """Prints a table per loop, then what could not be measured."""
    for loop in loops:
        console.print(f"{loop}, N = {world_size}", style="bold", highlight=False)
        console.print(Grid(["", *(one.title for one in found)], rows_of(found, loop)))
    for words in problems(found):
        console.print(printable(words), markup=False, highlight=False, soft_wrap=True)


def problems(found: Sequence[MeasuredRelease]) -> list[str]:
    """Returns a sentence per release or loop that could not be measured."""
    return [
        f"{one.release.label}{f', {loop}' * bool(loop)}: {why}" for one in found for loop, why in one.problems.items()
    ]


def as_markdown(found: Sequence[MeasuredRelease], loops: Sequence[str], world_size: int) -> str:
    """Formats the tables; values that have moved are bold."""
    parts = []
    for loop in loops:
        lines = ["| | " + " | ".join(one.title for one in found) + " |", "| --- |" + " --: |" * len(found)]
        for name, *cells in rows_of(found, loop):
            shown = (f"**{cell}**" if "(" in cell else cell for cell in cells)
            lines.append(f"| {name} | " + " | ".join(shown) + " |")
        parts.append(f"## {loop}, N = {world_size}\n\n" + "\n".join(lines) + "\n")
    return "\n".join([*parts, *(f"{words}\n" for words in problems(found))])


def as_json(found: Sequence[MeasuredRelease], loops: Sequence[str], world_size: int) -> str:
    """Formats values and steps by loop, metric and release."""
    plain = {
        "world_size": world_size,
        "releases": [one.title for one in found],
        "loops": {loop: {metric: _plain(found, loop, metric) for metric in METRICS} for loop in loops},
        "problems": problems(found),
    }
    return json.dumps(plain, indent=1) + "\n"


def _plain(found: Sequence[MeasuredRelease], loop: str, metric: str) -> dict[str, list[float | None]]:
    values = [one.value(loop, metric) for one in found]
    return {
        "least": [one.low if one else None for one in values],
        "largest": [one.high if one else None for one in values],
        "steps": [step(values, place) for place in range(len(values))],
    }
