"""The entries to the replay of traffic in one step of m micro-batches: elements that ranks exchange, and bytes between
device, host memory and files, both exactly.

An all-reduce counts its elements twice, the others once (ZeRO, arXiv 1910.02054, section 7.1). r micro-batches are
reduced: all (`accumulate` "every", the default of zero2 and zero3) or the last (default of ddp, zero1 and megatron).

ddp        2rψ                   all-reduce
buckets    (r + 1) · padded      zero1, zero2, megatron: reduce-scatters and one all-gather; all-reduces count twice
units      zero3: r reduce-scatters of the padded size of trained parameters, and per micro-batch these all-gathers:
             root: 1, or 2 if it is not kept from forward to backward, and 1 more each time that it is freed
             and one of its own modules reads it in backward
             a unit that forward uses u times: u, and 1 more if backward returns to it; 1 if it stays whole in between
             parameters that stay whole: none, but 1 per step for trained ones

bf16 halves bytes but not volume. Traffic of one collective with nodes, shard groups or quantization: groups.py.
Secondary shards serve every gather of a unit except the first in a step; for frozen units, every gather.

Control traffic is everything except parameters and gradients; payload bytes on each rank:

flags      4 bytes per trained parameter: which had a gradient on any rank                   our stages
           the same, per reduction: which were used                                          DDP, if asked for
norm       8 bytes, fp64, if a step takes the gradients' norm (clipping, overflow)           our stages
buffers    the module's, broadcast from rank 0 before a forward whose gradients are reduced  all

Under DDP every rank has whole gradients and computes their norm locally.

Between tiers the formula of shapes.py holds with its padding::

    whole shards    gradients go down and shards of parameters come up with their padding
    segments        an update in host memory sends and receives runs of parameters, without padding
    whole chunks    an update over files reads, writes and sends up the chunks that contain parameters

Direct I/O rounds each chunk up to a multiple of 4096 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..groups import GroupShape, Moved, slice_of
from ..layout import FlatBuffer
from ..shapes import FULL, POOL_ALIGN_BYTES, OptimizerShape, ParameterShape, PrecisionShape, Schedule, TierShape
from ..strategy import StrategyShape, buffers_of, gather_count, settle

REDUCTION, GATHER = "reduce_scatter", "all_gather"


def predict_traffic(
    strategy: StrategyShape, schedule: Schedule, groups: GroupShape, precision: PrecisionShape = FULL
) -> Moved:
    """Elements, padding included, and the bytes that each rank sends."""
    return sum(predict_parts(strategy, schedule, groups, precision).values(), Moved())


def predict_parts(
    strategy: StrategyShape, schedule: Schedule, groups: GroupShape, precision: PrecisionShape = FULL,
    rank: int | None = None,
) -> dict[str, Moved]:  # fmt: skip
    """The traffic by collective (records.COLLECTIVES); `predict_traffic` is the sum. `rank`: for pairwise exchanges,
    in which ranks that own matrices send different amounts; None: the mean over the ranks.
    """
    if groups.world_size == 1:
        return {}
    reductions = strategy.reductions(schedule.micro_batches)
    if not strategy.theory.optimizer:  # one ring over all ranks, in the parameters' dtype
        trained = [s for s in schedule.shapes if s.trainable]
        each = [groups.all_reduction(s.numel, s.element_bytes).times(reductions) for s in trained]
        return {"all_reduce": sum(each, Moved())}
    strategy = settle(strategy, schedule.shapes, groups.shard_ranks)
    by_all = strategy.reduce_with == "all_reduce"
    reduce = groups.all_reduction if by_all else groups.reduction
    reduced, gathered = Moved(), Moved()
    for unit, buffer in buffers_of(strategy, schedule.shapes, groups.shard_ranks):
        shape = schedule.shapes[buffer.spans[0].parameter]
        gathers = 1 if unit is None else schedule.micro_batches * gather_count(strategy, schedule, unit)
        for _, numel in buffer.units:
            if rank is not None and buffer.sizes is not None and not by_all:
                own, size = buffer.sizes[rank], shape.wire_bytes(precision)
                gathered += groups.owned_gather(own, shape.element_bytes).times(gathers)
                reduced += groups.owned_reduction(numel - own, size).times(reductions if gathers else 0)
                continue
            if unit is not None:  # secondary shards serve all gathers but the first if it is trained
                size = shape.element_bytes
                from_all = min(gathers, int(shape.trainable)) if groups.secondary else gathers
                gather = groups.first_gather if shape.trainable else groups.gather
                secondary = groups.secondary_gather(numel, size).times(gathers - from_all)
                gathered += gather(numel, size).times(from_all) + secondary
            elif shape.trainable:
                gathered += groups.exact_gather(numel, shape.element_bytes)
            if shape.trainable and gathers:
                reduced += reduce(numel, shape.wire_bytes(precision)).times(reductions)
    return {"all_reduce" if by_all else REDUCTION: reduced, GATHER: gathered}


# -- control ---------------------------------------------------------------------------------------


FLAG_BYTES, NORM_BYTES = 4, 8


def predict_control(strategy: StrategyShape, schedule: Schedule, world_size: int, norms: int, buffer_bytes: int) -> int:
    """Returns the control traffic of DDP or our stages. `norms`: how often a step computes the gradients' norm."""
    if world_size == 1:
        return 0
    reductions, flags = strategy.reductions(schedule.micro_batches), flags_bytes(schedule)
    if not strategy.theory.optimizer:
        return reductions * (buffer_bytes + flags * strategy.find_unused_parameters)
    return reductions * buffer_bytes + flags + NORM_BYTES * norms


def flags_bytes(schedule: Schedule) -> int:
    """Bytes of a 32-bit flag per trained parameter."""
    return FLAG_BYTES * sum(shape.trainable for shape in schedule.shapes)


# -- between tiers ---------------------------------------------------------------------------------


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
    links, n = Links(), groups.shard_ranks
    if tiers.medium is None:
        return links
    strategy, m, used = settle(strategy, schedule.shapes, n), schedule.micro_batches, set(schedule.arrivals)
    for unit, buffer in buffers_of(strategy, schedule.shapes, n):
        gathers = 1 if unit is None else m * gather_count(strategy, schedule, unit)
        reductions = strategy.reductions(m) if gathers else 0
        leaves = unit is not None and tiers.parameters
        shape = schedule.shapes[buffer.spans[0].parameter]
        traffic = _BufferTraffic(links, buffer, shape, optimizer, precision, tiers, leaves, gathers, reductions, norms)
        for index in range(n) if rank is None else [slice_of(rank, groups)]:
            for start, numel in buffer.units:
                traffic.add_shard(index, start, numel)
            if shape.trainable:
                traffic.add_segments(index, used)
    copies = groups.world_size // n if rank is None else 1
    return Links(*(size * copies for size in vars(links).values()))


@dataclass(frozen=True)
class _BufferTraffic:
    """Adds the traffic of a buffer's shards to `links`. `shape`: of one of its parameters, which are alike. `leaves`:
    parameter shards are offloaded. `gathers`, `reductions`: of a unit in a step.
    """

    links: Links
    buffer: FlatBuffer
    shape: ParameterShape
    optimizer: OptimizerShape
    precision: PrecisionShape
    tiers: TierShape
    leaves: bool
    gathers: int
    reductions: int
    norms: int

    def add_shard(self, index: int, start: int, unit_numel: int) -> None:
        """Adds what moves with the padding of slice `index` of a unit, or with whole chunks of its file."""
        links, tiers, shape, buffer = self.links, self.tiers, self.shape, self.buffer
        low, high = buffer.bounds(index, unit_numel)
        numel, parameter, align = high - low, buffer.element_bytes, buffer.align
        if self.leaves:
            links.up += self.gathers * numel * parameter
            links.read += self.gathers * self._chunks(numel, parameter)
        if not shape.trainable:
            return
        # reductions: gradients are cast on the host, or on their way into a file
        gradient, reduced = shape.gradient_bytes(self.precision), tiers.gradients_on_host(numel, align)
        sent = shape.wire_bytes(self.precision) if tiers.medium == "host" else gradient
        links.down += self.reductions * reduced * sent
        links.write += self.reductions * self._chunks(reduced, gradient)
        links.read += max(0, self.reductions - 1) * self._chunks(reduced, gradient)
        # the update: the first elements of a shard are on the host, and its parameters end before its padding
        on_host, stop = tiers.updated_on_host(numel, align), min(unit_numel, buffer.spans[-1].stop - start) - low
        stop = max(0, min(numel, stop))
        end = min(on_host, stop)
        state = self._chunks(on_host, self.optimizer.element_bytes or buffer.master_bytes, end)
        states = self._chunks(on_host, buffer.master_bytes, end) + self.optimizer.states * state
        links.read += states
        links.write += states
        if tiers.gradients:
            links.read += (1 + self.norms) * self._chunks(on_host, gradient, end)
        if not self.leaves:
            if tiers.medium == "nvme" or tiers.delayed:
                links.up += sum(last - first for first, last in self._touched(on_host, end)) * parameter
            return
        links.down += max(0, stop - on_host) * parameter
        for first, last in self._touched(numel, numel):
            size = self._on_disk((last - first) * parameter)
            from_host = first, min(last, on_host)
            from_device = max(first, on_host), min(last, max(on_host, stop))
            updates = [from_host] * (first < end) + [from_device] * (from_device[0] < from_device[1])
            links.write += size * len(updates)
            links.read += size * sum(update != (first, last) for update in updates)

    def add_segments(self, index: int, used: set[int]) -> None:
        """Adds gradients to an optimizer in another tier, and parameters up from host memory, without padding."""
        links, tiers, gradient = self.links, self.tiers, self.shape.gradient_bytes(self.precision)
        for parameter, _, first, numel, shard in self.buffer.held(index):
            on_host = tiers.updated_on_host(shard, self.buffer.align), tiers.gradients_on_host(shard, self.buffer.align)
            updated, reduced = (max(0, min(first + numel, stop) - first) for stop in on_host)
            if parameter in used:
                links.down += max(0, updated - reduced) * gradient
                links.up += max(0, reduced - updated) * gradient
            if tiers.medium == "host" and not (self.leaves or tiers.delayed):
                links.up += updated * self.buffer.element_bytes

    def _chunks(self, numel: int, element_bytes: int, end: int | None = None) -> int:
        """Bytes on disk of a file of `numel` elements, counting the chunks that begin before `end`."""
        chunks = self._touched(numel, numel if end is None else end)
        return sum(self._on_disk((last - first) * element_bytes) for first, last in chunks)

    def _touched(self, numel: int, end: int) -> Iterator[tuple[int, int]]:
        """Yields [first, last) of each chunk that begins before `end`; host memory has one chunk."""
        step = self.tiers.chunk_numel or max(1, numel)
        for first in range(0, min(numel, end), step):
            yield first, min(numel, first + step)

    def _on_disk(self, size: int) -> int:
        if self.tiers.medium != "nvme":
            return 0
        return -(-size // POOL_ALIGN_BYTES) * POOL_ALIGN_BYTES if self.tiers.direct else size
