"""Where a rank keeps its part of the model states: on the device, or elsewhere.

[Note: runs]
The optimizer's side of a unit's shard is cut into *runs*, [start, stop) of its elements, each in one tier::

    shard      | run in host memory or in files, `leaving` elements | run on the device |
               0                                                    ^                   ^shard_numel

A run holds the master, which the optimizer updates, and where its states are made. Gradients of the elements that
leave may leave as well, when they are reduced, or stay; the two choices are apart (ZeRO-Offload, arXiv 2101.06840,
table 1: 16, 14, 4 and 2 bytes a parameter on the device).

Here everything is on the device: one run, and nothing leaves. host.py and files.py have the other tiers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from . import labels

if TYPE_CHECKING:
    from .segments import OptimizerSegment
    from .unit import Unit


class Run:
    """Elements [start, stop) of `unit`'s shard, updated on the device. `master`: (stop - start,)."""

    tier = labels.DEVICE
    rounds_late = True
    """Whether the parameters become the rounded masters after the update, all at once; else as each tile is done."""
    master: torch.Tensor

    def __init__(self, unit: Unit, start: int, stop: int) -> None:
        self.unit, self.start, self.stop = unit, start, stop

    @property
    def parameters(self) -> torch.Tensor:
        """The run's part of the parameter shard."""
        return self.unit.parameter_shard.narrow(0, self.start, self.stop - self.start)

    def make_master(self) -> None:
        """The master, from the parameters: these themselves where they have its dtype."""
        self.master = self.parameters
        if self.unit.dtypes.master != self.unit.dtypes.parameters:
            self.master = self.parameters.to(self.unit.dtypes.master)
            labels.label(self.master, labels.MASTER, self.unit.name)

    def segment(self, offset: int, numel: int) -> torch.Tensor:
        """The master of elements [offset, offset + numel) of the unit's shard."""
        return self.master.narrow(0, offset - self.start, numel)

    def round_master(self) -> None:
        """The parameters become the rounded master."""
        if self.unit.dtypes.master != self.unit.dtypes.parameters:
            self.parameters.copy_(self.master)

    @contextmanager
    def visit(self, tile: Sequence[OptimizerSegment]) -> Iterator[None]:
        """Inside, masters, states and gradients of a tile of this run's are there to be updated."""
        yield

    @property
    def group(self) -> object:
        """Runs of one group may be updated in one tile."""
        return self.tier


class Away(Protocol):
    """Where the gradients of `leaving` elements go."""

    tier: str

    def take(self, mean: torch.Tensor, adds: bool) -> Any:
        """`mean`, (leaving,), on the device: keeps it, or adds it. Returns what is to be waited for before its memory
        is given back, or None.
        """

    def view(self, offset: int, numel: int) -> torch.Tensor:
        """The gradients of that range, where they are."""

    def settle(self) -> None:
        """What was taken is there to be read."""


class Places:
    """Everything on the device."""

    tiles_always = False
    """Whether updates go in tiles even where the optimizer needs none."""
    keeps_parameters = True
    """Whether the shards of parameters are on the device."""

    def leaving(self, shard_numel: int, align: int) -> int:
        """Elements of a shard, from its start, whose optimizer, and gradients if they do, leave the device."""
        return 0

    def runs(self, unit: Unit) -> list[Run]:
        """The runs of a unit's shard."""
        return [Run(unit, 0, unit.layout.shard_numel)]

    def away(self, unit: Unit) -> Away | None:
        """Where gradients go, if they leave."""
        return None

    def keep_parameters(self, shard: torch.Tensor, name: str) -> torch.Tensor:
        """A shard of parameters, (shard_numel,), a copy of one on the device."""
        return labels.label(shard.clone(), labels.PARAMETERS, name)

    def settle(self) -> None:
        """What an update has sent to the device is there for whoever comes after in the current stream."""

    def close(self) -> None:
        """Gives back what is outside of memory."""
