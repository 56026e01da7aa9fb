"""The engine's update as two more ways of the disk's measurement (disk_rank.py): how well a step uses the disk.

update      masters and states in files: chunk k + 1 is read, chunk k updated, chunk k - 1 written (offload/nvme.py)
in memory   the same update with masters and states in host memory: its computation, without a disk

AdamW in fp32, one rank. A parameter's master and two states are read and written: half of the bytes each, as `mixed`.
"""

from __future__ import annotations

import torch
from torch import nn

from ..zero import initialize
from ..zero.offload.policy import Offload

BYTES_A_PARAMETER = 24


class Weight(nn.Module):
    """A module with one parameter, (numel,), whose gradient is 1."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numel))

    def forward(self) -> torch.Tensor:
        """Returns a scalar."""
        return self.weight.sum()


class Updates:
    """Updates that move `moves_bytes` each, with the optimizer's states in the tier of `offload`."""

    def __init__(self, offload: Offload, file_bytes: int) -> None:
        numel = file_bytes // BYTES_A_PARAMETER
        self.moves_bytes = numel * BYTES_A_PARAMETER
        model = Weight(numel)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        self._engine = initialize(model, optimizer, "zero1", offload=offload)

    def prepare(self) -> None:
        """Makes gradients."""
        self._engine.backward(self._engine())

    def carry(self, kinds: tuple[str, ...]) -> None:
        """Runs a step; returns when all of it is in the files."""
        self._engine.step()
