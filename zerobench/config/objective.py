"""The objective of a sweep whose cells a Hydra sweeper (Optuna, Nevergrad, ...) proposes: columns of the table of runs.

A sweeper gets the column's value times the sign before the name, and minimizes it: `peak_bytes`, `-tokens_per_s`.
`+tokens_per_s` is for a sweeper whose own setting is to maximize.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from ..records.describe import columns_of
from .unknown_keys import nearest

KEY = "objective"

LARGER_UNITS, LARGER = ("tokens / s", "tokens / J"), ("mfu", "hfu", "overlap")
"""Units, and columns without a unit of their own, of which larger values are better."""


@dataclass(frozen=True)
class Objective:
    """A column to optimize, and the sign before its name: "-", "+" or ""."""

    column: str
    sign: str

    def value_of(self, row: Mapping[str, Any]) -> float:
        """Returns the value for the sweeper of a run's row."""
        return float(row[self.column]) * (-1 if self.sign == "-" else 1)

    @property
    def worst(self) -> float:
        """The value for the sweeper of an infeasible cell."""
        return -inf if self.sign == "+" else inf


def objectives_of(text: str) -> tuple[Objective, ...]:
    """Returns the objectives that `text` names, separated by commas. Raises ValueError for a name that is not a column
    of numbers, and for one without a sign of which larger values are better.
    """
    numbers = {column.name: column for column in columns_of("runs") if column.kind in ("int", "float")}
    objectives = []
    for part in map(str.strip, text.split(",")):
        name = part.removeprefix("-").removeprefix("+")
        sign = part.removesuffix(name)
        if name not in numbers:
            raise ValueError(f"{KEY}={part}: no such column of numbers{nearest(name, list(numbers))}")
        if not sign and (numbers[name].unit in LARGER_UNITS or name in LARGER):
            raise ValueError(
                f"{KEY}={name}: sweepers minimize, and larger is better; write {KEY}=-{name}, or +{name} if the"
                " sweeper's own setting is to maximize"
            )
        objectives.append(Objective(name, sign))
    return tuple(objectives)
