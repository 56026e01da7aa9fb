"""Shapes -> offsets, padding, shards: pure arithmetic, no tensors.

[Note: the coordinates of a unit]
A *unit* is a run of elements that move together. It is made of *pieces*, each a range of one
parameter's elements (a parameter that straddles two buckets has a piece in each)::

    unit      | piece of p0 |gap| piece of p1  | piece of p2 |   padding   |
              0                 ^offset                                    ^padded_numel
    shards    |  rank 0             |  rank 1             |  rank 2        |
              0                     ^shard_numel

Every rank owns one shard of `shard_numel = padded_numel / N` elements of *every* unit, whatever the
edges of the parameters are. What a rank owns of a parameter is a *segment*: piece ∩ shard.

[Note: alignment]
Parameters start, and shards and buckets end, at multiples of `align` elements (64 bytes). A fused
optimizer updates the tail of a tensor with scalar code that rounds unlike its vector code; cuts at
multiples of the vector leave every element on the side where it is in the whole parameter, so that a
sharded update is equal to the whole one bit for bit. The gaps cost at most 60 bytes a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Range:
    """Elements [start, stop) of parameter number `parameter`, at `offset` of something (all in elements)."""

    parameter: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        """Elements in this range."""
        return self.stop - self.start


class Piece(Range):
    """What a unit holds of a parameter; `offset` counts from the start of the unit."""


class Segment(Range):
    """What one rank owns of a parameter; `offset` counts from the start of the rank's shard."""


@dataclass(frozen=True)
class Layout:
    """Where the pieces of one unit lie and how N ranks share it."""

    pieces: tuple[Piece, ...]
    world_size: int
    align: int = 1

    @property
    def numel(self) -> int:
        """Elements that are parameters' own, padding apart."""
        return sum(piece.numel for piece in self.pieces)

    @cached_property
    def shard_numel(self) -> int:
        """Elements that each rank owns, a multiple of `align`."""
        end = self.pieces[-1].offset + self.pieces[-1].numel if self.pieces else 0
        return _round_up(-(-end // self.world_size), self.align)

    @property
    def padded_numel(self) -> int:
        """Elements that travel: N shards."""
        return self.shard_numel * self.world_size

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(offset, elements) of everything that is no parameter's own."""
        ends = [0, *(piece.offset + piece.numel for piece in self.pieces)]
        starts = [*(piece.offset for piece in self.pieces), self.padded_numel]
        return tuple((end, start - end) for end, start in zip(ends, starts, strict=True) if start > end)

    def segments(self, rank: int) -> Iterator[Segment]:
        """The segments of `rank`'s shard, in the order of the pieces."""
        low, high = rank * self.shard_numel, (rank + 1) * self.shard_numel
        for piece in self.pieces:
            first, last = max(piece.offset, low), min(piece.offset + piece.numel, high)
            if first < last:
                shift = piece.start - piece.offset
                yield Segment(piece.parameter, first + shift, last + shift, first - low)


def one_unit(numels: Sequence[tuple[int, int]], world_size: int, align: int = 1) -> Layout:
    """A unit that holds whole parameters. `numels`: (parameter, elements), in order; empty ones are left out."""
    pieces, offset = [], 0
    for parameter, numel in numels:
        if numel:
            pieces.append(Piece(parameter, 0, numel, offset))
            offset = _round_up(offset + numel, align)
    return Layout(tuple(pieces), world_size, align)


def buckets(numels: Sequence[tuple[int, int]], bucket_numel: int, world_size: int, align: int = 1) -> list[Layout]:
    """Cuts parameters, laid end to end, into constant-size units that parameters may straddle.

    `bucket_numel` is rounded up to a multiple of N · `align`, so that only the last unit is padded at its
    end. The units lie end to end: unit k starts at k · bucket_numel of the flat buffer.
    """
    bucket_numel = _round_up(bucket_numel, world_size * align)
    units: dict[int, list[Piece]] = {}
    flat = 0
    for parameter, numel in numels:
        start, flat = 0, _round_up(flat, align)
        while start < numel:
            number, offset = divmod(flat, bucket_numel)
            stop = min(numel, start + bucket_numel - offset)
            units.setdefault(number, []).append(Piece(parameter, start, stop, offset))
            flat += stop - start
            start = stop
    return [Layout(tuple(pieces), world_size, align) for pieces in units.values()]


def _round_up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple
