"""States that leave the device, and the traffic that this causes, by closed form: ZeRO-Offload, arXiv 2101.06840,
section 3 and table 1; ZeRO-Infinity, arXiv 2104.07857, section 3. In half precision with Adam, bytes per parameter on
the device, without whole gradients::

    nothing leaves                 16 (zero1 at N = 1)        with N ranks      see closed_forms.py
    gradients                      14                                           minus 2/N
    optimizer                       4                                           minus 12/N
    both                            2 (zero1, zero2)                            2/N and units in use (zero3)

Over a step and all ranks, with r reductions and g gathers of each ZeRO-3 unit::

    down       r · 2ψ if gradients leave; 2ψ if they stay and the optimizer leaves
    up         2ψ parameters of offloaded optimizers; 2ψ gradients if only they leave; g · 2ψ for offloaded shards
    read       12ψ masters and states, 2ψ gradients, g · 2ψ parameters
    write      12ψ, r · 2ψ, 2ψ

To the byte, with padding and repeated reads: theory/replay/link_traffic.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

STAGING_NUMEL, STAGING = 2**20, 2
POOL_ALIGN_BYTES = 4096


@dataclass(frozen=True)
class TierShape:
    """An offload. `medium`: host or nvme, None if nothing leaves; the other fields are those of a config's offload.

    By default files are read and written past the page cache.
    """

    medium: str | None = None
    optimizer: bool = False
    gradients: bool = False
    parameters: bool = False
    fraction: float = 1.0
    delayed: bool = False
    block_bytes: int = 0
    buffers: int = 0
    direct: bool = True

    def leaving(self, shard_numel: int, align: int) -> int:
        """Returns how many of a shard's first elements leave: a fraction, rounded up to a multiple of `align`."""
        part = math.ceil(shard_numel * self.fraction)
        return min(shard_numel, -(-part // align) * align)

    def updates_away(self, shard_numel: int, align: int) -> int:
        """Returns how many elements of a shard are updated on the host."""
        return self.leaving(shard_numel, align) if self.optimizer else 0

    def gradients_away(self, shard_numel: int, align: int) -> int:
        """Returns how many elements of a shard have gradients that leave as they are reduced."""
        return self.leaving(shard_numel, align) if self.gradients else 0

    @property
    def chunk_numel(self) -> int | None:
        """Elements of a shard that are read, updated and written together; None without files."""
        return self.block_bytes // 4 if self.medium == "nvme" else None

    @property
    def pool_bytes(self) -> int:
        """Bytes of the buffers in host memory through which files are read and written."""
        block = -(-self.block_bytes // POOL_ALIGN_BYTES) * POOL_ALIGN_BYTES
        return block * self.buffers + POOL_ALIGN_BYTES if self.medium == "nvme" else 0


NOWHERE = TierShape()
