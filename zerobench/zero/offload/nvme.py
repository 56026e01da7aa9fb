"""Files as a tier (ZeRO-Infinity, arXiv 2104.07857): states that leave the device are in this rank's own file.

    chunk      the part of a unit's shard that is read, updated and written together: at most `block_bytes` of fp32
    paged      a tensor of the shard's elements in the file, chunk by chunk: parameters, gradients, master, a state
    visit      a chunk's master, states and gradients are in buffers of the pool while the optimizer updates them

A step's update is a pipeline over chunks: chunk k + 1 is read, chunk k is updated, chunk k - 1 is written. Parameters
of stage 3 are read for the gather after the next, in the order of the last step; gradients are written as they are
reduced. Every rank reads and writes its own 1/N (bandwidth-centric partitioning, section 5.1).

Host memory contains the pool, `buffers` of `block_bytes`; a chunk's gradients in fp32, if they are stored in half
precision; and 1 Mi parameters twice on their way up. Nothing else grows with the model except the optimizer's step
counts: 4 bytes for each parameter's part of a chunk.

A visit by the optimizer:

    fill       its tensors become views of the pool, into which the chunk has been read
    update     torch's optimizer runs over these tensors; states that it makes are moved into the file
    empty      the tensors become NaN without memory again, so that misuse is visible, and the chunk is written back
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch
from torch import optim

from .. import labels
from ..low_bit import block_numel
from ..parameters.access import absent_value
from ..unit_tensors import UnitTensors
from .cpu import TieredPlacement, wait_for
from .paged_tensor import AHEAD, GIVING_BACK, PagedTensor, Swapper
from .placement import GradientSink, PlacedSegment, ShardRange
from .policy import LEAST_BUFFERS, NvmeOffload

MASTER = "master"
"""The master's name among the names of the optimizer's states."""

IN_THE_FILE = "in the file"


class FileRange(ShardRange):
    """Elements [start, stop) of a unit's shard, its chunk number `chunk`, whose master and states are in the file.

    `number`   its index among all chunks of this rank, in update order
    `kept`     the master and each state, by name
    """

    tier = labels.HOST

    def __init__(
        self,
        tier: FilePlacement,
        unit: UnitTensors,
        start: int,
        stop: int,
        chunk: int,
        number: int,
        master: PagedTensor,
    ) -> None:
        super().__init__(tier, unit, start, stop)
        self.chunk, self.number = chunk, number
        self._tier = tier
        self.kept: dict[str, PagedTensor] = {MASTER: master}
        self.master = tier.absent(stop - start, unit.dtypes.master)

    @property
    def group(self) -> object:
        return self

    @property
    def is_present(self) -> bool:
        return self._tier.is_in_memory

    def held_tensors(self) -> Iterator[labels.Held]:
        """Yields nothing: the master is in the file."""
        return iter(())

    def make_master(self) -> None:
        master = self.kept[MASTER].open(self.chunk)
        self._tier.read(self.unit, self.start, master)
        self.kept[MASTER].write_back(self.chunk)

    def round_master(self) -> None:
        if self._tier.is_in_memory:
            self._tier.give_back(self, self.master)
            return
        self.kept[MASTER].load(self.chunk)
        self._tier.give_back(self, self.kept[MASTER].present(self.chunk))
        self.kept[MASTER].drop(self.chunk)

    def follow_parameters(self, loaded: Sequence[tuple[int, int]] = (), asks: bool = False) -> None:
        if self._tier.is_in_memory:
            self._follow(self.master, loaded, asks)
            return
        self.kept[MASTER].load(self.chunk)
        self._follow(self.kept[MASTER].present(self.chunk), loaded, asks)
        self.kept[MASTER].write_back(self.chunk)

    @contextmanager
    def visit(self, tile: Sequence[PlacedSegment]) -> Iterator[None]:
        tier = self._tier
        if not tier.is_used(self):  # nothing is updated: nothing need be read
            yield
            return
        tier.bring(self)
        self._fill(tile, {key: kept.present(self.chunk) for key, kept in self.kept.items()})
        with labels.on_tier(labels.HOST):
            yield
        master = self.kept[MASTER].present(self.chunk)
        tier.give_back(self, master)
        self._empty(tile)
        for kept in self.kept.values():
            kept.write_back(self.chunk)
        tier.forget_gradients(self)

    @contextmanager
    def gradients(self, edits: bool = False) -> Iterator[None]:
        with self._tier.reading_gradients(self, write_back=edits):
            yield

    def take_out(self, segments: Sequence[PlacedSegment]) -> None:
        """Moves masters and states into their own memory, until `put_in`."""
        copies = {key: kept.copy(self.chunk) for key, kept in self.kept.items()}
        self.master = copies[MASTER]
        self._fill(segments, copies)

    def put_in(self, segments: Sequence[PlacedSegment], write_back: bool) -> None:
        """Moves them back into the file; with `write_back` with their current values."""
        if write_back:
            self.kept[MASTER].write(self.chunk, self.master)
        self.put_states(segments, write_back)
        self.master = self._tier.absent(self.stop - self.start, self.unit.dtypes.master)

    def put_states(self, segments: Sequence[PlacedSegment], keep: bool = True) -> None:
        """Moves states that are in memory into the file; without `keep` they are dropped."""
        self._empty(segments, keep)
        for key in self.kept.keys() - {MASTER}:
            if self.kept[key].is_present(self.chunk):
                self.kept[key].write_back(self.chunk)

    def _fill(self, tile: Sequence[PlacedSegment], chunk: dict[str, torch.Tensor]) -> None:
        """Makes the optimizer's tensors views of the chunk's tensors: master and states, by name."""
        for share in tile:
            at, numel, shape = share.segment.offset - self.start, share.segment.numel, share.tensor.shape
            share.tensor.data = chunk[MASTER].narrow(0, at, numel).view(shape)
            state = self._tier.optimizer.state.get(share.tensor, {})
            state |= {key: chunk[key].narrow(0, at, numel).view(shape) for key in state.keys() & chunk.keys()}

    def _empty(self, tile: Sequence[PlacedSegment], keep: bool = True) -> None:
        """Makes the tensors absent; with `keep`, states that the optimizer made elsewhere first move to the pool."""
        for share in tile:
            at, numel = share.segment.offset - self.start, share.segment.numel
            state, shape = self._tier.optimizer.state.get(share.tensor, {}), share.tensor.shape
            for key, value in state.items():
                if not isinstance(value, torch.Tensor) or value.shape != shape:
                    continue
                if keep:
                    place = self._tier.state_of(self, key, value.dtype).narrow(0, at, numel).view(shape)
                    if place.data_ptr() != value.data_ptr():
                        place.copy_(value)
                state[key] = self._tier.absent(numel, value.dtype).view(shape)
            share.tensor.data = self._tier.absent(numel, share.tensor.dtype).view(shape)


class FileGradients(GradientSink):
    """(numel,) gradients in the file; read into the pool for an update, or for a norm."""

    tier = labels.HOST

    def __init__(self, kept: PagedTensor) -> None:
        self.kept = kept
        self.numel = kept.numel

    def take(self, mean: torch.Tensor, adds: bool) -> None:
        self.kept.write_all(mean, adds)

    def release(self, give_back: Callable[[], None]) -> None:
        give_back()  # it was copied into the pool

    def view(self, offset: int, numel: int) -> torch.Tensor:
        return self.kept.view(offset, numel)

    def settle(self) -> None:
        """Does nothing: a read waits for the writes before it."""


class FilePlacement(TieredPlacement):
    """Files for the states that a policy moves off the device. `is_in_memory`: all are in memory, for a checkpoint."""

    optimizer: optim.Optimizer
    is_in_memory = False

    def __init__(self, policy: NvmeOffload, device: torch.device) -> None:
        super().__init__(policy, device)
        self.swapper = Swapper(policy, pinned=device.type == "cuda")
        self._parameters: dict[UnitTensors, PagedTensor] = {}
        self._states: dict[tuple[UnitTensors, str], PagedTensor] = {}
        self._absent: dict[torch.dtype, torch.Tensor] = {}
        self._sinks: dict[UnitTensors, FileGradients] = {}
        self._file_ranges: list[FileRange] = []
        self._segments: dict[FileRange, list[PlacedSegment]] = {}

    # -- for units -------------------------------------------------------------------------------------------

    def leaving_ranges(self, unit: UnitTensors, stop: int) -> list[ShardRange]:
        master = self.swapper.keep(stop, unit.dtypes.master, labels.MASTER, unit.name)
        first = len(self._file_ranges)
        mine = [
            FileRange(self, unit, start, end, chunk, first + chunk, master)
            for chunk, (start, end) in enumerate(master.chunks)
        ]
        self._file_ranges += mine
        return [*mine]

    def new_sink(self, unit: UnitTensors) -> FileGradients | None:
        if not self._policy.gradients:
            return None
        numel = self.offloaded_numel(unit)
        kept = self.swapper.keep(numel, unit.dtypes.gradients, labels.GRADIENTS, unit.name)
        self._sinks[unit] = FileGradients(kept)
        return self._sinks[unit]

    def keep_parameters(self, unit: UnitTensors, shard: torch.Tensor) -> torch.Tensor:
        if self.keeps_parameters:
            return super().keep_parameters(unit, shard)
        self._parameters[unit] = kept = self.swapper.keep(shard.numel(), shard.dtype, labels.PARAMETERS, unit.name)
        kept.write_all(shard)
        return self.absent(shard.numel(), shard.dtype)

    def drop(self, unit: UnitTensors) -> None:
        self._parameters.pop(unit, None)

    def has_parameters(self, unit: UnitTensors) -> bool:
        return unit not in self._parameters

    def fetch(self, unit: UnitTensors, place: torch.Tensor) -> None:
        if unit in self._parameters and not self.is_in_memory:
            self.swapper.fetch(self._parameters[unit], place)
        else:
            super().fetch(unit, place)

    def read(self, unit: UnitTensors, start: int, place: torch.Tensor) -> None:
        if unit in self._parameters and not self.is_in_memory:
            self._parameters[unit].read(start, place)
        else:
            super().read(unit, start, place)

    def put(self, unit: UnitTensors, start: int, values: torch.Tensor) -> None:
        if unit in self._parameters and not self.is_in_memory:
            self._parameters[unit].put(start, values)
        else:
            super().put(unit, start, values)

    def attach(self, optimizer: optim.Optimizer, segments: Sequence[PlacedSegment]) -> None:
        if block_numel(optimizer) > 1:
            raise ValueError(
                f"offload: {type(optimizer).__name__} has states that are smaller than its parameters, and files hold"
                " states of a parameter's size; use offload=Offload(), in host memory"
            )
        self.optimizer = optimizer
        new = self._file_ranges[len(self._segments) :]
        self._segments |= {one: [] for one in new}
        for segment in segments:
            if isinstance(segment.shard_range, FileRange):
                self._segments[segment.shard_range].append(segment)
        for one in new:
            one.put_states(self._segments[one])

    @contextmanager
    def in_memory(self, write_back: bool) -> Iterator[None]:
        for unit, kept in self._parameters.items():
            unit.parameter_shard = torch.cat([kept.copy(chunk) for chunk in range(len(kept.chunks))])
        for one, segments in self._segments.items():
            one.take_out(segments)
        self.is_in_memory = True
        try:
            yield
        finally:
            self.is_in_memory = False
            for one, segments in self._segments.items():
                one.put_in(segments, write_back)
            for unit, kept in self._parameters.items():
                if write_back:
                    kept.write_all(unit.parameter_shard)
                unit.parameter_shard = self.absent(kept.numel, kept.dtype)
            self.swapper.end_step()

    def held_tensors(self) -> Iterator[labels.Held]:
        yield from super().held_tensors()
        yield self.swapper.pool.slab
        for nan in self._absent.values():
            yield labels.Held(nan, labels.OPTIMIZER, IN_THE_FILE, labels.HOST)

    def label_files(self) -> None:
        self.swapper.label_files()

    def settle(self) -> None:
        """Ends the update: waits until all is written. Raises its errors."""
        self._streams.join()
        self.swapper.end_step()

    # -- for chunks --------------------------------------------------------------------------------------------

    def absent(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns NaNs of that size, without memory, so that reads of swapped-out state yield NaN."""
        if dtype not in self._absent:
            self._absent[dtype] = labels.label(
                torch.full((), absent_value(dtype), dtype=dtype), labels.OPTIMIZER, IN_THE_FILE, tier=labels.HOST
            )
        return self._absent[dtype].expand(numel)

    def restore_absent(self) -> None:
        for nan in self._absent.values():
            nan.fill_(absent_value(nan.dtype))

    def bring(self, one: FileRange) -> None:
        """Brings the range's chunk into the pool, and starts reading the chunks that are updated next."""
        here = self._kept_of(one)
        for kept in here:
            kept.launch(one.chunk)
        for kept in here:
            kept.load(one.chunk)
        spare = GIVING_BACK if len(one.kept) > 1 else LEAST_BUFFERS - len(here)  # states may have to be made
        behind = (other for other in islice(self._file_ranges, one.number + 1, None) if self.is_used(other))
        for following in islice(behind, AHEAD):
            if not all(kept.launch_if_free(following.chunk, spare) for kept in self._kept_of(following)):
                break  # in order: a later one's buffers would be missed

    def is_used(self, one: FileRange) -> bool:
        """Returns True if any part of the range has a gradient; otherwise the file need not have one."""
        return any(segment.used for segment in self._segments[one])

    def _kept_of(self, one: FileRange) -> list[PagedTensor]:
        """Returns all tensors that are read for the update of the range's chunk."""
        sink = self._sinks.get(one.unit)
        return [*one.kept.values(), *([] if sink is None else [sink.kept])]

    def give_back(self, one: FileRange, master: torch.Tensor) -> None:
        """Sets the parameters of the range to the rounded master."""
        kept = self._parameters.get(one.unit)
        if kept is not None and not self.is_in_memory:
            kept.put(one.start, master)
        else:
            wait_for(self._upload.send(one.parameters, master))  # the pool's buffers go to others

    def state_of(self, one: FileRange, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Returns a state of the range's chunk in the pool; creates it with zeros if the file does not have it yet."""
        unit = one.unit
        if (unit, key) not in self._states:
            numel = self.offloaded_numel(unit)
            self._states[unit, key] = self.swapper.keep(numel, dtype, labels.OPTIMIZER, f"{unit.name} {key}")
        one.kept[key] = kept = self._states[unit, key]
        if not kept.is_present(one.chunk):
            kept.open(one.chunk).zero_()
        return kept.present(one.chunk)

    @contextmanager
    def reading_gradients(self, one: FileRange, write_back: bool = False) -> Iterator[None]:
        """Brings the range's gradients into the pool inside; with `write_back`, changes to them are kept."""
        sink = self._sinks.get(one.unit)
        if sink is None or not self.is_used(one):
            yield
            return
        sink.kept.load(one.chunk)
        try:
            yield
        finally:
            (sink.kept.write_back if write_back else sink.kept.drop)(one.chunk)

    def forget_gradients(self, one: FileRange) -> None:
        """Drops the range's gradients from the pool: the optimizer has used them."""
        if sink := self._sinks.get(one.unit):
            sink.kept.drop(one.chunk)
