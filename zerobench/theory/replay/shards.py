"""A rank's shards, which are never freed, and the buffers of an update: the same in every stage.

    master      4 bytes an element of a shard below fp32, padding included
    optimizer   states of each segment (parameter ∩ shard), and 4-byte counts; segments are cut at the size of a tile
    tile        fp32 gradients in place of half-precision ones, for the segments that are updated together

Tiles are used if gradients are cast, if the optimizer is not fused and so needs temporaries, or if it runs in another
tier (tiers.py). In another tier, fp32 parameters have masters too; gradients are copied to a tile before they are cast;
and half-precision parameters go up through two staging buffers of 1 Mi elements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..layout import FlatBuffer
from ..shapes import OptimizerShape, PrecisionShape, Schedule
from ..tiers import NOWHERE, STAGING, STAGING_NUMEL, TierShape
from .live_bytes import Replay

HALF_BYTES = 2


@dataclass(frozen=True)
class Shards:
    """One rank's shards of `buffers`, all of them trained, divided among `world_size` ranks."""

    buffers: Sequence[FlatBuffer]
    world_size: int
    optimizer: OptimizerShape
    precision: PrecisionShape
    tiers: TierShape = NOWHERE
    owner: int = 0
    """Rank whose owned matrices are played."""

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks to choose the fullest from: only the owner, if there are owned matrices."""
        return (self.owner,) if any(b.sizes for b in self.buffers) else range(self.world_size)

    def hold(self, replay: Replay, schedule: Schedule) -> None:
        """Allocates masters, and the optimizer states of the rank that owns most of the parameters in use."""
        used, ranks = set(schedule.arrivals), self.ranks
        masters = {away: sum(self._master_bytes(b, away) for b in self.buffers) for away in (False, True)}
        replay.hold("master", "all", masters[False])
        replay.hold("optimizer", "all", max(self.kept_bytes(rank, False, used) for rank in ranks))
        if replay.host is None:
            return
        kept = self._host_bytes(self._host_rank(replay.host, used), used)
        if self.tiers.medium == "nvme":
            replay.host.hold("communication", "pool", self.tiers.pool_bytes)
            # one scalar per dtype stands for the tensors in files
            dtypes = {b.master_bytes for b in self.buffers} if self.tiers.optimizer else set()
            dtypes |= {b.element_bytes for b in self.buffers} if self.tiers.parameters else set()
            replay.host.hold("optimizer", "counts", kept + sum(dtypes))
            sizes = [(numel, b.master_bytes) for b in self.buffers for numel in self._units(b, True)]
            states = sum(self.optimizer.states_bytes(*size) for size in sizes)
            replay.files += masters[True] + states + self._gradient_bytes()
        else:
            replay.host.hold("master", "all", masters[True])
            replay.host.hold("optimizer", "all", kept)
            replay.host.hold("gradients", "away", self._gradient_bytes() * (1 + self.tiers.delayed))
        if self.tiers.optimizer and not self.tiers.parameters and any(b.is_half for b in self.buffers):
            replay.host.hold("parameters", "on their way up", STAGING * STAGING_NUMEL * HALF_BYTES)

    def update(self, replay: Replay, schedule: Schedule) -> None:
        """Plays the update: gradients are copied to the optimizer's tier, and cast if needed."""
        here, away = (any(True for b in self.buffers for _ in self._units(b, away)) for away in (False, True))
        if here:
            most = max(self._tile_numel_of(rank) for rank in self.ranks)
            name = "tile" if self.precision.tile_bytes is not None else "cast"  # all at once: a term of the formula
            replay.hold("gradients", name, most * self._tile_bytes(away=False))
            replay.drop("gradients", name)
        if away and replay.host is not None:
            most = self._tile_numel_of(self._host_rank(replay.host, set(schedule.arrivals)))
            replay.host.hold("gradients", "tile", most * self._tile_bytes(away=True))
            replay.host.drop("gradients", "tile")

    def _tile_bytes(self, away: bool) -> int:
        """Bytes of a tile per element: the copy from the other tier plus the cast."""
        there, back = self.tiers.optimizer, self.tiers.gradients
        crosses = (there and not back) if away else (back and not there)
        return crosses * (self.precision.gradient_bytes if self.casts else 4) + 4 * self.casts

    def _host_rank(self, host: Replay, used: set[int]) -> int:
        """Returns the rank that is played: by default the one that uses most host memory. One rank may have most
        states, and another the largest tile.
        """
        if host.shard is not None:
            return host.shard
        size = self._tile_bytes(away=True)
        return max(self.ranks, key=lambda r: self._host_bytes(r, used) + size * self._tile_numel_of(r))

    def _host_bytes(self, rank: int, used: set[int]) -> int:
        """Bytes of the optimizer's states that stay in host memory."""
        return self.kept_bytes(rank, True, used, counts_only=self.tiers.medium == "nvme")

    @property
    def casts(self) -> bool:
        """Whether gradients are cast to their masters' dtype: not by a kernel that reads them as they are."""
        return (
            self.precision.tile_bytes != 0
            and self.precision.gradient_bytes < 4
            and any(b.is_half for b in self.buffers)
        )

    @property
    def tile_numel(self) -> int | None:
        """Maximum number of elements that are updated together; None: all of them."""
        if not self.precision.tile_bytes:
            return None
        if self.optimizer.fused and not self.casts and self.tiers.medium is None:
            return None
        align = self.optimizer.align
        return max(align, self.precision.tile_bytes // 4 // align * align)

    def _units(self, buffer: FlatBuffer, away: bool) -> Iterator[int]:
        """Yields the nonzero number of elements of each shard updated on the host (`away`) or on the device."""
        for shard in self._shards_of(buffer):
            gone = self.tiers.updates_away(shard, buffer.align)
            if numel := gone if away else shard - gone:
                yield numel

    def _shards_of(self, buffer: FlatBuffer) -> list[int]:
        """Returns the elements of the rank's shard of each unit."""
        return [buffer.shard_numel(self.owner) if buffer.sizes else n // self.world_size for _, n in buffer.units]

    def _master_bytes(self, buffer: FlatBuffer, away: bool) -> int:
        beside = buffer.is_half or away or self.tiers.parameters
        return sum(self._units(buffer, away)) * buffer.master_bytes if beside else 0

    def _gradient_bytes(self) -> int:
        return sum(
            self.tiers.gradients_away(shard, buffer.align)
            * (self.precision.gradient_bytes if buffer.is_half else buffer.element_bytes)
            for buffer in self.buffers
            for shard in self._shards_of(buffer)
        )

    def kept_bytes(self, rank: int, away: bool, used: set[int] | None = None, counts_only: bool = False) -> int:
        """Returns the bytes of the states of the segments that are updated on the host (`away`) or on the device.
        `used`: the parameters in use; None: all of them.
        """
        kept = 0
        for buffer in self.buffers:
            optimizer = (self.optimizer.owned if buffer.sizes is not None else None) or self.optimizer
            for parameter, _, numel in self._segments(buffer, rank, away):
                if used is None or parameter in used:
                    kept += optimizer.bytes_of(0 if counts_only else numel, buffer.master_bytes)
        return kept

    def _segments(self, buffer: FlatBuffer, rank: int, away: bool) -> Iterator[tuple[int, tuple[int, int], int]]:
        """Yields (parameter, (unit, chunk), elements) of each segment updated on the host (`away`) or on the device;
        segments end where a tile, a tier or a chunk ends.
        """
        cut = self.tiers.chunk_numel if away else None
        for parameter, unit, offset, numel, shard in buffer.held(rank, self.tile_numel):
            gone = self.tiers.updates_away(shard, buffer.align)
            low, high = (offset, min(offset + numel, gone)) if away else (max(offset, gone), offset + numel)
            while low < high:
                number = 0 if cut is None else low // cut
                end = high if cut is None else min(high, (number + 1) * cut)
                yield parameter, (unit, number), end - low
                low = end

    def _tile_numel_of(self, rank: int) -> int:
        """Returns the elements of the largest tile; each chunk of a file is one tile, of any size."""
        if self.tiers.chunk_numel is None:
            return max(self._largest(rank, away) for away in (False, True))
        cuts: Counter[tuple[int, tuple[int, int]]] = Counter()
        for number, buffer in enumerate(self.buffers):
            for _, cut, numel in self._segments(buffer, rank, away=True):
                cuts[number, cut] += numel
        return max([*cuts.values(), self._largest(rank, away=False)])

    def _largest(self, rank: int, away: bool) -> int:
        most, largest, tile = self.tile_numel, 0, 0
        for buffer in self.buffers:
            for _, _, numel in self._segments(buffer, rank, away):
                tile = numel if most is not None and tile + numel > most else tile + numel
                largest = max(largest, tile)
        return largest
