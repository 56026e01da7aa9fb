"""The tensors of a unit that its gradients and its placement read and write; units/unit.py has the whole unit."""

from __future__ import annotations

import torch

from . import labels
from .arena import Heap
from .comm.base import Comm
from .layout import Layout
from .precision import Dtypes


class UnitTensors:
    """Parameters of one unit on one rank. `heap`: allocates temporary memory; an arena has it in slots."""

    full_parameters: torch.Tensor
    parameter_shard: torch.Tensor
    heap = Heap()

    def __init__(self, name: str, layout: Layout, comm: Comm, dtypes: Dtypes) -> None:
        self.name = name
        self.layout = layout
        self.rank = comm.rank
        self.start, stop = layout.bounds(comm.rank)
        self.shard_numel = stop - self.start
        self.size = comm.size
        self.dtypes = dtypes

    @property
    def device(self) -> torch.device:
        """The device of the full parameters, wherever the shards are."""
        return self.full_parameters.device

    @property
    def shard_category(self) -> str:
        """The label of the parameter shard."""
        return labels.MASTER if self.dtypes.keeps_masters else labels.PARAMETERS

    def own_slice(self, full: torch.Tensor) -> torch.Tensor:
        """Returns this rank's (shard_numel,) view of a (padded_numel,) tensor."""
        return full.narrow(0, self.start, self.shard_numel)
