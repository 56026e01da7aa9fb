"""Offload policies: chosen by the caller of `initialize`, implemented by `placement_for`."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

LEAST_BUFFERS = 8
"""Buffers that one chunk may need at the same time: its master, gradients and rounded parameters, and up to 5 states.
Reading ahead leaves this many free, so that current reads never wait for later ones.
"""


@dataclass(frozen=True)
class Offload:
    """The model states that leave the device.

    `optimizer`      masters and states of `fraction` of every shard, with their update
    `gradients`      gradients of the same elements, after their reduction
    `parameters`     shards of stage 3
    `delayed_after`  the step after which updates are one step late (optim/delayed_update.py); None: never
    """

    optimizer: bool = True
    gradients: bool = True
    parameters: bool = False
    fraction: float = 1.0
    delayed_after: int | None = None

    def check(self, strategy: str, leaves: Collection[str]) -> None:
        """Raises ValueError for invalid options. `leaves`: states that may leave the device under `strategy`."""
        if not 0 < self.fraction <= 1:
            raise ValueError(f"offload.fraction: {self.fraction!r} cannot be; use a part of 1 above 0")
        if not (self.optimizer or self.gradients or self.parameters):
            raise ValueError("offload: nothing is to leave; name optimizer, gradients or parameters")
        if self.fraction < 1 and not self.optimizer:
            raise ValueError(f"offload.fraction: {self.fraction!r} is a part of the optimizer; let the optimizer leave")
        if not leaves:
            raise ValueError(f"offload: {strategy} does not offload; use zero1, zero2 or zero3")
        if self.parameters and "parameters" not in leaves:
            raise ValueError(f"offload.parameters: {strategy} has whole parameters on every rank; use zero3")
        if self.delayed_after is not None and not (self.optimizer and self.gradients and self.fraction == 1):
            raise ValueError(
                "offload.delayed_after: an update can run behind a forward only if it runs on the host alone; let"
                " optimizer and gradients leave, with fraction=1"
            )

    def part_of(self, shard_numel: int, align: int) -> int:
        """Returns the number of elements of a shard that leave the device."""
        part = math.ceil(shard_numel * self.fraction)
        return min(shard_numel, -(-part // align) * align)


@dataclass(frozen=True)
class NvmeOffload(Offload):
    """The model states that are moved to files below the folder `path`.

    `block_bytes`  size of one buffer
    `buffers`      their number: Adam's pipeline needs 12, since one chunk is updated, one read, one written; with
                   8 these run one after the other
    `depth`        requests that are at the disk concurrently
    `direct`       past the page cache, if the file system supports it
    """

    path: str = ""
    block_bytes: int = 4 * 2**20
    buffers: int = 16
    depth: int = 8
    direct: bool = True

    def check(self, strategy: str, leaves: Collection[str]) -> None:
        super().check(strategy, leaves)
        if not self.path:
            raise ValueError("offload.path: name the folder for files")
        if self.gradients and not self.optimizer:
            raise ValueError("offload.gradients: in files they need an optimizer there; let the optimizer leave, too")
        if self.delayed_after is not None:
            raise ValueError("offload.delayed_after: an update over files is not delayed; use offload=cpu")
        if self.buffers < LEAST_BUFFERS:
            raise ValueError(f"offload.buffers: {self.buffers} are too few; use at least {LEAST_BUFFERS}")
        if self.depth < 1:
            raise ValueError(f"offload.depth: {self.depth} cannot be; use at least 1")
        if self.block_bytes < 4096 or self.block_bytes % 4096:
            raise ValueError(f"offload.block_bytes: {self.block_bytes} cannot be; use a multiple of 4096")
