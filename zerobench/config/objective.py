"""Objectives of a sweep whose cells a sweeper of Hydra's proposes: columns of the table of runs, each with a direction.

known   the column says which values are better: fewer bytes, seconds, elements moved and less loss; more tokens/s
open    it does not (micro_batch, psi): the sweeper's own direction does
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache

from ..records.describe import Column, columns_of
from ..records.run_setting import RunSetting
from .unknown_keys import nearest

KEY = "objective"

LARGER_UNITS, SMALLER_UNITS = ("tokens / s",), ("bytes", "s", "elements / ψ", "loss")
"""Units of columns of which larger, or smaller, values are better."""

LARGER = {"mfu": True, "hfu": True, "overlap": True, "seconds": False}
"""Columns whose unit does not tell -> True where larger values are better."""

NO_OBJECTIVE = ("repeat", "seed", "threads", "cores", "schema_version")
"""Columns of numbers that measure nothing."""


@dataclass(frozen=True)
class Objective:
    """A column that is optimized. `larger`: True where larger values are better, None where the column leaves that
    open.
    """

    column: str
    unit: str
    larger: bool | None

    def better(self, one: float, other: float) -> bool:
        """Returns True where the value `one` is better than `other`. Its direction must be known."""
        return one > other if self.larger else one < other


@cache
def _numbers() -> dict[str, Column]:
    """Columns of the table of runs that hold a number, by name."""
    found = [one for one in columns_of("runs") if one.kind in ("int", "float") and one.name not in NO_OBJECTIVE]
    return {one.name: one for one in found}


def _larger(column: Column) -> bool | None:
    if column.name in LARGER:
        return LARGER[column.name]
    if column.name in (one.name for one in fields(RunSetting)):
        return None
    return True if column.unit in LARGER_UNITS else False if column.unit in SMALLER_UNITS else None


def objectives_of(text: str) -> tuple[Objective, ...]:
    """Returns the objectives that `text` names, separated by commas. Raises ValueError, a sentence, for a name that is
    no column of numbers, and for one that is there twice.
    """
    known, found = _numbers(), list[Objective]()
    for name in (part.strip() for part in text.split(",")):
        if name not in known:
            kinds = {one.name: one.kind for one in columns_of("runs")}
            hint = f"; its column is {kinds[name]}, not a number" if name in kinds else _near(name, list(known))
            raise ValueError(f"{KEY}={name}: no such column of numbers{hint}")
        if name in [one.column for one in found]:
            raise ValueError(f"{KEY}={text}: {name} is there twice")
        found.append(Objective(name, known[name].unit, _larger(known[name])))
    return tuple(found)


def _near(name: str, known: list[str]) -> str:
    """The nearest column; for a word that begins columns, or is a part of them, these; else where all are listed."""
    parts = [one for one in known if name and (one.startswith(name) or f"_{name}" in one)]
    if parts and not get_close_matches(name, known, n=1, cutoff=0.85):
        return f"; did you mean {' or '.join(parts[:3])}?"
    hint = nearest(name, known)
    return hint if "did you mean" in hint else "; zerobench columns --table runs lists them"
