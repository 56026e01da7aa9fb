"""What a rank keeps of its shards for good, and what an update of them needs: alike in every stage.

    master      4 bytes an element of a shard below fp32, padding included
    optimizer   states of each segment (parameter ∩ shard), and 4-byte counts; segments are cut at the size of a tile
    tile        fp32 gradients in place of half-precision ones, for the segments that are updated together

There are tiles where gradients are cast, and where the optimizer is not fused and so needs temporaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .partition import ALIGN_BYTES, FlatBuffer
from .replay import Replay
from .shapes import OptimizerShape, PrecisionShape, Schedule


@dataclass(frozen=True)
class Shards:
    """One rank's part of `buffers`, all of them trained, shared by `world_size` ranks."""

    buffers: Sequence[FlatBuffer]
    world_size: int
    optimizer: OptimizerShape
    precision: PrecisionShape

    def hold(self, replay: Replay, schedule: Schedule) -> None:
        """Masters, and the optimizer's states of the rank that owns most of what is used."""
        masters = [b.padded_numel // self.world_size * b.master_bytes for b in self.buffers if b.is_half]
        replay.hold("master", "all", sum(masters))
        used = set(schedule.arrivals)
        replay.hold("optimizer", "all", max(self._kept_bytes(rank, used) for rank in range(self.world_size)))

    def update(self, replay: Replay) -> None:
        """The optimizer is handed its gradients, cast where that is due."""
        if self.casts:
            replay.hold("gradients", "tile", max(self._tile_bytes(rank) for rank in range(self.world_size)))
            replay.drop("gradients", "tile")

    @property
    def casts(self) -> bool:
        """Whether gradients have another dtype than masters."""
        return self.precision.gradient_bytes < 4 and any(b.is_half for b in self.buffers)

    @property
    def tile_numel(self) -> int | None:
        """Elements that are updated together at most; None: everything at once."""
        if self.precision.tile_bytes is None or (self.optimizer.fused and not self.casts):
            return None
        return max(ALIGN_BYTES, self.precision.tile_bytes // ALIGN_BYTES * ALIGN_BYTES) // 4

    def _kept_bytes(self, rank: int, used: set[int]) -> int:
        return sum(
            self.optimizer.bytes_of(numel * buffer.master_bytes, 1)
            for buffer in self.buffers
            for parameter, numel in buffer.segments(rank, self.tile_numel)
            if parameter in used
        )

    def _tile_bytes(self, rank: int) -> int:
        most, largest, tile = self.tile_numel, 0, 0
        for buffer in self.buffers:
            for _, numel in buffer.segments(rank, most):
                tile = numel if most is not None and tile + numel > most else tile + numel
                largest = max(largest, tile)
        return 4 * largest
