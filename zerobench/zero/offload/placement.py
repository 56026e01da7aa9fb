"""Where a rank keeps its part of the model states: on the device, or elsewhere.

[Note: shard ranges]
The optimizer's side of a unit's shard consists of *ranges*, [start, stop) of its elements, each in one tier::

    shard      | in host memory or in files, `offloaded_numel` elements | on the device |
               0                                                        ^               ^shard_numel

A range holds the master, which the optimizer updates, and where its states are made. Gradients of the elements that
leave may leave as well, when they are reduced, or stay; the two choices are apart (ZeRO-Offload, arXiv 2101.06840,
table 1: 16, 14, 4 and 2 bytes per parameter on the device).

A `Placement` owns the ranges that an update visits and the sinks that gradients go to. Here everything is on the
device: one range per unit, and no sink. cpu.py and nvme.py have the other tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
from torch import optim

from .. import labels
from ..parameters.versions import fingerprint

if TYPE_CHECKING:
    from ..optim.segments import OptimizerSegment
    from ..units.unit import Unit

COMPARED = {"cpu": 2**16, "cuda": 2**24}
"""Elements of a master that are compared with its parameters at once: few in a cache, many for a kernel's launch."""


class GradientSink(Protocol):
    """Where the gradients of a shard's first `numel` elements go when they are reduced: those that leave the device."""

    tier: str
    numel: int

    def take(self, mean: torch.Tensor, adds: bool) -> None:
        """`mean`, (numel,), on the device: keeps it, or adds it to what is here."""

    def release(self, give_back: Callable[[], None]) -> None:
        """Calls `give_back`, for the memory of what was taken last, once that has been read: now, or behind a copy."""

    def view(self, offset: int, numel: int) -> torch.Tensor:
        """The gradients of that range, where they are."""

    def settle(self) -> None:
        """Waits until all that was taken can be read."""


class ShardRange:
    """Elements [start, stop) of `unit`'s shard, updated on the device. `master`: (stop - start,)."""

    tier = labels.DEVICE
    rounds_late = True
    """True if the parameters become the rounded masters after the update, all at once; else as each tile is done."""
    master: torch.Tensor
    _left: torch.Tensor | None = None  # the fingerprint of the parameters as the engine left them

    def __init__(self, placement: Placement, unit: Unit, start: int, stop: int) -> None:
        self.unit, self.start, self.stop = unit, start, stop
        self._placement = placement

    @property
    def parameters(self) -> torch.Tensor:
        """The range's part of the parameter shard."""
        return self.unit.parameter_shard.narrow(0, self.start, self.stop - self.start)

    def make_master(self) -> None:
        """The master, from the parameters: these themselves where they are here, of its dtype."""
        if self.is_parameters:
            self.master = self.parameters
        else:
            self.master = torch.empty(self.stop - self.start, dtype=self.unit.dtypes.master, device=self.unit.device)
            labels.label(self.master, labels.MASTER, self.unit.name)
            self._placement.read(self.unit, self.start, self.master)

    def label_held(self) -> None:
        """Labels the master again, for observers that have come since it was made."""
        if not self.is_parameters and isinstance(getattr(self, "master", None), torch.Tensor):
            labels.label(self.master, labels.MASTER, self.unit.name, tier=self.tier)

    @property
    def is_parameters(self) -> bool:
        """True if master and parameters are one tensor."""
        dtypes, is_here = self.unit.dtypes, self.tier == labels.DEVICE and self._placement.keeps_parameters
        return is_here and dtypes.master == dtypes.parameters

    def segment(self, offset: int, numel: int) -> torch.Tensor:
        """The master of elements [offset, offset + numel) of the unit's shard."""
        return self.master.narrow(0, offset - self.start, numel)

    def round_master(self) -> None:
        """The parameters become the rounded master."""
        if not self.is_parameters:
            self._placement.put(self.unit, self.start, self.master)

    def follow_parameters(self, loaded: Sequence[tuple[int, int]] = (), asks: bool = False) -> None:
        """The master becomes the parameters: in `loaded`, [start, stop) of the shard, all of it, elsewhere where these
        are not its rounded values any more. Bits that parameters do not hold so stay where nothing was written.

        `asks`: the host may compare first, which is faster, and waits for a device.
        """
        if not self.is_parameters:
            self._follow(self.master, loaded, asks)

    def _follow(self, master: torch.Tensor, loaded: Sequence[tuple[int, int]], asks: bool) -> None:
        most = COMPARED.get(master.device.type, COMPARED["cuda"])
        for start in range(0, master.numel(), most):
            part = master[start : start + most]
            written, rounded = self._written(start, part), part.to(self.unit.dtypes.parameters)
            if not (asks and torch.equal(written, rounded)):
                part.copy_(torch.where(rounded == written, part, written.to(part.dtype)))
            for first, last in loaded:
                here = slice(max(0, first - self.start - start), max(0, last - self.start - start))
                part[here].copy_(written[here])

    def _written(self, start: int, part: torch.Tensor) -> torch.Tensor:
        """The parameters of `part`, which is the master from element `start` of the range on, where the master is."""
        if self.tier == labels.DEVICE and self._placement.has_parameters(self.unit):
            return self.parameters.narrow(0, start, part.numel())
        written = torch.empty(part.shape, dtype=self.unit.dtypes.parameters, device=part.device)
        self._placement.read(self.unit, self.start + start, written)
        return written

    def note_parameters(self) -> None:
        """The parameters are as the engine left them: later writes to them are a user's."""
        compares = self._placement.is_tiered and self._placement.has_parameters(self.unit)
        self._left = fingerprint(self.parameters) if compares and not self.is_parameters else None

    @property
    def is_present(self) -> bool:
        """True if the master is in memory."""
        return True

    @property
    def may_be_written(self) -> bool:
        """True if the parameters may not be as the engine left them: without tiers, that is found by comparing them
        with the master.
        """
        if self.is_parameters:
            return False
        if self._left is None:
            return not self._placement.is_tiered
        return bool(self._left != fingerprint(self.parameters))

    @contextmanager
    def visit(self, tile: Sequence[OptimizerSegment]) -> Iterator[None]:
        """Inside, masters, states and gradients of a tile of this range's are there to be updated."""
        yield

    @contextmanager
    def gradients(self, edits: bool = False) -> Iterator[None]:
        """Inside, the gradients of this range are there to be read, and with `edits` to be changed."""
        yield

    @property
    def group(self) -> object:
        """Ranges of one group may be updated in one tile; one that is a group by itself always is."""
        return self.tier


class Placement:
    """Everything on the device. `ranges`: of each unit, in the order of its shard."""

    tiles_always = False
    """True if updates go in tiles even where the optimizer needs none."""
    keeps_parameters = True
    """True if the shards of parameters are on the device."""
    is_tiered = False
    """True if masters may be elsewhere, so that to compare all of them with the parameters would cost a transfer."""

    def __init__(self) -> None:
        self.ranges: dict[Unit, list[ShardRange]] = {}

    # -- where gradients go ---------------------------------------------------------------------------------

    def offloaded_numel(self, unit: Unit) -> int:
        """Elements of a shard, from its start, whose optimizer, and gradients if they do, leave the device."""
        return 0

    def new_sink(self, unit: Unit) -> GradientSink | None:
        """Where the gradients of a unit's offloaded elements go; None: they stay."""
        return None

    def release_copied(self) -> None:
        """The memory of all that sinks have taken is given back: their copies are waited for."""

    # -- what an update visits --------------------------------------------------------------------------------

    def adopt(self, unit: Unit) -> None:
        """Makes the masters of a unit, from its parameters."""
        self.ranges[unit] = self.new_ranges(unit)
        for one in self.ranges[unit]:
            one.make_master()

    def new_ranges(self, unit: Unit) -> list[ShardRange]:
        """The ranges of a unit's shard, without masters."""
        return [ShardRange(self, unit, 0, unit.shard_numel)]

    def all_ranges(self) -> list[ShardRange]:
        """The shard ranges of all units, in order."""
        return [one for ranges in self.ranges.values() for one in ranges]

    def attach(self, optimizer: optim.Optimizer, segments: Sequence[OptimizerSegment]) -> None:
        """`optimizer` is the one whose states are to be kept, `segments` what it holds."""

    def visit(self, tile: Sequence[OptimizerSegment]) -> AbstractContextManager[None]:
        """Inside, masters, states and gradients of a tile, of one range where that is a group, can be updated."""
        return tile[0].shard_range.visit(tile) if tile else nullcontext()

    def finish_update(self) -> None:
        """The parameters become the rounded masters, where they have not become so tile by tile."""
        for one in self.all_ranges():
            if one.rounds_late:
                one.round_master()
        self.settle()

    def round_masters(self) -> None:
        """The parameters become the rounded masters."""
        for one in self.all_ranges():
            one.round_master()

    def follow(self, unit: Unit, loaded: Collection[int], asks: bool = False) -> None:
        """The shard of parameters was written to: the masters follow. `loaded`: parameters, by number, whose values are
        new even where they are the old ones rounded. `asks`: the host may wait for a comparison.
        """
        self.wait()
        self.settle()  # what was read ahead is old
        segments = unit.layout.segments(unit.rank)
        ranges = [(one.offset, one.offset + one.numel) for one in segments if one.parameter in loaded]
        for one in self.ranges.get(unit, []):  # a frozen unit has no masters
            one.follow_parameters(ranges, asks)

    def note_parameters(self, unit: Unit) -> None:
        """The unit's shard of parameters is as the engine left it."""
        for one in self.ranges.get(unit, []):
            one.note_parameters()

    def may_be_written(self, unit: Unit) -> bool:
        """True if that may not be so any more."""
        return any(one.may_be_written for one in self.ranges.get(unit, []))

    def restore_absent(self) -> None:
        """Makes the tensors of absent masters read as NaN again, after a write to them."""

    # -- where shards of parameters are -----------------------------------------------------------------------

    def keep_parameters(self, unit: Unit, shard: torch.Tensor) -> torch.Tensor:
        """A unit's shard of parameters, (shard_numel,), a copy of one on the device."""
        return labels.label(shard.clone(), labels.PARAMETERS, unit.name)

    def has_parameters(self, unit: Unit) -> bool:
        """True if the unit's shard of parameters is on the device."""
        return True

    def fetch(self, unit: Unit, place: torch.Tensor) -> None:
        """place := the unit's shard of parameters, for a gather."""
        place.copy_(unit.parameter_shard, non_blocking=True)

    def read(self, unit: Unit, start: int, place: torch.Tensor) -> None:
        """place := elements from `start` on of the unit's shard."""
        place.copy_(unit.parameter_shard.narrow(0, start, place.numel()))

    def put(self, unit: Unit, start: int, values: torch.Tensor) -> None:
        """Elements from `start` on of the unit's shard := values."""
        unit.parameter_shard.narrow(0, start, values.numel()).copy_(values)

    # -- order in time ----------------------------------------------------------------------------------------

    @contextmanager
    def in_memory(self, write_back: bool) -> Iterator[None]:
        """Inside, everything can be read, and with `write_back` changed: checkpoints, a rank's state."""
        yield

    def settle(self) -> None:
        """Makes later work of the current stream wait for all that an update has sent to the device."""

    def wait(self) -> None:
        """Blocks the host until all that an update has sent to the device is there: masters may change afterwards."""
