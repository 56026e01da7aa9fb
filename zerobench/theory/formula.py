"""A closed form of the literature: its equation as text, its numbers, its value, and what a run holds beyond it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Term:
    """Bytes or elements that a run may hold or move beyond a formula; below zero, that it may lack of it."""

    name: str
    size: int


@dataclass(frozen=True)
class Formula:
    """A closed form. `equation`: in ψ, N, K and the like; `numbers`: their values; `value`: in bytes or elements.

    A run's measured value lies from `least` to `most`: the formula, and what is in flight beside it.
    """

    equation: str
    value: int
    numbers: Mapping[str, float]
    in_flight: tuple[Term, ...] = ()

    @property
    def least(self) -> int:
        """The formula less what a run lacks of it."""
        return self.value + sum(term.size for term in self.in_flight if term.size < 0)

    @property
    def most(self) -> int:
        """The formula and everything that may be in flight."""
        return self.value + sum(term.size for term in self.in_flight if term.size > 0)


def terms(named: Iterable[tuple[str, float]]) -> tuple[Term, ...]:
    """Returns terms in order, without empty ones; fractions of a byte are rounded away from zero."""
    rounded = ((name, int(-(-size // 1)) if size > 0 else int(size // 1)) for name, size in named)
    return tuple(Term(name, size) for name, size in rounded if size)


def to_json(formulas: Mapping[str, Formula]) -> str:
    """Formulas by name as text; `from_json` reads it."""
    return json.dumps({name: asdict(formula) for name, formula in formulas.items()}, ensure_ascii=False)


def from_json(text: str) -> dict[str, Formula]:
    """Formulas by name. Raises ValueError for text that `to_json` has not written."""
    try:
        return {name: _formula(**one) for name, one in json.loads(text).items()}
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        raise ValueError(f"formulas cannot be read: {error}") from error


def _formula(equation: str, value: int, numbers: dict[str, float], in_flight: list[dict[str, Any]]) -> Formula:
    kept = tuple(Term(str(one["name"]), int(one["size"])) for one in in_flight)
    return Formula(str(equation), int(value), {str(k): float(v) for k, v in numbers.items()}, kept)
