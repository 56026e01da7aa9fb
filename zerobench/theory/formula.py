"""A closed form of the literature: its equation as text, its numbers, its value, and what a run holds beyond it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Term:
    """What a run holds or moves beyond a formula, or, below zero, what it lacks of it. `size` in the formula's unit."""

    name: str
    size: int


@dataclass(frozen=True)
class Formula:
    """A closed form. `equation`: in ψ, N, K and the like; `numbers`: their values; `value`: in bytes or elements.

    What a run measures lies from `least` to `most`: the formula, and what is in flight beside it.
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
    """Terms in order, without the empty ones; fractions of a byte are rounded away from zero."""
    rounded = ((name, int(-(-size // 1)) if size > 0 else int(size // 1)) for name, size in named)
    return tuple(Term(name, size) for name, size in rounded if size)


def sum_text(coefficients: Iterable[float], symbol: str) -> str:
    """A sum of multiples of one symbol, as in "(2 + 12)ψ"; empty where all are zero."""
    kept = [f"{one:g}" for one in coefficients if one]
    if not kept:
        return ""
    return f"{kept[0] if len(kept) == 1 else '(' + ' + '.join(kept) + ')'}{symbol}"
