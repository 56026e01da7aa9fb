"""A strategy's theory: which states it partitions (`StrategyTheory`), with the literature that says so, its resolved
options (`StrategyShape`), and a second implementation of the engine's rules for them (zero/options.py,
zero/units/root.py).

The rows of figure 1 of ZeRO have no names here: strategies/table.py assigns one of them, or none, to each of its rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from .layout import FlatBuffer, bucket_buffers, by_kind, by_unit, lay_out
from .shapes import NOWHERE, ROOT, ParameterShape, Schedule, TierShape

AUTO = "auto"

ZERO, MEGATRON_CORE = "ZeRO, arXiv 1910.02054", "Megatron-core, dist_optimizer.md"


@dataclass(frozen=True)
class StrategyTheory:
    """A strategy's row in figure 1 of ZeRO (arXiv 1910.02054): which model states the ranks partition. Partitioned
    parameters are in module units (P_os+g+p); else partitioned optimizer states are in buckets of parameters; else
    everything is replicated.
    """

    parameters: bool = False
    gradients: bool = False
    optimizer: bool = False
    persistent_gradients: bool = False
    """The whole gradients are one buffer that lives as long as the engine, as in Megatron-core."""

    @property
    def has_buckets(self) -> bool:
        """Whether parameters are in flat buckets: ZeRO-1, ZeRO-2, Megatron's distributed optimizer."""
        return self.optimizer and not self.parameters

    @property
    def states_source(self) -> str:
        """The section on the memory of what it partitions."""
        if self.persistent_gradients:
            return MEGATRON_CORE
        if self.parameters:
            return f"{ZERO}, section 5.3 (P_os+g+p)"
        if self.gradients:
            return f"{ZERO}, section 5.2 (P_os+g)"
        return f"{ZERO}, section 5.1 (P_os)" if self.optimizer else f"{ZERO}, section 3.1"

    @property
    def volume_source(self) -> str:
        """The section on its communication."""
        if self.parameters:
            return f"{ZERO}, section 7.2.2"
        return f"{ZERO}, section 7.2.1" if self.optimizer else f"{ZERO}, section 7.1"


DDP = StrategyTheory()
ZERO1 = StrategyTheory(optimizer=True)
MEGATRON = StrategyTheory(optimizer=True, persistent_gradients=True)
ZERO2 = StrategyTheory(gradients=True, optimizer=True)
ZERO3 = StrategyTheory(parameters=True, gradients=True, optimizer=True)


@dataclass(frozen=True)
class StrategyShape:
    """The options of a resolved strategy section that theory needs; config/schema.py describes each."""

    theory: StrategyTheory
    accumulate: str = "last"
    bucket_bytes: int | str | None = None
    """Bytes, AUTO, or None if there are no buckets."""
    reduce_with: str = "reduce_scatter"
    persistence_numel: int = 0
    prefetch: int = 0
    keep_root: bool | str = True
    reshard_after_forward: bool = True
    shards: str = "parameters"
    """Or "masters": a rank keeps no half parameters beside its masters."""
    find_unused_parameters: bool = False

    @staticmethod
    def of(theory: StrategyTheory, section: Mapping[str, Any]) -> StrategyShape:
        """Returns the shape of a resolved section, ignoring keys that theory does not need."""
        names = {field.name for field in fields(StrategyShape)} - {"theory"}
        return replace(StrategyShape(theory), **{key: section[key] for key in names & section.keys()})

    def keeps_masters(self, shape: ParameterShape, tiers: TierShape = NOWHERE) -> bool:
        """Whether a rank's part of a parameter is its master alone."""
        alone = self.theory.parameters and self.shards == "masters" and tiers.medium is None
        return alone and shape.trainable and shape.is_half

    @property
    def bucket_limit(self) -> int:
        """Bytes of a bucket, once `settle` has replaced AUTO by a number."""
        assert isinstance(self.bucket_bytes, int), f"bucket_bytes={self.bucket_bytes} is not settled"
        return self.bucket_bytes

    def synchronizes(self, last: bool) -> bool:
        """Whether the gradients of a micro-batch are reduced over the ranks. `last`: it is the step's last."""
        return last or self.accumulate == "every"

    def reductions(self, micro_batches: int) -> int:
        """Reductions of each gradient in a step."""
        return micro_batches if self.accumulate == "every" else 1


# -- rules for `auto` ------------------------------------------------------------------------------


BUCKETS_PER_SHARD, BUCKETS_PER_MODEL = 2, 64
LEAST_BYTES, MOST_BYTES = 2**20, 25 * 2**20


def frees_root(strategy: StrategyShape, shapes: Sequence[ParameterShape]) -> bool:
    """Whether ZeRO-3 frees its root unit while backward runs in other units (zero/units/root.py)."""
    root = [shape for shape in shapes if shape.unit == ROOT]
    return strategy.keep_root == AUTO and len(root) < len(shapes) and not any(shape.pinned for shape in root)


def reads(shape: ParameterShape, left: int) -> bool:
    """Whether backward reads a parameter to make its gradient. `left`: gradients still to come, including this one."""
    return shape.reads[left - 1] if 0 < left <= len(shape.reads) else True


def settle(strategy: StrategyShape, shapes: Sequence[ParameterShape], shard_ranks: int) -> StrategyShape:
    """Replaces an automatic bucket_bytes by a number: psi/(2N) or psi/64 in bytes, within limits. `shard_ranks`: N."""
    if strategy.bucket_bytes != AUTO:
        return strategy
    psi_bytes = sum(shape.nbytes for shape in shapes if shape.trainable)
    size = max(psi_bytes // shard_ranks // BUCKETS_PER_SHARD, psi_bytes // BUCKETS_PER_MODEL, LEAST_BYTES)
    return replace(strategy, bucket_bytes=min(size, MOST_BYTES))


# -- buffers, and the all-gathers of a ZeRO-3 unit, from the order in which its modules run --------


def buffers_of(
    strategy: StrategyShape, shapes: Sequence[ParameterShape], shard_ranks: int
) -> Iterator[tuple[str | None, FlatBuffer]]:
    """Yields every buffer that is divided among the ranks, with its ZeRO-3 unit, or None if it stays whole between
    steps: a bucket, or small parameters. `strategy`: settled.
    """
    if strategy.theory.has_buckets:
        yield from ((None, bucket) for bucket in bucket_buffers(shapes, shard_ranks, strategy.bucket_limit))
    elif strategy.theory.parameters:
        small, units = by_unit(shapes, strategy.persistence_numel)
        for name, members in ((None, small), *units.items()):
            yield from ((name, lay_out(shapes, kind, shard_ranks)) for kind in by_kind(shapes, members))


def gather_count(strategy: StrategyShape, schedule: Schedule, name: str) -> int:
    """All-gathers of a unit in one micro-batch."""
    if name == ROOT:
        return 1 + (returns_of_root(schedule) if frees_root(strategy, schedule.shapes) else not strategy.keep_root)
    returns = schedule.returns or (True,) * len(schedule.uses)
    uses = [back for use, back in zip(schedule.uses, returns, strict=True) if use == name]
    if not strategy.reshard_after_forward:
        return min(1, len(uses))
    return len(uses) + any(uses)


def returns_of_root(schedule: Schedule) -> int:
    """All-gathers of the root in backward, if it is freed while backward runs in another unit."""
    left, whole, gathers = Counter(schedule.arrivals), True, 0
    for i in schedule.arrivals:
        shape = schedule.shapes[i]
        if shape.unit != ROOT:
            whole = False
        elif not whole and reads(shape, left[i]):
            whole, gathers = True, gathers + 1
        left[i] -= 1
    return gathers
