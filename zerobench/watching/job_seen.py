"""The observations of all ranks as those of one job: norms, losses, copies, traffic, and deviations from a reference.

A replica counts once: the squares of a gradient that k ranks hold are divided by k.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from statistics import fmean

from .observed import REDUCTIONS, Deviation, PartSeen, RankSeen, Squares

NARROW = ("float16", "bfloat16", "float32")
"""dtypes from the one with the fewest exponents to the widest; the first that occurs sets the bounds."""


@dataclass
class JobSeen:
    """All ranks' observations, and facts of the run."""

    strategy: str
    ranks: list[RankSeen]
    name: str = ""
    sizes: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.sizes = self.ranks[0].sizes

    @property
    def steps(self) -> int:
        """Number of steps that all ranks observed."""
        return min(len(rank.steps) for rank in self.ranks)

    @cached_property
    def parts(self) -> dict[str, PartSeen]:
        """The first rank's part of each parameter that has one there, with elements and gradients of all ranks."""
        found: dict[str, PartSeen] = {}
        for name in dict.fromkeys(chain.from_iterable(rank.parts for rank in self.ranks)):
            there = [rank.parts[name] for rank in self.ranks if name in rank.parts]
            there.sort(key=lambda one: -one.elements)  # an empty shard shows nothing
            joined = PartSeen(**vars(there[0]))
            joined.elements = sum(one.elements for one in there)
            joined.moment_elements = sum(one.moment_elements for one in there)
            joined.gradients = max(one.gradients for one in there)
            joined.changed = any(one.changed for one in there)
            joined.updates = [max(counts) for counts in zip(*(one.updates for one in there), strict=False)]
            found[name] = joined
        return found

    def loss(self, step: int) -> float:
        """Returns the mean of the ranks' losses of a step: of each rank the sum over its micro-batches."""
        return fmean(rank.steps[step].loss for rank in self.ranks)

    def squares(self, step: int, at_update: bool = False) -> dict[str, float]:
        """Returns parameter -> the square of its gradient's norm, over the ranks."""
        total, numbers = defaultdict[str, float](float), defaultdict[str, float](float)
        for rank in self.ranks:
            seen = rank.steps[step]
            squares: Squares = seen.at_update if at_update else seen.before
            for name, (value, number) in squares.items():
                total[name] += value
                numbers[name] += number
        return {name: total[name] / max(1, round(numbers[name] / self._size(name, numbers))) for name in total}

    def norm(self, step: int, at_update: bool = False) -> float:
        """Returns the norm of all gradients of a step, after backward or as the optimizer got them."""
        return math.sqrt(sum(self.squares(step, at_update).values()))

    def _size(self, name: str, numbers: dict[str, float]) -> float:
        return self.sizes.get(name) or numbers[name] / len(self.ranks) or 1

    @property
    def copies(self) -> float | None:
        """Copies of each state in the job: 1.0 if they are partitioned over all ranks. None without states."""
        moments = {name: seen.moment_elements for name, seen in self.parts.items() if name in self.sizes}
        known = {name: numel for name, numel in moments.items() if numel}
        return sum(known.values()) / sum(self.sizes[name] for name in known) if known else None

    @property
    def replicas(self) -> dict[str, list[float]]:
        """Parameter -> the square of its norm after the last step, on each rank that holds it whole."""
        found = {name: [rank.parts[name] for rank in self.ranks if name in rank.parts] for name in self.sizes}
        whole = {name: [s.square for s in seen if s.elements == self.sizes[name]] for name, seen in found.items()}
        return {name: squares for name, squares in whole.items() if len(squares) > 1}

    @property
    def reduces_late(self) -> bool:
        """Whether the loop reduces gradients by itself after backward, so that norms after backward are of one rank."""
        return self.strategy == "plain" and len(self.ranks) > 1

    def reductions(self, step: int) -> list[float]:
        """Returns how often each gradient is reduced in each micro-batch, then in the rest of the step."""
        psi, moved = sum(self.sizes.values()) or 1, self.ranks[0].steps[step].moved
        return [max(section.get(kind, 0) for kind in REDUCTIONS) / psi for section in moved]

    @property
    def sent(self) -> dict[str, dict[str, int]]:
        """Kind and dtype of each collective of the last step -> payload bytes of the first rank."""
        return self.ranks[0].steps[self.steps - 1].sent

    @property
    def computes(self) -> list[str]:
        """dtypes that modules with parameters computed in."""
        return sorted(set(chain.from_iterable(rank.computes for rank in self.ranks)))

    @property
    def precision(self) -> str:
        """The dtype that sets the bounds: the narrowest that computes, or stores parameters and gradients."""
        stored = ((seen.in_model, seen.master, seen.gradient) for seen in self.parts.values())
        there = {*self.computes, *chain.from_iterable(stored)}
        return next((dtype for dtype in NARROW if dtype in there), "float32")

    def deviations(self, number: int) -> dict[str, Deviation]:
        """Returns parameter -> deviation from the reference after update `number`; 0: of the initial values."""
        found: dict[str, Deviation] = {}
        for rank in self.ranks:
            for name, one in rank.deviations[number].items() if number < len(rank.deviations) else ():
                found[name] = found[name].joined(one) if name in found else one
        return found
