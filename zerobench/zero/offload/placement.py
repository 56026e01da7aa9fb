"""Where a rank keeps its part of the model states: on the device, or in another tier, by the caller's policy.

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

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import nn, optim

from .. import labels
from ..bucket import GradientSink, UnitTensors
from ..layout import Segment
from ..parameters.access import UnseenWrites, fingerprint

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
            raise ValueError(f"offload.fraction: {self.fraction!r} is invalid; use a number in (0, 1]")
        if not (self.optimizer or self.gradients or self.parameters):
            raise ValueError("offload: nothing is selected; choose optimizer, gradients or parameters")
        if self.fraction < 1 and not self.optimizer:
            raise ValueError(f"offload.fraction: {self.fraction!r} applies to the optimizer; offload the optimizer too")
        if not leaves:
            raise ValueError(f"offload: {strategy} does not offload; use zero1, zero2 or zero3")
        if self.parameters and "parameters" not in leaves:
            raise ValueError(f"offload.parameters: {strategy} has whole parameters on every rank; use zero3")
        if self.delayed_after is not None and not (self.optimizer and self.gradients and self.fraction == 1):
            raise ValueError(
                "offload.delayed_after: an update can run during a forward only if all of it runs on the host; offload"
                " optimizer and gradients, with fraction=1"
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
            raise ValueError("offload.gradients: in files they need an optimizer there; offload the optimizer too")
        if self.delayed_after is not None:
            raise ValueError("offload.delayed_after: an update over files is not delayed; use offload=cpu")
        if self.buffers < LEAST_BUFFERS:
            raise ValueError(f"offload.buffers: {self.buffers} are too few; use at least {LEAST_BUFFERS}")
        if self.depth < 1:
            raise ValueError(f"offload.depth: {self.depth} is invalid; use at least 1")
        if self.block_bytes < 4096 or self.block_bytes % 4096:
            raise ValueError(f"offload.block_bytes: {self.block_bytes} is invalid; use a multiple of 4096")


# -- where the states are ------------------------------------------------------------------------------------------


COMPARED = {"cpu": 2**16, "cuda": 2**21}
"""Elements of a master that are compared with its parameters at a time: as many as a cache can hold."""


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

    def follow_parameters(self, loaded: Sequence[tuple[int, int]] = (), host_may_compare: bool = False) -> None:
        """Updates the master from the parameters: all elements in `loaded`, ranges [start, stop) of the shard; others
        only if the parameters differ from the rounded master. So unwritten elements keep bits that parameters cannot
        represent.

        `host_may_compare`: the host may compare first, which is faster, but waits for a device.
        """
        if not self.is_parameters:
            self._follow(self.master, loaded, host_may_compare)

    def _follow(self, master: torch.Tensor, loaded: Sequence[tuple[int, int]], host_may_compare: bool) -> None:
        max_numel = COMPARED.get(master.device.type, COMPARED["cuda"])
        for start in range(0, master.numel(), max_numel):
            part = master[start : start + max_numel]
            written = self._written(start, part)
            if not (host_may_compare and torch.equal(written, part.to(written.dtype))):
                follow_written(part, written)
            for first, last in loaded:
                overlap = slice(max(0, first - self.start - start), max(0, last - self.start - start))
                part[overlap].copy_(written[overlap])

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
        """True if the parameters may have been written to since `note_parameters`; always without tiers."""
        if self.is_parameters:
            return False
        if self._left is None:
            return not self._placement.is_tiered
        return bool(self._left != fingerprint(self.parameters))

    @contextmanager
    def visit(self, tile: Sequence[PlacedSegment]) -> Iterator[None]:
        """Makes a tile's masters, states and gradients available inside; then rounds the masters."""
        if (parts := self._parts.get(id(tile))) is None:
            parts = self._parts[id(tile)] = []
            for shard_range, segments in groupby(tile, lambda segment: segment.shard_range):
                if not shard_range.is_parameters:
                    *_, last = segments_of_tile = [segment.span for segment in segments]
                    start = segments_of_tile[0].offset
                    stop = min(-(-(last.offset + last.numel) // 4) * 4, shard_range.stop)  # with the gap behind it
                    parts.append((shard_range.unit, start, shard_range.segment(start, stop - start)))
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
    span: Segment
    tensor: nn.Parameter
    used: bool


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
    host_may_compare = True
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
        for shard_range in self.ranges[unit]:
            shard_range.make_master()

    def new_ranges(self, unit: UnitTensors) -> list[ShardRange]:
        """Returns the ranges of a unit's shard, without masters."""
        return [ShardRange(self, unit, 0, unit.shard_numel)]

    def all_ranges(self) -> list[ShardRange]:
        """Returns the shard ranges of all units, in order."""
        return [shard_range for ranges in self.ranges.values() for shard_range in ranges]

    def held_tensors(self) -> Iterator[labels.Held]:
        """Yields the tensors placed here, without gradients."""
        for shard_range in self.all_ranges():
            yield from shard_range.held_tensors()

    def label_files(self) -> None:
        """Reports the bytes in files again, for an observer that registered after they were written."""

    def attach(self, optimizer: optim.Optimizer, segments: Sequence[PlacedSegment]) -> None:
        """Registers the `optimizer` whose states are placed here, and its new `segments`."""

    def round_masters(self) -> None:
        """Sets the parameters to the rounded masters."""
        for shard_range in self.all_ranges():
            shard_range.round_master()

    def follow(self, unit: UnitTensors, loaded: Collection[int], host_may_compare: bool = False) -> None:
        """Updates a unit's masters after its parameter shard was written to. `loaded`: parameters, by number, whose
        masters are replaced even if their rounded values are equal. `host_may_compare`: it may wait for a comparison.
        """
        if not self.masters_follow:
            return
        self.wait()
        self.settle()  # what was read ahead is old
        segments = unit.layout.segments(unit.rank)
        bounds = [(s.offset, s.offset + s.numel) for s in segments if s.parameter in loaded]
        for shard_range in self.ranges.get(unit, []):  # a frozen unit has no masters
            shard_range.follow_parameters(bounds, host_may_compare)
            # else the next step finds this write again, perhaps while a delayed update runs
            shard_range.note_parameters()

    def note_parameters(self, unit: UnitTensors) -> None:
        """Records the unit's parameter shard as the engine leaves it."""
        for shard_range in self.ranges.get(unit, []):
            shard_range.note_parameters()

    def may_be_written(self, unit: UnitTensors) -> bool:
        """Returns True if the unit's parameter shard may have been written to since."""
        return any(shard_range.may_be_written for shard_range in self.ranges.get(unit, []))

    def restore_absent(self) -> None:
        """Makes the tensors of absent masters read as NaN again, after a write to them."""

    # -- parameter shards -------------------------------------------------------------------------------------

    def keep_parameters(self, unit: UnitTensors, shard: torch.Tensor) -> torch.Tensor:
        """Returns the stored parameter shard of a unit, (shard_numel,): a copy of `shard`, which is on the device."""
        return labels.label(shard.to(unit.dtypes.shard, copy=True), unit.shard_category, unit.name)

    def drop(self, unit: UnitTensors) -> None:
        """Forgets the stored parameter shard of a frozen unit."""

    def has_parameters(self, unit: UnitTensors) -> bool:
        """Returns True if the unit's shard of parameters is on the device."""
        return True

    def fetch(self, unit: UnitTensors, target: torch.Tensor) -> None:
        """target := the unit's shard of parameters, for a gather."""
        target.copy_(unit.parameter_shard, non_blocking=True)

    def read(self, unit: UnitTensors, start: int, target: torch.Tensor) -> None:
        """target := elements from `start` on of the unit's shard."""
        target.copy_(unit.parameter_shard.narrow(0, start, target.numel()))

    def put(self, unit: UnitTensors, start: int, values: torch.Tensor) -> None:
        """Elements from `start` on of the unit's shard := values."""
        unit.parameter_shard.narrow(0, start, values.numel()).copy_(values)

    def keep(self, unit: UnitTensors, values: torch.Tensor, loaded: Collection[int] = ()) -> None:
        """The first elements of the unit's shard := `values`, which were gathered and maybe written to since. A master
        whose rounded value equals the new one keeps its bits, unless its parameter is in `loaded`.
        """
        if not unit.dtypes.keeps_masters:
            self.put(unit, 0, values)
            return
        max_numel = COMPARED.get(values.device.type, COMPARED["cuda"])
        shard = unit.parameter_shard[: values.numel()]
        for part, written in zip(shard.split(max_numel), values.split(max_numel), strict=True):
            follow_written(part, written)
        for segment in unit.layout.segments(unit.rank) if loaded else ():
            if segment.parameter in loaded:
                self.put(unit, segment.offset, values.narrow(0, segment.offset, segment.numel))

    # -- order in time ----------------------------------------------------------------------------------------

    @contextmanager
    def in_memory(self, write_back: bool) -> Iterator[None]:
        """Makes all states readable inside, and with `write_back` writable: for checkpoints and state dicts."""
        yield

    def settle(self) -> None:
        """Makes later work of the current stream wait for everything that an update has sent to the device."""

    def wait(self) -> None:
        """Blocks the host until everything that an update sent to the device has arrived: then masters may change."""
