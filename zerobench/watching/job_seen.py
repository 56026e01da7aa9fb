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
            joined.lost = max(one.lost for one in there)
            joined.changes = max(one.changes for one in there)
            joined.reach = max(one.reach for one in there)
            joined.not_finite = max(one.not_finite for one in there)
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

    @cached_property
    def held(self) -> set[str]:
        """Names of the trainable parameters that a watched optimizer has, on any rank."""
        return set(chain.from_iterable(rank.held for rank in self.ranks))

    @property
    def names(self) -> set[str]:
        """Names of all parameters of the model, trainable or frozen."""
        return {*self.sizes, *self.ranks[0].frozen}

    @cached_property
    def updates_copies_alone(self) -> bool:
        """Whether the optimizer updates copies of parameters, such as masters, and no parameter with one changes."""
        bits = [
            {one[name] for one in self.ranks[0].values[1:]}
            for name, seen in self.parts.items()
            if self._is_copied(name, seen)
        ]
        return self.steps > 1 and bool(bits) and all(len(own) == 1 for own in bits)

    def _is_copied(self, name: str, seen: PartSeen) -> bool:
        return seen.is_copy and seen.changes > 0 and all(name in one for one in self.ranks[0].values[1:])

    @cached_property
    def reduces_by_hand(self) -> bool:
        """Whether a plain loop reduces all gradients over the ranks after backward, as if parameters were equal."""
        return self.reduces_late and self.reductions(self.steps - 1)[-1] > 0.9

    @property
    def skipped(self) -> list[int]:
        """Numbers of the steps whose update a scaler skipped."""
        return [number for number, step in enumerate(self.ranks[0].steps) if step.skipped]

    def unequal(self, kind: str, number: int) -> list[str]:
        """Returns the `values` or `buffers` whose bits differ between ranks after step `number`; 0: at the beginning.
        Of all ranks' tensors that are whole.
        """
        seen: list[dict[str, int]] = [getattr(rank, kind)[number] for rank in self.ranks]
        return [name for name in seen[0] if len({one.get(name) for one in seen if name in one}) > 1]

    def shared(self, kind: str) -> list[str]:
        """Returns the names of `values` or `buffers` that all ranks have whole."""
        first, *others = (getattr(rank, kind)[0] for rank in self.ranks)
        return [name for name in first if all(name in one for one in others)]

    @property
    def changed_frozen(self) -> list[str]:
        """Frozen parameters whose bits changed in the watched steps."""
        rank = self.ranks[0]
        return [name for name in rank.frozen if len({one[name] for one in rank.values if name in one}) > 1]

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

    @cached_property
    def computes(self) -> dict[str, dict[str, int]]:
        """dtype that modules with parameters computed in -> module -> elements of its matrix, if it has one."""
        found: dict[str, dict[str, int]] = {}
        for dtype in sorted({dtype for rank in self.ranks for dtype in rank.computes}):
            found[dtype] = {name: size for rank in self.ranks for name, size in rank.computes.get(dtype, {}).items()}
        return found

    @property
    def precision(self) -> str:
        """The dtype that sets the bounds: the narrowest that computes, or stores parameters and gradients. Muon's
        Newton-Schulz iteration computes in bfloat16, whatever the parameters' dtype.
        """
        stored = ((seen.in_model, seen.master, seen.gradient) for seen in self.parts.values())
        there = {*self.computes, *chain.from_iterable(stored)}
        there |= {"bfloat16" for seen in self.parts.values() if "Muon" in seen.optimizer}
        return next((dtype for dtype in NARROW if dtype in there), "float32")

    def deviations(self, number: int) -> dict[str, Deviation]:
        """Returns parameter -> deviation from the reference after update `number`; 0: of the initial values."""
        found: dict[str, Deviation] = {}
        for rank in self.ranks:
            for name, one in rank.deviations[number].items() if number < len(rank.deviations) else ():
                found[name] = found[name].joined(one) if name in found else one
        return found
