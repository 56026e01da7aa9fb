"""A rank's shards, which are never freed, and the buffers of an update: the same in every stage.

    master      4 bytes an element of a shard below fp32, padding included
    optimizer   states of each segment (parameter ∩ shard), and 4-byte counts; segments are cut at the size of a tile
    tile        fp32 gradients in place of half-precision ones, for the segments that are updated together

Tiles are used if gradients are cast, if the optimizer is not fused and so needs temporaries, or if it runs in another
tier. In another tier, fp32 parameters have masters too; gradients are copied to a tile before they are cast;
and half-precision parameters go up through two staging buffers of 1 Mi elements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..layout import FlatBuffer
from ..shapes import NOWHERE, STAGING, STAGING_NUMEL, OptimizerShape, PrecisionShape, Schedule, TierShape
from .live_bytes import TILE, Replay

HALF_BYTES = 2


@dataclass(frozen=True)
class Shards:
    """One rank's shards of `buffers`, all of them trained, divided among `world_size` ranks. `on_host`: of methods, the
    part that is updated on the host, else on the device.
    """

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
        used, tiers, host = set(schedule.arrivals), self.tiers, replay.host
        replay.hold("master", "all", self._master_bytes(on_host=False))
        replay.hold("optimizer", "all", max(self.kept_bytes(rank, False, used) for rank in self.ranks))
        if host is None:
            return
        masters, kept = self._master_bytes(on_host=True), self._host_bytes(self._host_rank(host, used), used)
        gradients = 0
        for buffer in self.buffers:
            size = self.precision.gradient_bytes if buffer.is_half else buffer.element_bytes
            gradients += size * sum(tiers.gradients_on_host(n, buffer.align) for n in self._shard_numels(buffer))
        if tiers.medium == "nvme":
            host.hold("communication", "pool", tiers.pool_bytes)
            # one scalar per dtype stands for the tensors in files
            dtypes = {b.master_bytes for b in self.buffers} if tiers.optimizer else set()
            dtypes |= {b.element_bytes for b in self.buffers} if tiers.parameters else set()
            host.hold("optimizer", "counts", kept + sum(dtypes))
            sizes = [(numel, b.master_bytes) for b in self.buffers for numel in self._updated(b, on_host=True)]
            replay.files += masters + sum(self.optimizer.states_bytes(*size) for size in sizes) + gradients
        else:
            host.hold("master", "all", masters)
            host.hold("optimizer", "all", kept)
            host.hold("gradients", "all", gradients * (1 + tiers.delayed))
        if tiers.optimizer and not tiers.parameters and any(b.is_half for b in self.buffers):
            host.hold("parameters", "staging", STAGING * STAGING_NUMEL * HALF_BYTES)

    def update(self, replay: Replay, schedule: Schedule) -> None:
        """Plays the update: gradients are copied to the optimizer's tier, and cast if needed."""
        here, there = (any(True for b in self.buffers for _ in self._updated(b, side)) for side in (False, True))
        if here:
            most = max(self._tile_numel(rank) for rank in self.ranks)
            name = TILE if self.precision.tile_bytes is not None else "cast"  # all at once: a part of the formula
            replay.hold("gradients", name, most * self._tile_bytes(on_host=False))
            replay.drop("gradients", name)
        if there and replay.host is not None:
            most = self._tile_numel(self._host_rank(replay.host, set(schedule.arrivals)))
            replay.host.hold("gradients", TILE, most * self._tile_bytes(on_host=True))
            replay.host.drop("gradients", TILE)

    def _tile_bytes(self, on_host: bool) -> int:
        """Bytes of a tile per element: the copy of a gradient from the other tier plus the cast."""
        optimizer, gradients = self.tiers.optimizer, self.tiers.gradients
        crosses = (optimizer and not gradients) if on_host else (gradients and not optimizer)
        return crosses * (self.precision.gradient_bytes if self.casts else 4) + 4 * self.casts

    def _host_rank(self, host: Replay, used: set[int]) -> int:
        """Returns the rank that is played: by default the one that uses most host memory."""
        if host.shard is not None:
            return host.shard
        size = self._tile_bytes(on_host=True)
        return max(self.ranks, key=lambda r: self._host_bytes(r, used) + size * self._tile_numel(r))

    def _host_bytes(self, rank: int, used: set[int]) -> int:
        return self.kept_bytes(rank, True, used, counts_only=self.tiers.medium == "nvme")

    @property
    def casts(self) -> bool:
        """Whether gradients are cast to their masters' dtype: not by a kernel that reads them as they are."""
        is_half = any(b.is_half for b in self.buffers)
        return self.precision.tile_bytes != 0 and self.precision.gradient_bytes < 4 and is_half

    @property
    def tile_numel(self) -> int | None:
        """Maximum number of elements that are updated together; None: all of them."""
        if not self.precision.tile_bytes:
            return None
        if self.optimizer.fused and not self.casts and self.tiers.medium is None:
            return None
        align = self.optimizer.align
        return max(align, self.precision.tile_bytes // 4 // align * align)

    def _updated(self, buffer: FlatBuffer, on_host: bool) -> Iterator[int]:
        """Yields the nonzero number of elements of each shard that are updated there."""
        for shard in self._shard_numels(buffer):
            from_host = self.tiers.updated_on_host(shard, buffer.align)
            if numel := from_host if on_host else shard - from_host:
                yield numel

    def _shard_numels(self, buffer: FlatBuffer) -> list[int]:
        return [buffer.shard_numel(self.owner) if buffer.sizes else n // self.world_size for _, n in buffer.units]

    def _master_bytes(self, on_host: bool) -> int:
        separate = on_host or self.tiers.parameters  # from the parameters, also in fp32
        buffers = [buffer for buffer in self.buffers if buffer.is_half or separate]
        return sum(sum(self._updated(buffer, on_host)) * buffer.master_bytes for buffer in buffers)

    def kept_bytes(self, rank: int, on_host: bool, used: set[int] | None = None, counts_only: bool = False) -> int:
        """Returns the bytes of the optimizer states that are updated there. `used`: parameters; None: all."""
        kept = 0
        for buffer in self.buffers:
            optimizer = self.optimizer.of(buffer.sizes is not None)
            for parameter, _, numel in self._segments(buffer, rank, on_host):
                if used is None or parameter in used:
                    kept += optimizer.bytes_of(0 if counts_only else numel, buffer.master_bytes)
        return kept

    def _segments(self, buffer: FlatBuffer, rank: int, on_host: bool) -> Iterator[tuple[int, tuple[int, int], int]]:
        """Yields (parameter, (unit, chunk), elements) of each segment, which ends with its tile, tier or chunk."""
        step = self.tiers.chunk_numel if on_host else None
        for parameter, unit, offset, numel, shard in buffer.held(rank, self.tile_numel):
            border = self.tiers.updated_on_host(shard, buffer.align)
            low, high = (offset, min(offset + numel, border)) if on_host else (max(offset, border), offset + numel)
            while low < high:
                chunk = 0 if step is None else low // step
                end = high if step is None else min(high, (chunk + 1) * step)
                yield parameter, (unit, chunk), end - low
                low = end

    def _tile_numel(self, rank: int) -> int:
        """Returns the elements of the largest tile; each chunk of a file is one tile, of any size."""
        most, largest = self.tile_numel, 0
        for on_host in (False, True):
            tile, chunks = 0, Counter[tuple[int, tuple[int, int]]]()
            for index, buffer in enumerate(self.buffers):
                for _, chunk, numel in self._segments(buffer, rank, on_host):
                    if on_host and self.tiers.chunk_numel is not None:
                        chunks[index, chunk] += numel
                        tile = chunks[index, chunk]
                    else:
                        tile = numel if most is not None and tile + numel > most else tile + numel
                    largest = max(largest, tile)
        return largest
