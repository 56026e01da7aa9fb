"""The entry to the replay of traffic: elements moved in one step of m micro-batches, to the element.

An all-reduce counts 2 of the whole, the others 1 (ZeRO, arXiv 1910.02054, section 7.1). Of the micro-batches r are
reduced: all (`accumulate` "every", the default of zero2 and zero3) or the last (of ddp, zero1 and megatron).

ddp        2rψ                   all-reduce
buckets    (r + 1) · padded      zero1, zero2, megatron: reduce-scatters and one all-gather; all-reduces count twice
units      zero3: r reduce-scatters of the padded size of what is trained, and all-gathers, a micro-batch:
             of the root 1, or 2 if it is not kept from forward to backward, and 1 more each time that it is given
             back and a module of its own reads it in backward
             of a unit that forward uses u times u, and 1 more if backward comes back; 1 if it stays between these
             of what stays whole none, but 1 per step of what is trained

bf16 halves bytes, and no volume. Traffic of one collective in nodes, in shard groups and quantized: groups.py.
Secondary shards serve every gather of a unit but the first in a step; of what is frozen, every gather.

Control traffic is all that is neither parameters nor gradients, payload bytes on each rank:

flags      4 bytes per trained parameter: which had a gradient on any rank                   our stages
           the same, per reduction: which were used                                          DDP, if asked for
norm       8 bytes, fp64, if a step takes the gradients' norm (clipping, overflow)           our stages
buffers    the module's, broadcast from rank 0 before a forward that is reduced              all

Under DDP every rank has whole gradients and takes their norm alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..groups import GroupShape, Moved
from ..layout import FlatBuffer, by_kind, by_unit, lay_out, lay_out_buckets
from ..shapes import PrecisionShape, Schedule, wire_bytes
from ..strategy import StrategyShape, gathers_of, settle

REDUCTION, GATHER = "reduce_scatter", "all_gather"


def predict_volume(
    strategy: StrategyShape, schedule: Schedule, world_size: int, groups: GroupShape | None = None
) -> int:
    """Elements, padding included, on each rank; nothing moves in a world of one."""
    return round(predict_traffic(strategy, schedule, world_size, groups).volume)


def predict_traffic(
    strategy: StrategyShape, schedule: Schedule, world_size: int, groups: GroupShape | None = None,
    precision: PrecisionShape | None = None,
) -> Moved:  # fmt: skip
    """Elements, padding included, and the bytes that each rank sends."""
    return sum(predict_parts(strategy, schedule, world_size, groups, precision).values(), Moved())


def predict_parts(
    strategy: StrategyShape, schedule: Schedule, world_size: int, groups: GroupShape | None = None,
    precision: PrecisionShape | None = None,
) -> dict[str, Moved]:  # fmt: skip
    """The traffic by collective (records.COLLECTIVES); `predict_traffic` is the sum."""
    if world_size == 1:
        return {}
    reductions = strategy.reductions(schedule.micro_batches)
    groups = groups or GroupShape(world_size)
    if not strategy.theory.optimizer:  # one ring over all ranks, in the parameters' dtype
        trained = [s for s in schedule.shapes if s.trainable]
        each = [groups.all_reduction(s.numel, s.element_bytes).times(reductions) for s in trained]
        return {"all_reduce": sum(each, Moved())}
    strategy = settle(strategy, schedule.shapes, groups.shard_ranks)
    flow = _CollectiveTraffic(strategy, schedule, groups, precision or PrecisionShape(), reductions)
    (flow.of_units if strategy.theory.parameters else flow.of_buckets)()
    return {flow.reduces_by: flow.reduced, GATHER: flow.gathered}


class _CollectiveTraffic:
    """Adds up what our stages move in a step."""

    def __init__(
        self, strategy: StrategyShape, schedule: Schedule, groups: GroupShape, precision: PrecisionShape,
        reductions: int,
    ) -> None:  # fmt: skip
        self.strategy, self.schedule, self.groups = strategy, schedule, groups
        self.precision, self.reductions = precision, reductions
        self.reduced, self.gathered = Moved(), Moved()

    @property
    def reduces_by(self) -> str:
        """Name of the collective that reduces gradients."""
        return "all_reduce" if self.strategy.reduce_with == "all_reduce" else REDUCTION

    def of_buckets(self) -> None:
        """Adds the buckets, each reduced and gathered once."""
        trained = [i for i, s in enumerate(self.schedule.shapes) if s.trainable]
        shapes, n = self.schedule.shapes, self.groups.shard_ranks
        for kind in by_kind(shapes, trained[::-1]):
            for run in lay_out_buckets(shapes, kind, n, self.strategy.bucket_limit):
                for _, numel in run.units:
                    self.reduced += self._reduced(run, numel).times(self.reductions)
                    self.gathered += self.groups.exact_gather(numel, run.element_bytes)

    def of_units(self) -> None:
        """Adds the units as they are used; the small parameters that stay whole are gathered once."""
        small, units = by_unit(self.schedule.shapes, self.strategy.persistence_numel)
        for buffer, trained in self._laid_out(small):
            if trained:
                self.reduced += self._reduced(buffer, buffer.padded_numel).times(self.reductions)
                self.gathered += self.groups.exact_gather(buffer.padded_numel, buffer.element_bytes)
        for name, mine in units.items():
            gathers = self.schedule.micro_batches * gathers_of(self.strategy, self.schedule, name)
            for buffer, trained in self._laid_out(mine):
                self.gathered += self._gathered(buffer, gathers, trained)
                if trained and gathers:
                    self.reduced += self._reduced(buffer, buffer.padded_numel).times(self.reductions)

    def _laid_out(self, indices: Sequence[int]) -> list[tuple[FlatBuffer, bool]]:
        """Returns the buffer of each kind, and True where it is trained."""
        shapes = self.schedule.shapes
        return [
            (lay_out(shapes, kind, self.groups.shard_ranks), shapes[kind[0]].trainable)
            for kind in by_kind(shapes, indices)
        ]

    def _gathered(self, buffer: FlatBuffer, gathers: int, trained: bool) -> Moved:
        each = buffer.padded_numel, buffer.element_bytes
        from_all = (min(gathers, int(trained))) if self.groups.secondary else gathers
        whole = self.groups.gather(*each).times(from_all)
        return whole + self.groups.secondary_gather(*each).times(gathers - from_all)

    def _reduced(self, buffer: FlatBuffer, numel: int) -> Moved:
        size = wire_bytes(self.schedule.shapes[buffer.spans[0].parameter], self.precision)
        by_all = self.reduces_by == "all_reduce"
        return (self.groups.all_reduction if by_all else self.groups.reduction)(numel, size)


# -- control ---------------------------------------------------------------------------------------


FLAG_BYTES, NORM_BYTES = 4, 8


def predict_control(strategy: StrategyShape, schedule: Schedule, world_size: int, norms: int, buffer_bytes: int) -> int:
    """Returns the control traffic of DDP or of our stages. `norms`: how often a step takes the gradients' norm."""
    if world_size == 1:
        return 0
    reductions, flags = strategy.reductions(schedule.micro_batches), flags_bytes(schedule)
    if not strategy.theory.optimizer:
        return reductions * (buffer_bytes + flags * strategy.find_unused_parameters)
    return reductions * buffer_bytes + flags + NORM_BYTES * norms


def flags_bytes(schedule: Schedule) -> int:
    """Bytes of a 32-bit flag per trained parameter."""
    return FLAG_BYTES * sum(shape.trainable for shape in schedule.shapes)
