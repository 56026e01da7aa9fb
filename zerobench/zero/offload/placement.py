"""Where a rank keeps its part of the model states: on the device, or in another tier.

[Note: shard ranges]
The optimizer's side of a unit's shard consists of *ranges*, [start, stop) of its elements, each in one tier::

    shard      | in host memory or in files, `offloaded_numel` elements | on the device |
               0                                                        ^               ^shard_numel

A range has the master, which the optimizer updates, and determines where the optimizer's states are. Gradients of
offloaded elements may leave the device too, when they are reduced, or stay; the two choices are independent
(ZeRO-Offload, arXiv 2101.06840, table 1: 16, 14, 4 and 2 bytes per parameter on the device).

A `Placement` owns the ranges that an update visits and the sinks that gradients go to. Here everything is on the
device: one range per unit, and no sink. cpu.py and nvme.py implement the other tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby
from typing import Protocol

import torch
from torch import nn, optim

from .. import labels
from ..layout import Segment
from ..parameters.access import UnseenWrites, fingerprint
from ..unit_tensors import UnitTensors

COMPARED = {"cpu": 2**16, "cuda": 2**21}
"""Elements of a master that are compared with its parameters at a time: as many as a cache can hold."""


class GradientSink(Protocol):
    """The destination, off the device, of the reduced gradients of a shard's first `numel` elements."""

    tier: str
    numel: int

    def take(self, mean: torch.Tensor, adds: bool) -> None:
        """Keeps `mean`, (numel,), from the device, or adds it to the gradients kept here."""

    def release(self, give_back: Callable[[], None]) -> None:
        """Calls `give_back`, for the memory of the last `take`, once it has been read: now, or after a copy."""

    def view(self, offset: int, numel: int) -> torch.Tensor:
        """Returns a view of elements [offset, offset + numel) of the gradients."""

    def settle(self) -> None:
        """Waits until all gradients that were taken can be read."""

    def held_tensors(self) -> Iterator[labels.Held]:
        """Yields its tensors in memory."""
        return iter(())


def follow_written(master: torch.Tensor, written: torch.Tensor) -> None:
    """master := `written`, except elements that are rounded to `written`, which keep bits that it cannot represent."""
    torch.where(master.to(written.dtype) == written, master, written, out=master)


MasterPart = tuple[UnitTensors, int, torch.Tensor]
"""A tile's part of a unit: its first element in the shard, and its masters. With the gaps between segments it is whole
64-bit words.
"""


class ShardRange:
    """Elements [start, stop) of `unit`'s shard, updated on the device. `master`: (stop - start,)."""

    tier = labels.DEVICE
    master: torch.Tensor
    _left: torch.Tensor | None = None  # the fingerprint of the parameters as the engine left them

    def __init__(self, placement: Placement, unit: UnitTensors, start: int, stop: int) -> None:
        self.unit, self.start, self.stop = unit, start, stop
        self._placement = placement
        self._parts: dict[int, list[MasterPart]] = {}  # of each tile that begins with this range

    @property
    def parameters(self) -> torch.Tensor:
        """The range's part of the parameter shard."""
        return self.unit.parameter_shard.narrow(0, self.start, self.stop - self.start)

    def make_master(self) -> None:
        """Makes the master from the parameters, or shares them if they are on the device in its dtype."""
        if self.is_parameters:
            self.master = self.parameters
        else:
            self.master = torch.empty(self.stop - self.start, dtype=self.unit.dtypes.master, device=self.unit.device)
            labels.label(self.master, labels.MASTER, self.unit.name)
            self._placement.read(self.unit, self.start, self.master)

    def held_tensors(self) -> Iterator[labels.Held]:
        """Yields the master, unless it is the parameters."""
        if not self.is_parameters:
            yield labels.Held(self.master, labels.MASTER, self.unit.name, self.tier)

    @property
    def is_parameters(self) -> bool:
        """True if master and parameters are one tensor."""
        dtypes, is_here = self.unit.dtypes, self.tier == labels.DEVICE and self._placement.keeps_parameters
        return is_here and dtypes.master == dtypes.shard

    def segment(self, offset: int, numel: int) -> torch.Tensor:
        """Returns the master of elements [offset, offset + numel) of the unit's shard."""
        return self.master.narrow(0, offset - self.start, numel)

    def round_master(self) -> None:
        """Sets the parameters to the rounded master."""
        if not self.is_parameters:
            self._placement.put(self.unit, self.start, self.master)

    def follow_parameters(self, loaded: Sequence[tuple[int, int]] = (), asks: bool = False) -> None:
        """Updates the master from the parameters: all elements in `loaded`, ranges [start, stop) of the shard; others
        only if the parameters differ from the rounded master. So unwritten elements keep bits that parameters cannot
        represent.

        `asks`: the host may compare first, which is faster, but waits for a device.
        """
        if not self.is_parameters:
            self._follow(self.master, loaded, asks)

    def _follow(self, master: torch.Tensor, loaded: Sequence[tuple[int, int]], asks: bool) -> None:
        most = COMPARED.get(master.device.type, COMPARED["cuda"])
        for start in range(0, master.numel(), most):
            part = master[start : start + most]
            written = self._written(start, part)
            if not (asks and torch.equal(written, part.to(written.dtype))):
                follow_written(part, written)
            for first, last in loaded:
                here = slice(max(0, first - self.start - start), max(0, last - self.start - start))
                part[here].copy_(written[here])

    def _written(self, start: int, part: torch.Tensor) -> torch.Tensor:
        """Returns the parameters for `part`, the master from element `start` of the range on, on its device."""
        if self.tier == labels.DEVICE and self._placement.has_parameters(self.unit):
            return self.parameters.narrow(0, start, part.numel())
        written = torch.empty(part.shape, dtype=self.unit.dtypes.parameters, device=part.device)
        self._placement.read(self.unit, self.start + start, written)
        return written

    def note_parameters(self) -> None:
        """Records the parameters as the engine leaves them: later writes are a user's."""
        compares = self._placement.is_tiered and self._placement.has_parameters(self.unit)
        with torch.inference_mode(False):  # it outlives the call, which may be an evaluation's
            self._left = fingerprint(self.parameters) if compares and not self.is_parameters else None

    @property
    def is_present(self) -> bool:
        """True if the master is in memory."""
        return True

    @property
    def may_be_written(self) -> bool:
        """True if the parameters may have been written to since `note_parameters`. Without tiers the writes are found
        by comparing parameters with the master.
        """
        if self.is_parameters:
            return False
        if self._left is None:
            return not self._placement.is_tiered
        return bool(self._left != fingerprint(self.parameters))

    @contextmanager
    def visit(self, tile: Sequence[PlacedSegment]) -> Iterator[None]:
        """Makes masters, states and gradients of a tile of this range available for an update inside; then its
        parameters are set to the rounded masters.
        """
        if (parts := self._parts.get(id(tile))) is None:
            parts = self._parts[id(tile)] = [*_parts_of(tile)]
        yield
        for unit, start, master in parts:
            self._placement.put(unit, start, master)

    @contextmanager
    def gradients(self, edits: bool = False) -> Iterator[None]:
        """Makes the gradients of this range readable inside, and with `edits` writable."""
        yield

    @property
    def group(self) -> object:
        """Ranges of one group may be updated in one tile; a range that is its own group is always one tile."""
        return self.tier


class PlacedSegment(Protocol):
    """A segment of the optimizer (optim/segments.py) as the tier of its range sees it."""

    shard_range: ShardRange
    segment: Segment
    tensor: nn.Parameter
    used: bool


def _parts_of(tile: Sequence[PlacedSegment]) -> Iterator[MasterPart]:
    """Yields a tile's parts that have masters."""
    for shard_range, segments in groupby(tile, lambda segment: segment.shard_range):
        if not shard_range.is_parameters:
            inside = [one.segment for one in segments]
            start = inside[0].offset
            stop = min(-(-(inside[-1].offset + inside[-1].numel) // 4) * 4, shard_range.stop)
            master = shard_range.segment(start, stop - start)
            yield shard_range.unit, start, master


class Placement:
    """Everything on the device. `ranges`: unit -> its ranges, in the order of its shard."""

    tiles_always = False
    """True if updates are made in tiles even if the optimizer needs none."""
    keeps_parameters = True
    """True if the shards of parameters are on the device."""
    is_tiered = False
    """True if masters may be in another tier, so that comparing them with the parameters would cost a transfer."""
    masters_follow = True
    """False while the parameters are temporary, so that no master follows writes to them."""
    asks = True
    """False on a GPU: the host does not wait for a comparison of parameters with masters in training."""
    unseen: UnseenWrites | None = None
    """The writes that an update has found; None: updates look for none."""

    def __init__(self) -> None:
        self.ranges: dict[UnitTensors, list[ShardRange]] = {}

    # -- destinations of gradients --------------------------------------------------------------------------

    def offloaded_numel(self, unit: UnitTensors) -> int:
        """Returns the number of leading elements of a shard whose optimizer states or gradients leave the device."""
        return 0

    def new_sink(self, unit: UnitTensors) -> GradientSink | None:
        """Returns the destination of the gradients of a unit's offloaded elements, or None if they stay."""
        return None

    def release_copied(self) -> None:
        """Waits for the sinks' copies, and gives the copied memory back."""

    # -- for an update ----------------------------------------------------------------------------------------

    def adopt(self, unit: UnitTensors) -> None:
        """Makes the masters of a unit from its parameters."""
        self.ranges[unit] = self.new_ranges(unit)
        for one in self.ranges[unit]:
            one.make_master()

    def new_ranges(self, unit: UnitTensors) -> list[ShardRange]:
        """Returns the ranges of a unit's shard, without masters."""
        return [ShardRange(self, unit, 0, unit.shard_numel)]

    def all_ranges(self) -> list[ShardRange]:
        """Returns the shard ranges of all units, in order."""
        return [one for ranges in self.ranges.values() for one in ranges]

    def ranges_without_masters(self, unit: UnitTensors) -> list[tuple[int, int]]:
        """Returns the ranges [start, stop) of a unit's shard that `round_masters` does not restore."""
        if unit not in self.ranges:  # it is frozen
            return [(0, unit.shard_numel)]
        return [(one.start, one.stop) for one in self.ranges[unit] if one.is_parameters]

    def held_tensors(self) -> Iterator[labels.Held]:
        """Yields the tensors placed here, without gradients."""
        for one in self.all_ranges():
            yield from one.held_tensors()

    def label_files(self) -> None:
        """Reports the bytes in files again, for an observer that registered after they were written."""

    def attach(self, optimizer: optim.Optimizer, segments: Sequence[PlacedSegment]) -> None:
        """Registers the `optimizer` whose states are placed here, and its new `segments`."""

    def visit(self, tile: Sequence[PlacedSegment]) -> AbstractContextManager[None]:
        """Makes masters, states and gradients of a tile available for an update inside."""
        return tile[0].shard_range.visit(tile) if tile else nullcontext()

    def round_masters(self) -> None:
        """Sets the parameters to the rounded masters."""
        for one in self.all_ranges():
            one.round_master()

    def follow(self, unit: UnitTensors, loaded: Collection[int], asks: bool = False) -> None:
        """Updates a unit's masters after its parameter shard was written to. `loaded`: parameters, by number, whose
        masters are replaced even if their rounded values are equal. `asks`: the host may wait for a comparison.
        """
        if not self.masters_follow:
            return
        self.wait()
        self.settle()  # what was read ahead is old
        segments = unit.layout.segments(unit.rank)
        ranges = [(one.offset, one.offset + one.numel) for one in segments if one.parameter in loaded]
        for one in self.ranges.get(unit, []):  # a frozen unit has no masters
            one.follow_parameters(ranges, asks)
            one.note_parameters()  # else the next step finds this write again, perhaps while a delayed update runs

    def note_parameters(self, unit: UnitTensors) -> None:
        """Records the unit's parameter shard as the engine leaves it."""
        for one in self.ranges.get(unit, []):
            one.note_parameters()

    def may_be_written(self, unit: UnitTensors) -> bool:
        """Returns True if the unit's parameter shard may have been written to since."""
        return any(one.may_be_written for one in self.ranges.get(unit, []))

    def restore_absent(self) -> None:
        """Makes the tensors of absent masters read as NaN again, after a write to them."""

    # -- places of parameter shards ---------------------------------------------------------------------------

    def keep_parameters(self, unit: UnitTensors, shard: torch.Tensor) -> torch.Tensor:
        """Returns the stored parameter shard of a unit, (shard_numel,): a copy of `shard`, which is on the device."""
        return labels.label(shard.to(unit.dtypes.shard, copy=True), unit.shard_category, unit.name)

    def drop(self, unit: UnitTensors) -> None:
        """Forgets the stored parameter shard of a frozen unit."""

    def has_parameters(self, unit: UnitTensors) -> bool:
        """Returns True if the unit's shard of parameters is on the device."""
        return True

    def fetch(self, unit: UnitTensors, place: torch.Tensor) -> None:
        """place := the unit's shard of parameters, for a gather."""
        place.copy_(unit.parameter_shard, non_blocking=True)

    def read(self, unit: UnitTensors, start: int, place: torch.Tensor) -> None:
        """place := elements from `start` on of the unit's shard."""
        place.copy_(unit.parameter_shard.narrow(0, start, place.numel()))

    def put(self, unit: UnitTensors, start: int, values: torch.Tensor) -> None:
        """Elements from `start` on of the unit's shard := values."""
        unit.parameter_shard.narrow(0, start, values.numel()).copy_(values)

    def keep(self, unit: UnitTensors, values: torch.Tensor, loaded: Collection[int] = ()) -> None:
        """The first elements of the unit's shard := `values`, which were gathered and maybe written to since. Masters
        change only if they are not rounded to `values`, except those of the parameters `loaded`, which change anyway.
        """
        if not unit.dtypes.keeps_masters:
            self.put(unit, 0, values)
            return
        most = COMPARED.get(values.device.type, COMPARED["cuda"])
        for part, written in zip(unit.parameter_shard[: values.numel()].split(most), values.split(most), strict=True):
            follow_written(part, written)
        for one in unit.layout.segments(unit.rank) if loaded else ():
            if one.parameter in loaded:
                self.put(unit, one.offset, values.narrow(0, one.offset, one.numel))

    # -- order in time ----------------------------------------------------------------------------------------

    @contextmanager
    def in_memory(self, write_back: bool) -> Iterator[None]:
        """Makes all states readable inside, and with `write_back` writable: for checkpoints and state dicts."""
        yield

    def settle(self) -> None:
        """Makes later work of the current stream wait for everything that an update has sent to the device."""

    def wait(self) -> None:
        """Blocks the host until everything that an update sent to the device has arrived: then masters may change."""
