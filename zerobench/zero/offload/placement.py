"""Where a rank keeps its part of the model states: on the device, or elsewhere.

[Note: runs]
The optimizer's side of a unit's shard is cut into *runs*, [start, stop) of its elements, each in one tier::

    shard      | run in host memory or in files, `leaving` elements | run on the device |
               0                                                    ^                   ^shard_numel

A run holds the master, which the optimizer updates, and where its states are made. Gradients of the elements that
leave may leave as well, when they are reduced, or stay; the two choices are apart (ZeRO-Offload, arXiv 2101.06840,
table 1: 16, 14, 4 and 2 bytes a parameter on the device).

Here everything is on the device: one run, and nothing leaves. offload/cpu.py and file_store.py have the other tiers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import optim

from .. import labels
from ..protocols import GradientSink

if TYPE_CHECKING:
    from ..optim.segments import OptimizerSegment
    from ..units.unit import Unit


CHUNK = 2**20
"""Elements of a master that are compared with its parameters at once."""


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
        """The master, from the parameters: these themselves where they are here, of its dtype."""
        dtypes, places = self.unit.dtypes, self.unit.places
        if self.is_parameters:
            self.master = self.parameters
        else:
            self.master = torch.empty(self.stop - self.start, dtype=dtypes.master, device=self.unit.device)
            labels.label(self.master, labels.MASTER, self.unit.name)
            places.read(self.unit, self.start, self.master)

    @property
    def is_parameters(self) -> bool:
        """Whether master and parameters are one tensor."""
        dtypes, is_here = self.unit.dtypes, self.tier == labels.DEVICE and self.unit.places.keeps_parameters
        return is_here and dtypes.master == dtypes.parameters

    def segment(self, offset: int, numel: int) -> torch.Tensor:
        """The master of elements [offset, offset + numel) of the unit's shard."""
        return self.master.narrow(0, offset - self.start, numel)

    def round_master(self) -> None:
        """The parameters become the rounded master."""
        if not self.is_parameters:
            self.unit.places.put(self.unit, self.start, self.master)

    def follow_parameters(self, loaded: Sequence[tuple[int, int]] = ()) -> None:
        """The master becomes the parameters: in `loaded`, [start, stop) of the shard, all of it, elsewhere where these
        are not its rounded values any more. Bits that parameters do not hold so stay where nobody has written.
        """
        if not self.is_parameters:
            self._follow(self.master, loaded)

    def _follow(self, master: torch.Tensor, loaded: Sequence[tuple[int, int]]) -> None:
        for start in range(0, master.numel(), CHUNK):
            part = master[start : start + CHUNK]
            written = torch.empty(part.shape, dtype=self.unit.dtypes.parameters, device=part.device)
            self.unit.places.read(self.unit, self.start + start, written)
            part.copy_(torch.where(part.to(written.dtype) == written, part, written.to(part.dtype)))
            for first, last in loaded:
                here = slice(max(0, first - self.start - start), max(0, last - self.start - start))
                part[here].copy_(written[here])

    @contextmanager
    def visit(self, tile: Sequence[OptimizerSegment]) -> Iterator[None]:
        """Inside, masters, states and gradients of a tile of this run's are there to be updated."""
        yield

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, the gradients of this run are there to be read."""
        yield

    @contextmanager
    def editing(self) -> Iterator[None]:
        """Inside, they are there to be changed."""
        yield

    @property
    def group(self) -> object:
        """Runs of one group may be updated in one tile; one that is a group by itself always is."""
        return self.tier


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

    def sink(self, unit: Unit) -> GradientSink | None:
        """Where gradients go, if they leave."""
        return None

    def release_copied(self) -> None:
        """The memory of all that sinks have taken is given back: their copies are waited for."""

    def keep_parameters(self, unit: Unit, shard: torch.Tensor) -> torch.Tensor:
        """A unit's shard of parameters, (shard_numel,), a copy of one on the device."""
        return labels.label(shard.clone(), labels.PARAMETERS, unit.name)

    def fetch(self, unit: Unit, place: torch.Tensor) -> None:
        """place := the unit's shard of parameters, for a gather."""
        place.copy_(unit.parameter_shard, non_blocking=True)

    def read(self, unit: Unit, start: int, place: torch.Tensor) -> None:
        """place := elements from `start` on of the unit's shard."""
        place.copy_(unit.parameter_shard.narrow(0, start, place.numel()))

    def put(self, unit: Unit, start: int, values: torch.Tensor) -> None:
        """Elements from `start` on of the unit's shard := values."""
        unit.parameter_shard.narrow(0, start, values.numel()).copy_(values)

    def attach(self, optimizer: optim.Optimizer, segments: Sequence[OptimizerSegment]) -> None:
        """`optimizer` is the one whose states are to be kept, `segments` what it holds."""

    @contextmanager
    def in_memory(self, write_back: bool) -> Iterator[None]:
        """Inside, everything can be read, and with `write_back` changed: checkpoints, a rank's state."""
        yield

    def settle(self) -> None:
        """What an update has sent to the device is there for whoever comes after in the current stream."""

    def wait(self) -> None:
        """The host goes on when what an update has sent to the device is there: masters may change afterwards."""
