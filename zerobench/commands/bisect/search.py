"""The search: commits between an old one and one that is not old are halved until a commit and its parent differ.

git orders the candidates, so that a history with merges is halved as well. What was measured before is asked first, for
it costs nothing. A commit that cannot be measured is left out, and the next candidate lies away from it. The end is
always a commit that is not old whose parent is, whatever happens in between: that there is only one such commit is
assumed by nothing but the word "the".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..compare.comparison import EXACT
from ..revisions import Commit, commits, git
from .measure import Bench, Measured, Range

METRICS = tuple(dict.fromkeys(["peak_bytes", "growth_bytes", "states_bytes", "volume_psi", "wire_bytes", *EXACT]))
"""Metrics that repeat exactly, the most telling first."""

OLD, NEW, SKIPPED = "old", "not old", "skipped"

ROUNDING = 1e-9
"""Relative difference of quotients that is none: their last digit may differ between versions of Python."""


@dataclass(frozen=True)
class Target:
    """One metric of one cell. `above`, `below`: thresholds beyond which a value is not old; else another value is."""

    cell: str
    metric: str
    above: float | None = None
    below: float | None = None

    def is_old(self, good: Any, value: Any) -> bool:
        """Returns True where a value is on the side of GOOD's."""
        if self.above is not None:
            return bool(bounds(value)[0] <= self.above)
        if self.below is not None:
            return bool(bounds(value)[1] >= self.below)
        return same(good, value)


def same(one: Any, other: Any) -> bool:
    """Returns True for equal values, but for a quotient's last digit, and for ranges with a value in common."""
    if isinstance(one, Range) or isinstance(other, Range):
        (low, high), (least, largest) = bounds(one), bounds(other)
        return bool(low <= largest and least <= high)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=ROUNDING)
    return bool(one == other)


def bounds(value: Any) -> tuple[Any, Any]:
    """Returns the least and the largest of a value's launches."""
    return (value.low, value.high) if isinstance(value, Range) else (value, value)


@dataclass(frozen=True)
class Found:
    """The result for a target: `after` is not old, `before` is its parent, or the last old one before `suspects`.

    `suspects`: commits that could not be measured and may be the one instead of `after`.
    """

    target: Target
    good: Measured
    bad: Measured
    before: Measured
    after: Measured
    suspects: list[Measured] = field(default_factory=list)


@dataclass
class Search:
    """A search over GOOD..BAD. `told`: hears the state of each commit, and how many runs remain at most.

    `skipped`: commits that could not be measured, and why.
    """

    bench: Bench
    told: Callable[[Measured, str, int], None] = lambda *_: None
    skipped: dict[str, tuple[Measured, str]] = field(default_factory=dict)

    def find(self, target: Target, good: Measured, bad: Measured) -> Found:
        """Returns the commit that moved the target. GOOD must be old and BAD must not."""
        olds, new, skipped = [good], bad, dict[str, Measured]()
        while True:
            between = self.candidates(new, olds)
            if left := [one for one in between if one.hash not in skipped]:
                one = self.bench.measure(self._choose(left, len(skipped)))
            elif between:
                return Found(target, good, bad, olds[-1], new, [skipped[one.hash] for one in between])
            else:
                one = self.bench.measure(commits(self.bench.repository, [f"{new.commit.hash}^1"])[0])
                if (state := _state(target, good, one)) != NEW:
                    return Found(target, good, bad, one if state == OLD else olds[-1], new)
                olds = [good]  # a merged line has moved it back: look among the commits before the parent
            state = _state(target, good, one)
            if state == SKIPPED:
                skipped[one.commit.hash] = one
                self.skip(one, target)
            elif state == OLD:
                olds.append(one)
            else:
                new = one
            rest = sum(one.hash not in skipped for one in self.candidates(new, olds))
            self.told(one, state, math.ceil(math.log2(rest + 1)))

    def candidates(self, new: Measured, olds: list[Measured]) -> list[Commit]:
        """Returns the commits before `new` and after all of `olds`, those that halve them best first."""
        excluded = [f"^{one.commit.hash}" for one in olds]
        shown = git(self.bench.repository, "rev-list", "--bisect-all", new.commit.hash, *excluded)
        hashes = [line.split()[0] for line in shown.splitlines()]
        return commits(self.bench.repository, [one for one in hashes if one != new.commit.hash])

    def skip(self, one: Measured, target: Target) -> None:
        """Keeps a commit that has no value of the target, with the reason."""
        self.skipped[one.commit.hash] = one, one.reason(target.cell)

    def _choose(self, left: list[Commit], skipped: int) -> Commit:
        """Returns a known commit where there is one; else the best, or away from those that were skipped."""
        known = next((one for one in left if self.bench.known(one)), None)
        return known or left[len(left) - max(1, len(left) >> skipped)]


def _state(target: Target, good: Measured, one: Measured) -> str:
    value = one.value(target.cell, target.metric)
    if value is None:
        return SKIPPED
    return OLD if target.is_old(good.value(target.cell, target.metric), value) else NEW


def walk(search: Search, target: Target, good: Measured, bad: Measured) -> list[Found]:
    """Measures every commit of the first parents' line from GOOD to BAD; returns each that moved the target."""
    line = git(
        search.bench.repository, "rev-list", "--reverse", "--first-parent", f"{good.commit.hash}..{bad.commit.hash}"
    )
    rest, before, found, suspects = commits(search.bench.repository, line.split()), good, [], []
    for number, commit in enumerate(rest, 1):
        one = search.bench.measure(commit)
        value = one.value(target.cell, target.metric)
        if value is None:
            search.skip(one, target)
            suspects.append(one)
            search.told(one, SKIPPED, len(rest) - number)
            continue
        was = before.value(target.cell, target.metric)
        base = was if target.above is None and target.below is None else good.value(target.cell, target.metric)
        moved = target.is_old(base, was) != target.is_old(base, value)
        if moved:
            found.append(Found(target, good, bad, before, one, suspects))
        search.told(one, "moved" if moved else "same", len(rest) - number)
        before, suspects = one, []
    return found
