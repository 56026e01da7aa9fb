"""Shapes -> offsets, padding, shards, and the order of a parameter's elements: pure arithmetic.

[Note: the coordinates of a unit]
A *unit* is a range of elements that are communicated together. It consists of *pieces*, each a range of one
parameter's elements (a parameter larger than a bucket has a piece in each of several)::

    unit      | piece of p0 |gap| piece of p1  | piece of p2 |   padding   |
              0                 ^offset                                    ^padded_numel
    shards    |  rank 0             |  rank 1             |  rank 2        |
              0                     ^shard_numel

Every rank owns one shard of `shard_numel = padded_numel / N` elements of *every* unit, independent of the
parameters' boundaries. A rank's part of a parameter is a *segment*: piece ∩ shard.

[Note: owned]
An optimizer that mixes a whole matrix (optim/segments.py) needs it on one rank. In a unit of owned parameters the
pieces are in the order of their owners, and a rank's shard is all that it owns: the shards' `sizes` differ, and may be
0.

[Note: alignment]
Parameters start, and shards and buckets end, at multiples of `align` elements (64 bytes). A fused optimizer updates
the tail of a tensor with scalar code that rounds differently from its vector code; boundaries at multiples of the
vector keep every element in the same code path as in the whole parameter, so that a sharded update equals the whole
one bit for bit. The gaps cost at most 60 bytes per parameter.

[Note: memory order]
The order of a parameter's elements is preserved, so that a shard is computed with the whole parameter's kernels.
A flat buffer holds a parameter's elements in the order of its own memory: channels-last convolutions and transposed
matrices keep their strides, and with them their kernels and, on some CPUs, their rounding. Every range of a parameter's
elements in this package (pieces, segments, chunks of a checkpoint) counts in that order, usually row-major.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch


@dataclass(frozen=True)
class Range:
    """Elements [start, stop) of parameter number `parameter`, at `offset` of a buffer (all in elements)."""

    parameter: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements in this range."""
        return self.stop - self.start


class Piece(Range):
    """A unit's part of a parameter; `offset` counts from the start of the unit."""


class Segment(Range):
    """One rank's part of a parameter; `offset` counts from the start of the rank's shard."""


@dataclass(frozen=True)
class Layout:
    """The pieces of one unit and its partition over N ranks. `tail`: elements kept free at the unit's end. `sizes`:
    elements of each rank's shard if parameters are owned; None: all are equal.
    """

    pieces: tuple[Piece, ...]
    world_size: int
    align: int = 1
    tail: int = 0
    sizes: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """Number of parameter elements, without padding."""
        return sum(piece.numel for piece in self.pieces)

    @cached_property
    def shard_numel(self) -> int:
        """Elements per rank, a multiple of `align`, if all shards are equal."""
        assert self.sizes is None
        return _round_up(-(-(self._end + self.tail) // self.world_size), self.align)

    @property
    def _end(self) -> int:
        return self.pieces[-1].offset + self.pieces[-1].numel if self.pieces else 0

    def bounds(self, rank: int) -> tuple[int, int]:
        """[start, stop) of `rank`'s shard."""
        if self.sizes is None:
            return rank * self.shard_numel, (rank + 1) * self.shard_numel
        return self._starts[rank], self._starts[rank + 1]

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.sizes or (), initial=0))

    @cached_property
    def padded_numel(self) -> int:
        """Elements that are communicated: N shards."""
        return self.shard_numel * self.world_size if self.sizes is None else sum(self.sizes)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(offset, elements) of all padding."""
        ends = [0, *(piece.offset + piece.numel for piece in self.pieces)]
        starts = [*(piece.offset for piece in self.pieces), self.padded_numel]
        return tuple((end, start - end) for end, start in zip(ends, starts, strict=True) if start > end)

    def segments(self, rank: int, max_numel: int | None = None) -> Iterator[Segment]:
        """Yields the segments of `rank`'s shard, in order; those above `max_numel` are split, unless owned."""
        low, high = self.bounds(rank)
        max_numel = max_numel if self.sizes is None else None
        for piece in self.pieces:
            first, last = max(piece.offset, low), min(piece.offset + piece.numel, high)
            shift = piece.start - piece.offset
            step = max_numel or max(1, last - first)
            for start in range(first, last, step):
                yield Segment(piece.parameter, start + shift, min(start + step, last) + shift, start - low)


Owners = Mapping[int, int]
"""Number of a parameter -> the rank that owns it whole."""


def one_unit(
    numels: Sequence[tuple[int, int]], world_size: int, align: int = 1, tail: int = 0, owners: Owners | None = None
) -> Layout:
    """Lays out a unit of whole parameters. `numels`: (parameter, elements), in order; empty ones are left out. With
    `owners` they are in the order of their owners, each whole in its owner's shard.
    """
    by_owner: list[list[tuple[int, int]]] = [[] for _ in range(1 if owners is None else world_size)]
    for parameter, numel in numels:
        by_owner[0 if owners is None else owners[parameter]] += [(parameter, numel)] * (numel > 0)
    pieces, sizes, start = [], [], 0
    for rank, owned in enumerate(by_owner):
        offset = start
        for parameter, numel in owned:
            pieces.append(Piece(parameter, 0, numel, offset))
            offset = _round_up(offset + numel, align)
        end = _round_up(offset + tail * (rank == world_size - 1), align)
        sizes.append(end - start)
        start = end
    return Layout(tuple(pieces), world_size, align, tail, None if owners is None else tuple(sizes))


def buckets(
    numels: Sequence[tuple[int, int]], bucket_numel: int, world_size: int, align: int = 1, owners: Owners | None = None
) -> list[list[Layout]]:
    """Lays out parameters in units of at most `bucket_numel` elements (rounded up to a multiple of N · `align`).

    An inner list is one buffer's content: one unit of whole parameters, or the equal units that divide a parameter of
    more than `bucket_numel` elements; with `owners` such a parameter is one unit. So a model is moved into its buffers
    one buffer at a time.
    """
    bucket_numel = _round_up(bucket_numel, world_size * align)
    runs: list[list[Layout]] = []
    waiting: list[tuple[int, int]] = []
    for parameter, numel in numels:
        room = bucket_numel - sum(_round_up(n, align) for _, n in waiting)
        if numel > room and waiting:
            runs.append([one_unit(waiting, world_size, align, owners=owners)])
            waiting = []
        if numel > bucket_numel and owners is None:
            step = _round_up(-(-numel // -(-numel // bucket_numel)), world_size * align)
            pieces = (Piece(parameter, start, min(numel, start + step), 0) for start in range(0, numel, step))
            runs.append([Layout((piece,), world_size, align) for piece in pieces])
        elif numel:
            waiting.append((parameter, numel))
    if waiting:
        runs.append([one_unit(waiting, world_size, align, owners=owners)])
    return runs


def _round_up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


@dataclass(frozen=True)
class MemoryOrder:
    """Dense strides of a tensor of `shape`: its elements fill (numel,) elements of memory, without overlap."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> MemoryOrder:
        """Returns a dense tensor's order; for others, the order that torch preserves without gaps and repetitions."""
        return cls(tuple(tensor.shape), torch.empty_like(tensor, device="meta").stride())

    @classmethod
    def from_dims(cls, shape: Sequence[int], dims: Sequence[int]) -> MemoryOrder:
        """Builds the order whose dimensions, from the slowest to the fastest, are `dims`, a permutation."""
        strides, step = [1] * len(shape), 1
        for d in reversed(dims):
            strides[d], step = step, step * shape[d]
        return cls(tuple(shape), tuple(strides))

    @cached_property
    def dims(self) -> tuple[int, ...]:
        """The dimensions from the slowest to the fastest; those of size one, with arbitrary strides, first."""
        several = [d for d, size in enumerate(self.shape) if size > 1]
        return tuple(d for d in range(len(self.shape)) if d not in several) + tuple(
            sorted(several, key=lambda d: -self.strides[d])
        )

    @cached_property
    def is_row_major(self) -> bool:
        """True if elements are ordered as in a contiguous tensor."""
        several = [d for d in self.dims if self.shape[d] > 1]
        return 0 in self.shape or several == sorted(several)

    def agrees(self, other: MemoryOrder) -> bool:
        """Returns True if both orders agree, ignoring the strides of dimensions of size one."""
        return self.shape == other.shape and (self.dims == other.dims or (self.is_row_major and other.is_row_major))

    def flatten(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the elements of a tensor of `shape` in this order, (numel,), contiguous; a view if possible."""
        return (tensor if self.is_row_major else tensor.permute(self.dims)).reshape(-1).contiguous()

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the view of `flat`, (numel,), that has `shape` and `strides`."""
        return flat.as_strided(self.shape, self.strides, flat.storage_offset())
