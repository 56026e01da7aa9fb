"""Sizes of units and shards, from shapes alone: a second implementation of the engine's layout, compared by tests.

Parameters start, and shards end, at multiples of 64 bytes (zero/layout.py says why).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from .shapes import ROOT, ParameterShape, owners_of, trainable

PIECE_BYTES, SLOTS = 2**20, 2

TAIL_NUMEL = 8
"""Elements kept free at the end of a ZeRO-3 unit."""


@dataclass(frozen=True)
class ParameterSpan:
    """`parameter`'s place in a flat buffer, in elements: [start, stop)."""

    parameter: int
    start: int
    stop: int


@dataclass(frozen=True)
class FlatBuffer:
    """Parameters of one element size laid end to end, cut every `unit_numel` elements into units shared by N ranks.
    `tail`: elements kept free at the end. `align`: shards end at multiples of this many elements.
    """

    spans: tuple[ParameterSpan, ...]
    element_bytes: int
    unit_numel: int | None
    """None: the whole buffer is one unit."""
    world_size: int
    tail: int = 0
    align: int = 1
    sizes: tuple[int, ...] | None = None
    """Elements of each rank's shard of owned matrices, which are one unit; None: all shards are equal."""

    @property
    def end(self) -> int:
        """Elements up to the end of the last parameter."""
        return self.spans[-1].stop + self.tail if self.spans else 0

    @cached_property
    def units(self) -> list[tuple[int, int]]:
        """(start, padded elements) of each unit."""
        if self.sizes is not None:
            return [(0, sum(self.sizes))]
        step = self.world_size * self.align
        size = self.unit_numel or _up(self.end, step)
        return [(start, min(size, _up(self.end - start, step))) for start in range(0, self.end, size)]

    def bounds(self, rank: int, numel: int) -> tuple[int, int]:
        """[start, stop) of `rank`'s shard of a unit of `numel` padded elements."""
        if self.sizes is not None:
            start = sum(self.sizes[:rank])
            return start, start + self.sizes[rank]
        return rank * numel // self.world_size, (rank + 1) * numel // self.world_size

    def shard_numel(self, rank: int) -> int:
        """Elements of `rank`'s shards over all units."""
        return sum(stop - start for _, numel in self.units for start, stop in (self.bounds(rank, numel),))

    @property
    def numel(self) -> int:
        """Elements of parameters."""
        return sum(span.stop - span.start for span in self.spans)

    @property
    def padded_numel(self) -> int:
        """Elements of all units, padding included."""
        return sum(numel for _, numel in self.units)

    @property
    def padded_bytes(self) -> int:
        """Bytes of all units, padding included."""
        return self.padded_numel * self.element_bytes

    @property
    def is_half(self) -> bool:
        """Whether the parameters have fp32 masters."""
        return self.element_bytes < 4

    @property
    def master_bytes(self) -> int:
        """Bytes of an element as the optimizer updates it: fp32, or the parameter's own dtype if wider."""
        return max(4, self.element_bytes)

    def held(self, rank: int, most: int | None = None) -> list[tuple[int, int, int, int, int]]:
        """Returns (parameter, index of the unit, first element in the shard, elements, elements of the shard) of each
        segment of `rank`'s shards, a run of one parameter's elements. `most`: largest segment in elements; None: not
        cut.
        """
        segments = _runs(self.pattern, rank, most)
        return [(self.spans[at].parameter, unit, first, numel, shard) for at, unit, first, numel, shard in segments]

    @cached_property
    def pattern(self) -> FlatBuffer:
        """The buffer with its parameters numbered from 0, so that equal layers of a model have equal patterns."""
        return replace(self, spans=tuple(ParameterSpan(at, s.start, s.stop) for at, s in enumerate(self.spans)))


@lru_cache(maxsize=4096)  # a large model has few patterns, each of them once a layer
def _runs(pattern: FlatBuffer, rank: int, most: int | None) -> list[tuple[int, int, int, int, int]]:
    segments = []
    for number, (start, numel) in enumerate(pattern.units):
        low, high = (start + bound for bound in pattern.bounds(rank, numel))
        for span in pattern.spans:
            common = min(high, span.stop) - max(low, span.start)
            step = max(1, common) if most is None or pattern.sizes is not None else most
            first = max(low, span.start) - low
            segments += [
                (span.parameter, number, first + done, min(step, common - done), high - low)
                for done in range(0, common, step)
            ]
    return segments


def lay_out(
    shapes: Sequence[ParameterShape], indices: Sequence[int], world_size: int, tail: int = TAIL_NUMEL
) -> FlatBuffer:
    """Lays the parameters `indices`, all of one element size, end to end in one unit."""
    size, align = _kind(shapes, indices)
    if indices and shapes[indices[0]].matrix is not None:
        return _lay_out_owned(shapes, indices, world_size, tail)
    spans, end = [], 0
    for i in indices:
        if shapes[i].numel:
            start = _up(end, align)
            end = start + shapes[i].numel
            spans.append(ParameterSpan(i, start, end))
    return FlatBuffer(tuple(spans), size, None, world_size, tail, align)


def _lay_out_owned(shapes: Sequence[ParameterShape], indices: Sequence[int], world_size: int, tail: int) -> FlatBuffer:
    """Lays matrices in the order of their owners, each in its owner's shard."""
    (size, align), owners = _kind(shapes, indices), _owners(tuple(shapes), world_size)
    spans, sizes, end = [], [], 0
    by_owner: dict[int, list[int]] = {}
    for i in indices:
        by_owner.setdefault(owners[i], []).append(i)
    for rank in range(world_size):
        start = end
        for i in by_owner.get(rank, []):
            spans.append(ParameterSpan(i, end, end + shapes[i].numel))
            end = _up(end + shapes[i].numel, align)
        end = _up(end + tail * (rank == world_size - 1), align)
        sizes.append(end - start)
    return FlatBuffer(tuple(spans), size, None, world_size, tail, align, tuple(sizes))


_owners = lru_cache(maxsize=16)(owners_of)


def bucket_buffers(shapes: Sequence[ParameterShape], world_size: int, bucket_bytes: int) -> list[FlatBuffer]:
    """Returns the buckets of all kinds in the order in which they are sent, that of each bucket's last gradient."""
    kinds = by_kind(shapes, trainable(shapes)[::-1])
    buffers = [buffer for kind in kinds for buffer in lay_out_buckets(shapes, kind, world_size, bucket_bytes)]
    return sorted(buffers, key=lambda buffer: -min(span.parameter for span in buffer.spans))


def lay_out_buckets(
    shapes: Sequence[ParameterShape], indices: Sequence[int], world_size: int, bucket_bytes: int
) -> list[FlatBuffer]:
    """Packs parameters into buckets of at most `bucket_bytes`, rounded up; splits a larger one into equal buckets."""
    size, align = _kind(shapes, indices)
    most = _up(bucket_bytes // size, world_size * align)
    buffers: list[FlatBuffer] = []
    group: list[int] = []
    filled = 0

    def close() -> None:
        if group:
            buffers.append(lay_out(shapes, group, world_size, tail=0))

    for i in indices:
        numel = shapes[i].numel
        if numel > most or filled + numel > most:
            close()
            group, filled = [], 0
        if numel > most and shapes[i].matrix is not None:
            buffers.append(lay_out(shapes, [i], world_size, tail=0))
        elif numel > most:
            step = _up(-(-numel // -(-numel // most)), world_size * align)
            buffers.append(FlatBuffer((ParameterSpan(i, 0, numel),), size, step, world_size, align=align))
        elif numel:
            group.append(i)
            filled += _up(numel, align)
    close()
    return buffers


def _kind(shapes: Sequence[ParameterShape], indices: Sequence[int]) -> tuple[int, int]:
    """Bytes of an element, and the number of elements to whose multiples parameters and shards are aligned."""
    shape = shapes[indices[0]] if indices else ParameterShape(0, 4, True, ROOT)
    return shape.element_bytes, shape.align


def slots_bytes(padded_bytes: int, world_size: int, own_bytes: int | None = None) -> int:
    """Returns a reduction's receive buffer: at most SLOTS pieces of a slice. `own_bytes`: if slices differ."""
    part = padded_bytes // world_size if own_bytes is None else own_bytes
    pieces = -(-part // PIECE_BYTES) * (world_size - 1)
    return min(SLOTS, pieces) * min(PIECE_BYTES, part)


def by_kind(shapes: Sequence[ParameterShape], indices: Sequence[int]) -> list[list[int]]:
    """Splits `indices` by (trainable, element size, owned?), in order."""
    kinds: dict[tuple[bool, int, bool], list[int]] = {}
    for i in indices:
        owned = shapes[i].matrix is not None
        kinds.setdefault((shapes[i].trainable, shapes[i].element_bytes, owned), []).append(i)
    return list(kinds.values())


def by_unit(shapes: Sequence[ParameterShape], persistence_numel: int = 0) -> tuple[list[int], dict[str, list[int]]]:
    """Returns the small parameters that stay whole, and the other parameters of each ZeRO-3 unit, the root first."""
    small: list[int] = []
    units: dict[str, list[int]] = {ROOT: []}
    for i, shape in enumerate(shapes):
        if shape.numel:
            (small if shape.numel <= persistence_numel else units.setdefault(shape.unit, [])).append(i)
    return small, units


def _up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple
