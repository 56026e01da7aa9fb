"""The entry to the replay of tiers: bytes between device, host memory and files in one step over all ranks.

The formula of tiers.py with its padding, to the byte::

    whole shards    gradients go down and shards of parameters come up with their padding
    segments        an update in host memory sends and receives runs of parameters, without padding
    whole chunks    an update over files reads, writes and sends up the chunks that contain parameters

Direct I/O rounds each chunk up to a multiple of 4096 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..groups import GroupShape, slice_of
from ..layout import FlatBuffer
from ..shapes import OptimizerShape, PrecisionShape, Schedule, gradient_bytes, wire_bytes
from ..strategy import StrategyShape, buffers_of, gathers_of, settle
from ..tiers import POOL_ALIGN_BYTES, TierShape


@dataclass
class Links:
    """Bytes of one step over all ranks: between devices and host memory, and between host memory and files."""

    down: int = 0
    up: int = 0
    read: int = 0
    write: int = 0


def predict_links(
    strategy: StrategyShape, schedule: Schedule, groups: GroupShape, optimizer: OptimizerShape,
    precision: PrecisionShape, tiers: TierShape, norms: int = 0, rank: int | None = None,
) -> Links:  # fmt: skip
    """Returns the traffic between tiers. `norms`: how often a step takes the gradients' norm (clipping, overflow).
    `rank`: the rank whose traffic to return; None: the sum over all ranks.
    """
    if tiers.medium is None:
        return Links()
    strategy = settle(strategy, schedule.shapes, groups.shard_ranks)
    flow = _LinkTraffic(strategy, schedule, groups, optimizer, precision, tiers, norms)
    if rank is not None:
        flow.slices, flow.copies = [slice_of(rank, groups)], 1
    return flow.run()


@dataclass(frozen=True)
class _Kind:
    """Properties shared by the shards of a buffer. Bytes of an element: `parameter`, `master`, `gradient`, `wire`.

    `leaves`: parameter shards are offloaded. `gathers`, `reductions`: of a unit in a step. `trained`: False if frozen.
    """

    parameter: int
    align: int
    master: int
    gradient: int
    wire: int
    leaves: bool
    gathers: int
    reductions: int
    trained: bool


class _LinkTraffic:
    """Accumulates `links`, shard by shard."""

    def __init__(
        self, strategy: StrategyShape, schedule: Schedule, groups: GroupShape, optimizer: OptimizerShape,
        precision: PrecisionShape, tiers: TierShape, norms: int,
    ) -> None:  # fmt: skip
        self.strategy, self.schedule, self.tiers, self.precision = strategy, schedule, tiers, precision
        self.n, self.copies = groups.shard_ranks, groups.world_size // groups.shard_ranks
        self.slices: Sequence[int] = range(self.n)
        self.optimizer = optimizer
        self.norms = norms
        self.used = set(schedule.arrivals)
        self.reductions = strategy.reductions(schedule.micro_batches)
        self.links = Links()

    def run(self) -> Links:
        """Adds every buffer, and returns the sums."""
        strategy, schedule = self.strategy, self.schedule
        for unit, buffer in buffers_of(strategy, schedule.shapes, self.n):
            gathers = 1 if unit is None else schedule.micro_batches * gathers_of(strategy, schedule, unit)
            shape = schedule.shapes[buffer.spans[0].parameter]
            kind = _Kind(
                buffer.element_bytes, buffer.align, buffer.master_bytes, gradient_bytes(shape, self.precision),
                wire_bytes(shape, self.precision), unit is not None and self.tiers.parameters, gathers,
                self.reductions if gathers else 0, shape.trainable,
            )  # fmt: skip
            self._add(buffer, kind)
        return self.links

    def _add(self, buffer: FlatBuffer, kind: _Kind) -> None:
        for start, numel in buffer.units:
            for rank in self.slices:
                low, high = buffer.bounds(rank, numel)
                shard, end = high - low, min(numel, buffer.spans[-1].stop - start) - low
                if kind.leaves:
                    self._count("up", kind.gathers * shard * kind.parameter)
                    self._count("read", kind.gathers * self._chunks(shard, kind.parameter))
                if kind.trained:
                    self._reduce(kind, self.tiers.gradients_away(shard, kind.align))
                    gone = self.tiers.updates_away(shard, kind.align)
                    self._update(kind, shard, gone, max(0, min(shard, end)))
        if kind.trained:
            for rank in self.slices:
                self._update_segments(kind, buffer, rank)

    def _reduce(self, kind: _Kind, away: int) -> None:
        """Adds a reduction; gradients are cast on the host, or on their way into a file."""
        size = kind.wire if self.tiers.medium == "host" else kind.gradient
        self._count("down", kind.reductions * away * size)
        self._count("write", kind.reductions * self._chunks(away, kind.gradient))
        self._count("read", max(0, kind.reductions - 1) * self._chunks(away, kind.gradient))

    def _update(self, kind: _Kind, shard: int, gone: int, end: int) -> None:
        """Adds the update of a shard; its first `gone` elements are on the host, and its parameters end at `end`."""
        end, stop = min(gone, end), end
        state = self._chunks(gone, self.optimizer.element_bytes or kind.master, end)
        states = self._chunks(gone, kind.master, end) + self.optimizer.states * state
        self._count("read", states)
        self._count("write", states)
        if self.tiers.gradients:
            self._count("read", (1 + self.norms) * self._chunks(gone, kind.gradient, end))
        if not kind.leaves:
            if self.tiers.medium == "nvme" or self.tiers.delayed:
                self._count("up", sum(numel for numel, _ in self._touched(gone, end)) * kind.parameter)
            return
        self._count("down", max(0, stop - gone) * kind.parameter)
        for numel, (first, last) in self._touched(shard, shard):
            size = self._on_disk(numel * kind.parameter)
            from_host, own = (first, min(last, gone)), (max(first, gone), min(last, max(gone, stop)))
            updates = [from_host] * (first < end) + [own] * (own[0] < own[1])
            self._count("write", size * len(updates))
            self._count("read", size * sum(update != (first, last) for update in updates))

    def _update_segments(self, kind: _Kind, buffer: FlatBuffer, rank: int) -> None:
        """Adds traffic by segments: gradients to an optimizer in another tier, and parameters up from host memory."""
        for parameter, _, first, numel, shard in buffer.held(rank):
            gone = self.tiers.updates_away(shard, kind.align)
            away = self.tiers.gradients_away(shard, kind.align)
            updated, given = (max(0, min(first + numel, stop) - first) for stop in (gone, away))
            if parameter in self.used:
                self._count("down", max(0, updated - given) * kind.gradient)
                self._count("up", max(0, given - updated) * kind.gradient)
            if self.tiers.medium == "host" and not (kind.leaves or self.tiers.delayed):
                self._count("up", updated * kind.parameter)

    def _chunks(self, numel: int, element_bytes: int, end: int | None = None) -> int:
        """Bytes on disk of a file of `numel` elements, counting the chunks that begin before `end`."""
        return sum(self._on_disk(n * element_bytes) for n, _ in self._touched(numel, numel if end is None else end))

    def _touched(self, numel: int, end: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yields (elements, (first, last)) of each chunk that begins before `end`; host memory has one chunk."""
        step = self.tiers.chunk_numel or max(1, numel)
        for first in range(0, min(numel, end), step):
            last = min(numel, first + step)
            yield last - first, (first, last)

    def _on_disk(self, size: int) -> int:
        if self.tiers.medium != "nvme":
            return 0
        return -(-size // POOL_ALIGN_BYTES) * POOL_ALIGN_BYTES if self.tiers.direct else size

    def _count(self, link: str, size: int) -> None:
        setattr(self.links, link, getattr(self.links, link) + size * self.copies)
