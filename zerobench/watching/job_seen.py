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

from .observed import REDUCTIONS, Deviation, PartSeen, RankSeen

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
        parts: dict[str, PartSeen] = {}
        for name in dict.fromkeys(chain.from_iterable(rank.parts for rank in self.ranks)):
            shards = [rank.parts[name] for rank in self.ranks if name in rank.parts]
            shards.sort(key=lambda shard: -shard.elements)  # an empty shard shows nothing
            joined = parts[name] = PartSeen(**vars(shards[0]))
            for field_name in ("elements", "moment_elements"):
                setattr(joined, field_name, sum(getattr(shard, field_name) for shard in shards))
            for field_name in ("gradients", "lost", "changes", "reach", "not_finite"):
                setattr(joined, field_name, max(getattr(shard, field_name) for shard in shards))
            joined.updates = [max(counts) for counts in zip(*(shard.updates for shard in shards), strict=False)]
        return parts

    def loss(self, step: int) -> float:
        """Returns the mean of the ranks' losses of a step: of each rank the sum over its micro-batches."""
        return fmean(rank.steps[step].loss for rank in self.ranks)

    def squares(self, step: int, at_update: bool = False) -> dict[str, float]:
        """Returns parameter -> the square of its gradient's norm, over the ranks."""
        total, numbers = defaultdict[str, float](float), defaultdict[str, float](float)
        for rank in self.ranks:
            squares = rank.steps[step].at_update if at_update else rank.steps[step].before
            for name, (value, number) in squares.items():
                total[name] += value
                numbers[name] += number
        sizes = {name: self.sizes.get(name) or number / len(self.ranks) or 1 for name, number in numbers.items()}
        return {name: total[name] / max(1, round(numbers[name] / sizes[name])) for name in total}

    def norm(self, step: int, at_update: bool = False) -> float:
        """Returns the norm of all gradients of a step, after backward or as the optimizer got them."""
        return math.sqrt(sum(self.squares(step, at_update).values()))

    @property
    def copies(self) -> float | None:
        """Copies of each state in the job: 1.0 if they are partitioned over all ranks. None without states."""
        moments = {name: seen.moment_elements for name, seen in self.parts.items() if name in self.sizes}
        moments = {name: numel for name, numel in moments.items() if numel}
        return sum(moments.values()) / sum(self.sizes[name] for name in moments) if moments else None

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
        after_steps, bits = self.ranks[0].values[1:], []
        for name, seen in self.parts.items():
            if seen.is_copy and seen.changes > 0 and all(name in values for values in after_steps):
                bits.append({values[name] for values in after_steps})
        return self.steps > 1 and bool(bits) and all(len(distinct) == 1 for distinct in bits)

    @cached_property
    def reduces_by_hand(self) -> bool:
        """Whether a plain loop reduces all gradients over the ranks after backward, as if parameters were equal."""
        return self.reduces_late and self.reductions(self.steps - 1)[-1] > 0.9

    @property
    def skipped(self) -> list[int]:
        """Numbers of the steps whose update a scaler skipped."""
        return [number for number, step in enumerate(self.ranks[0].steps) if step.skipped]

    def unequal(self, kind: str, number: int) -> list[str]:
        """Returns the `values` or `buffers`, whole, whose bits differ between ranks after step `number`; 0: before."""
        by_rank: list[dict[str, int]] = [getattr(rank, kind)[number] for rank in self.ranks]
        return [name for name in by_rank[0] if len({bits[name] for bits in by_rank if name in bits}) > 1]

    def shared(self, kind: str) -> list[str]:
        """Returns the names of `values` or `buffers` that all ranks have whole."""
        first, *others = (getattr(rank, kind)[0] for rank in self.ranks)
        return [name for name in first if all(name in other for other in others)]

    @property
    def changed_frozen(self) -> list[str]:
        """Frozen parameters whose bits changed in the watched steps."""
        rank = self.ranks[0]
        return [name for name in rank.frozen if len({values[name] for values in rank.values if name in values}) > 1]

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
        dtypes = sorted({dtype for rank in self.ranks for dtype in rank.computes})
        return {dtype: dict(chain(*(rank.computes.get(dtype, {}).items() for rank in self.ranks))) for dtype in dtypes}

    @property
    def precision(self) -> str:
        """The narrowest dtype that computes or stores; bfloat16 in Muon's Newton-Schulz iteration."""
        stored = ((seen.in_model, seen.master, seen.gradient) for seen in self.parts.values())
        dtypes = {*self.computes, *chain.from_iterable(stored)}
        dtypes |= {"bfloat16" for seen in self.parts.values() if "Muon" in seen.optimizer}
        return next((dtype for dtype in NARROW if dtype in dtypes), "float32")

    def deviations(self, number: int) -> dict[str, Deviation]:
        """Returns parameter -> deviation from the reference after update `number`; 0: of the initial values."""
        total: dict[str, Deviation] = {}
        for rank in self.ranks:
            for name, own in rank.deviations[number].items() if number < len(rank.deviations) else ():
                total[name] = total[name].joined(own) if name in total else own
        return total
