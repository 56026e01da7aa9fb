"""Files as a tier (ZeRO-Infinity, arXiv 2104.07857): states that leave the device are in this rank's own file.

    chunk      the part of a unit's shard that is read, updated and written together: at most `block_bytes` of fp32
    paged      a tensor of the shard's elements in the file, chunk by chunk: parameters, gradients, master, a state
    visit      a chunk's master, states and gradients are in buffers of the pool while the optimizer updates them

A step's update is a pipeline over chunks: chunk k + 1 is read, chunk k is updated, chunk k - 1 is written. Parameters
of stage 3 are read for the gather after the next, in the order of the last step; gradients are written as they are
reduced. Every rank reads and writes its own 1/N (bandwidth-centric partitioning, section 5.1). Host memory contains the
pool, a chunk's gradients in fp32, if they are stored in half precision, and 1 Mi parameters twice on their way up; only
the optimizer's step counts grow with the model.

[Note: a chunk of a paged tensor]
    in the file     it has no buffer
    prefetched      a buffer of the pool is being filled from the file
    loaded          the buffer contains it: `view` is a view of it
                    then it is dropped, or written back, and its buffer is given back when that is done

[Note: a visit by the optimizer]
    load     the chunk is loaded, and the optimizer's tensors become views of its buffers
    update   torch's optimizer runs over these tensors
    store    states that it made are moved into the file; the tensors become NaN without memory again, so that misuse
             is visible, and the chunk is written back
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch
from torch import optim

from .. import labels
from ..bucket import GradientSink, UnitTensors
from ..low_bit import block_numel
from ..parameters.access import absent_value
from .cpu import TieredPlacement, wait_for
from .disk import FileStore, IoHandle, Pool, Region, Scratch
from .placement import LEAST_BUFFERS, NvmeOffload, PlacedSegment, ShardRange

MASTER = "master"
"""The master's name among the names of the optimizer's states."""

IN_THE_FILE = "in the file"

GIVING_BACK = 2
"""Buffers that a loaded chunk, with its states, may still need: a part of the parameters, old and new."""

AHEAD = 8
"""Chunks that are read ahead, as far as the pool has free buffers: as many as are at the disk concurrently."""

MOST_FETCHED = 2**16
"""Maximum number of fetches remembered per step."""


class PagedTensor:
    """(numel,) of `dtype` in the file. `chunks`: [start, stop) of each."""

    def __init__(
        self, store: FileStore, pool: Pool, numel: int, step: int, dtype: torch.dtype, category: str, name: str
    ) -> None:
        self.numel, self.dtype = numel, dtype
        self.chunks = [(start, min(numel, start + step)) for start in range(0, numel, step)]
        self._step, self._pool = step, pool
        sizes = ((stop - start) * dtype.itemsize for start, stop in self.chunks)
        self._regions: list[Region] = [store.allocate(size, category, name) for size in sizes]
        self._buffers: dict[int, tuple[torch.Tensor, IoHandle | None]] = {}  # of chunks; the handle of a read in flight

    def allocate(self, chunk: int) -> torch.Tensor:
        """In the file -> loaded, with arbitrary content."""
        self._buffers[chunk] = self._pool.take(), None
        return self.view(chunk)

    def prefetch(self, chunk: int, spare: int | None = None) -> bool:
        """In the file -> prefetched; with `spare` only if the pool has more free buffers than these, which the chunks
        that are needed now may take. Returns True if the chunk is prefetched or loaded.
        """
        if chunk not in self._buffers and (spare is None or self._pool.count - self._pool.taken > spare):
            buffer = self._pool.take()
            self._buffers[chunk] = buffer, self._regions[chunk].read(self._in(buffer, chunk))
        return chunk in self._buffers

    def load(self, chunk: int) -> torch.Tensor:
        """-> loaded; returns the view."""
        self.prefetch(chunk)
        buffer, handle = self._buffers[chunk]
        if handle is not None:
            handle.wait()
            self._buffers[chunk] = buffer, None
        return self.view(chunk)

    def is_loaded(self, chunk: int) -> bool:
        """Returns True if the chunk is in memory, and filled."""
        return chunk in self._buffers and self._buffers[chunk][1] is None

    def view(self, chunk: int) -> torch.Tensor:
        """Returns the chunk in memory, (stop - start,)."""
        return self._in(self._buffers[chunk][0], chunk)

    def drop(self, chunk: int) -> None:
        """-> in the file, without writing."""
        buffer, handle = self._buffers.pop(chunk)
        self._pool.give(buffer, after=handle)

    def write_back(self, chunk: int) -> None:
        """Loaded -> in the file, with its current values."""
        buffer, _ = self._buffers.pop(chunk)
        self._pool.give(buffer, after=self._regions[chunk].write(self._in(buffer, chunk)))

    def drop_all(self) -> None:
        """Drops all chunks that were read ahead."""
        for chunk in list(self._buffers):
            self.drop(chunk)

    def copy(self, chunk: int) -> torch.Tensor:
        """Returns a copy of a chunk's values in host memory, outside the pool."""
        values = self.load(chunk).clone()
        self.drop(chunk)
        return values

    def write(self, chunk: int, values: torch.Tensor, adds: bool = False) -> None:
        """chunk := values, of any dtype and device, or with `adds` chunk + values."""
        buffer = self._pool.take()
        target = self._in(buffer, chunk)
        target.copy_(values)
        if adds:
            target.add_(self.load(chunk))
            self.drop(chunk)
        self._pool.give(buffer, after=self._regions[chunk].write(target))

    def write_all(self, values: torch.Tensor, adds: bool = False) -> None:
        """All chunks := values, (numel,), or with `adds` their sum."""
        for chunk, (start, stop) in enumerate(self.chunks):
            self.write(chunk, values[start:stop], adds)

    def put(self, start: int, values: torch.Tensor) -> None:
        """Elements from `start` on := values; the rest of their chunks is unchanged."""
        for chunk, low, high in self._overlaps(start, values.numel()):
            part = values[low - start : high - start]
            if (low, high) == self.chunks[chunk]:
                self.write(chunk, part)
            else:
                first = self.chunks[chunk][0]
                self.load(chunk)[low - first : high - first].copy_(part)
                self.write_back(chunk)

    def read(self, start: int, target: torch.Tensor) -> None:
        """target := elements from `start` on."""
        for chunk, low, high in self._overlaps(start, target.numel()):
            first = self.chunks[chunk][0]
            target[low - start : high - start].copy_(self.load(chunk)[low - first : high - first])
            self.drop(chunk)

    def _overlaps(self, start: int, numel: int) -> Iterator[tuple[int, int, int]]:
        for chunk, (first, last) in enumerate(self.chunks):
            low, high = max(first, start), min(last, start + numel)
            if low < high:
                yield chunk, low, high

    def loaded_part(self, offset: int, numel: int) -> torch.Tensor:
        """Returns a view of elements of one loaded chunk."""
        chunk = offset // self._step
        return self.view(chunk).narrow(0, offset - self.chunks[chunk][0], numel)

    def _in(self, buffer: torch.Tensor, chunk: int) -> torch.Tensor:
        start, stop = self.chunks[chunk]
        return buffer[: (stop - start) * self.dtype.itemsize].view(self.dtype)


class FileRange(ShardRange):
    """Elements [start, stop) of a unit's shard, its chunk number `chunk`, whose master and states are in the file.

    `number`     its index among all chunks of this rank, in update order
    `paged`      the master and each state, by name
    `segments`   the optimizer's
    """

    tier = labels.HOST
    _placement: FilePlacement

    def __init__(
        self, placement: FilePlacement, unit: UnitTensors, bounds: tuple[int, int], chunk: int, number: int,
        master: PagedTensor,
    ) -> None:  # fmt: skip
        super().__init__(placement, unit, *bounds)
        self.chunk, self.number = chunk, number
        self.paged: dict[str, PagedTensor] = {MASTER: master}
        self.segments: list[PlacedSegment] = []
        self.master = placement.absent(self.stop - self.start, unit.dtypes.master)

    @property
    def group(self) -> object:
        return self

    @property
    def is_present(self) -> bool:
        return self._placement.is_in_memory

    @property
    def is_used(self) -> bool:
        """True if any part of the range has a gradient; otherwise the file need not have one."""
        return any(segment.used for segment in self.segments)

    @property
    def _gradients(self) -> PagedTensor | None:
        sink = self._placement.sinks.get(self.unit)
        return None if sink is None else sink.paged

    def held_tensors(self) -> Iterator[labels.Held]:
        """Yields nothing: the master is in the file."""
        return iter(())

    def make_master(self) -> None:
        self._placement.read(self.unit, self.start, self.paged[MASTER].allocate(self.chunk))
        self.paged[MASTER].write_back(self.chunk)

    def round_master(self) -> None:
        if self._placement.is_in_memory:
            self._placement.put_rounded(self, self.master)
        else:
            self._placement.put_rounded(self, self.paged[MASTER].load(self.chunk))
            self.paged[MASTER].drop(self.chunk)

    def follow_parameters(self, loaded: Sequence[tuple[int, int]] = (), host_may_compare: bool = False) -> None:
        if self._placement.is_in_memory:
            self._follow(self.master, loaded, host_may_compare)
        else:
            self._follow(self.paged[MASTER].load(self.chunk), loaded, host_may_compare)
            self.paged[MASTER].write_back(self.chunk)

    @contextmanager
    def visit(self, tile: Sequence[PlacedSegment]) -> Iterator[None]:
        if not self.is_used:  # nothing is updated: nothing need be read
            yield
            return
        # 1 load this chunk, and start reading those that are updated next
        needed = self._read_for_update()
        for paged in needed:
            paged.prefetch(self.chunk)
        for paged in needed:
            paged.load(self.chunk)
        spare = GIVING_BACK if len(self.paged) > 1 else LEAST_BUFFERS - len(needed)  # states may have to be made
        later = (r for r in islice(self._placement.file_ranges, self.number + 1, None) if r.is_used)
        for following in islice(later, AHEAD):
            if not all(paged.prefetch(following.chunk, spare) for paged in following._read_for_update()):
                break  # in order: a later one's buffers would be missed
        self._point_to({key: paged.view(self.chunk) for key, paged in self.paged.items()})
        # 2 update
        with labels.on_tier(labels.HOST):
            yield
        # 3 store
        self._placement.put_rounded(self, self.paged[MASTER].view(self.chunk))
        self._store_states()
        for paged in self.paged.values():
            paged.write_back(self.chunk)
        if self._gradients is not None:
            self._gradients.drop(self.chunk)

    def _read_for_update(self) -> list[PagedTensor]:
        return [*self.paged.values(), *([] if self._gradients is None else [self._gradients])]

    @contextmanager
    def gradients(self, edits: bool = False) -> Iterator[None]:
        paged = self._gradients
        if paged is None or not self.is_used:
            yield
            return
        paged.load(self.chunk)
        try:
            yield
        finally:
            (paged.write_back if edits else paged.drop)(self.chunk)

    def move_to_memory(self) -> None:
        """Moves masters and states into their own memory, until `move_to_file`."""
        copies = {key: paged.copy(self.chunk) for key, paged in self.paged.items()}
        self.master = copies[MASTER]
        self._point_to(copies)

    def move_to_file(self, write_back: bool) -> None:
        """Moves them back into the file; with `write_back` with their current values."""
        if write_back:
            self.paged[MASTER].write(self.chunk, self.master)
        self.move_states_to_file(write_back)
        self.master = self._placement.absent(self.stop - self.start, self.unit.dtypes.master)

    def move_states_to_file(self, keep: bool = True) -> None:
        """Moves states that are in memory into the file; without `keep` they are dropped."""
        self._store_states(keep)
        for key, paged in self.paged.items():
            if key != MASTER and paged.is_loaded(self.chunk):
                paged.write_back(self.chunk)

    def _point_to(self, tensors: dict[str, torch.Tensor]) -> None:
        for share in self.segments:
            offset, numel, shape = share.span.offset - self.start, share.span.numel, share.tensor.shape
            share.tensor.data = tensors[MASTER].narrow(0, offset, numel).view(shape)
            state = self._placement.optimizer.state.get(share.tensor, {})
            state |= {key: tensors[key].narrow(0, offset, numel).view(shape) for key in state.keys() & tensors.keys()}

    def _store_states(self, keep: bool = True) -> None:
        """Makes the optimizer's tensors absent; with `keep`, states that it made elsewhere first move to the pool."""
        for share in self.segments:
            offset, numel, shape = share.span.offset - self.start, share.span.numel, share.tensor.shape
            state = self._placement.optimizer.state.get(share.tensor, {})
            for key, value in state.items():
                if not isinstance(value, torch.Tensor) or value.shape != shape:
                    continue
                if keep:
                    paged = self.paged[key] = self._placement.paged_state(self.unit, key, value.dtype)
                    if not paged.is_loaded(self.chunk):  # the file does not have it yet
                        paged.allocate(self.chunk).zero_()
                    target = paged.view(self.chunk).narrow(0, offset, numel).view(shape)
                    if target.data_ptr() != value.data_ptr():
                        target.copy_(value)
                state[key] = self._placement.absent(numel, value.dtype).view(shape)
            share.tensor.data = self._placement.absent(numel, share.tensor.dtype).view(shape)


class FileGradients(GradientSink):
    """(numel,) gradients in the file; read into the pool for an update, or for a norm."""

    tier = labels.HOST

    def __init__(self, paged: PagedTensor) -> None:
        self.paged = paged
        self.numel = paged.numel

    def take(self, mean: torch.Tensor, adds: bool) -> None:
        self.paged.drop_all()  # what a step that has raised left loaded is old
        self.paged.write_all(mean, adds)

    def release(self, give_back: Callable[[], None]) -> None:
        give_back()  # it was copied into the pool

    def view(self, offset: int, numel: int) -> torch.Tensor:
        return self.paged.loaded_part(offset, numel)

    def settle(self) -> None:
        """Does nothing: a read waits for the writes before it."""


class FilePlacement(TieredPlacement):
    """Files for states: one file and one pool. `is_in_memory`: all are in memory, for a checkpoint."""

    optimizer: optim.Optimizer
    is_in_memory = False

    def __init__(self, policy: NvmeOffload, device: torch.device) -> None:
        super().__init__(policy, device)
        self._scratch = Scratch(policy.path)
        self._store = FileStore(self._scratch.path, policy.block_bytes, policy.depth, policy.direct)
        self.pool = Pool(policy.block_bytes, policy.buffers, pinned=device.type == "cuda")
        self._block_bytes = policy.block_bytes
        self._parameters: dict[UnitTensors, PagedTensor] = {}
        self._states: dict[tuple[UnitTensors, str], PagedTensor] = {}
        self._absent: dict[torch.dtype, torch.Tensor] = {}
        self.sinks: dict[UnitTensors, FileGradients] = {}
        self.file_ranges: list[FileRange] = []
        self._attached = 0  # ranges whose segments are known
        self._fetched: list[PagedTensor] = []  # in this step, in order
        self._last_step: list[PagedTensor] = []

    def _page(self, numel: int, dtype: torch.dtype, category: str, name: str) -> PagedTensor:
        """Returns a new tensor in the file; one of its chunks in fp32 fills a buffer."""
        step = self._block_bytes // max(4, dtype.itemsize)
        return PagedTensor(self._store, self.pool, numel, step, dtype, category, name)

    # -- for units -------------------------------------------------------------------------------------------

    def offloaded_ranges(self, unit: UnitTensors, stop: int) -> list[ShardRange]:
        master = self._page(stop, unit.dtypes.master, labels.MASTER, unit.name)
        first = len(self.file_ranges)
        self.file_ranges += [
            FileRange(self, unit, bounds, chunk, first + chunk, master) for chunk, bounds in enumerate(master.chunks)
        ]
        return [*self.file_ranges[first:]]

    def new_sink(self, unit: UnitTensors) -> FileGradients | None:
        if not self._policy.gradients:
            return None
        paged = self._page(self.offloaded_numel(unit), unit.dtypes.gradients, labels.GRADIENTS, unit.name)
        self.sinks[unit] = FileGradients(paged)
        return self.sinks[unit]

    def keep_parameters(self, unit: UnitTensors, shard: torch.Tensor) -> torch.Tensor:
        if self.keeps_parameters:
            return super().keep_parameters(unit, shard)
        self._parameters[unit] = paged = self._page(shard.numel(), shard.dtype, labels.PARAMETERS, unit.name)
        paged.write_all(shard)
        return self.absent(shard.numel(), shard.dtype)

    def drop(self, unit: UnitTensors) -> None:
        self._parameters.pop(unit, None)

    def has_parameters(self, unit: UnitTensors) -> bool:
        return unit not in self._parameters

    def _paged_parameters(self, unit: UnitTensors) -> PagedTensor | None:
        return None if self.is_in_memory else self._parameters.get(unit)

    def fetch(self, unit: UnitTensors, target: torch.Tensor) -> None:
        paged = self._paged_parameters(unit)
        if paged is None:
            super().fetch(unit, target)
            return
        if len(self._fetched) >= MOST_FETCHED:  # an evaluation has no end of steps
            self._fetched.clear()
        number = len(self._fetched)
        self._fetched.append(paged)
        for chunk, (start, stop) in enumerate(paged.chunks):
            values = paged.load(chunk)
            for following in range(chunk + 1, min(len(paged.chunks), chunk + AHEAD)):
                paged.prefetch(following, LEAST_BUFFERS)
            target[start:stop].copy_(values)
            paged.drop(chunk)
        # the tensor that followed this one in the last step is read ahead
        if self._last_step[number : number + 1] == [paged]:
            for ahead in self._last_step[number + 1 : number + 2]:
                for chunk in range(min(len(ahead.chunks), AHEAD)):
                    ahead.prefetch(chunk, LEAST_BUFFERS)

    def read(self, unit: UnitTensors, start: int, target: torch.Tensor) -> None:
        paged = self._paged_parameters(unit)
        if paged is None:
            super().read(unit, start, target)
        else:
            paged.read(start, target)

    def put(self, unit: UnitTensors, start: int, values: torch.Tensor) -> None:
        paged = self._paged_parameters(unit)
        if paged is None:
            super().put(unit, start, values)
        else:
            paged.put(start, values)

    def put_rounded(self, shard_range: FileRange, master: torch.Tensor) -> None:
        """Sets the parameters of the range to the rounded master."""
        paged = self._paged_parameters(shard_range.unit)
        if paged is not None:
            paged.put(shard_range.start, master)
        else:
            wait_for(self._upload.send(shard_range.parameters, master))  # the pool's buffers go to others

    def attach(self, optimizer: optim.Optimizer, segments: Sequence[PlacedSegment]) -> None:
        if block_numel(optimizer) > 1:
            raise ValueError(
                f"offload: {type(optimizer).__name__} has states that are smaller than its parameters, and files hold"
                " states of a parameter's size; use offload=Offload(), in host memory"
            )
        self.optimizer = optimizer
        for segment in segments:
            if isinstance(segment.shard_range, FileRange):
                segment.shard_range.segments.append(segment)
        for shard_range in self.file_ranges[self._attached :]:
            shard_range.move_states_to_file()
        self._attached = len(self.file_ranges)

    @contextmanager
    def in_memory(self, write_back: bool) -> Iterator[None]:
        for unit, paged in self._parameters.items():
            unit.parameter_shard = torch.cat([paged.copy(chunk) for chunk in range(len(paged.chunks))])
        for shard_range in self.file_ranges:
            shard_range.move_to_memory()
        self.is_in_memory = True
        try:
            yield
        finally:
            self.is_in_memory = False
            for shard_range in self.file_ranges:
                shard_range.move_to_file(write_back)
            for unit, paged in self._parameters.items():
                if write_back:
                    paged.write_all(unit.parameter_shard)
                unit.parameter_shard = self.absent(paged.numel, paged.dtype)
            self._end_step()

    def held_tensors(self) -> Iterator[labels.Held]:
        yield from super().held_tensors()
        yield self.pool.slab
        for nan in self._absent.values():
            yield labels.Held(nan, labels.OPTIMIZER, IN_THE_FILE, labels.HOST)

    def label_files(self) -> None:
        self._store.label_files()

    def settle(self) -> None:
        """Ends the update: waits until all is written. Raises its errors."""
        self._streams.join()
        self._end_step()

    def _end_step(self) -> None:
        """Waits until all writes are in the file; drops chunks that were read ahead and not used."""
        for paged in {*self._last_step, *self._fetched}:
            paged.drop_all()
        self._last_step, self._fetched = self._fetched, []
        self._store.drain()

    # -- for chunks --------------------------------------------------------------------------------------------

    def paged_state(self, unit: UnitTensors, key: str, dtype: torch.dtype) -> PagedTensor:
        """Returns a state of the unit's elements in the file, reserved when it is first asked for."""
        if (unit, key) not in self._states:
            numel = self.offloaded_numel(unit)
            self._states[unit, key] = self._page(numel, dtype, labels.OPTIMIZER, f"{unit.name} {key}")
        return self._states[unit, key]

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
