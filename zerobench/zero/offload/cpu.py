"""Host memory as a tier (ZeRO-Offload, arXiv 2101.06840): gradients go down as they are reduced; the update runs there.

    gradients   down, a unit's part when its reduction completes, in its own stream, into pinned memory
    update      torch's fused kernels on all cores, a tile at a time
    parameters  up, a tile's while the next one is being updated, in their own stream, through pinned memory

Per step, over all ranks, in half precision: 2ψ bytes down for each reduction, 2ψ up. Host memory per rank: 12ψ/N
masters and states, 2ψ/N gradients, one tile of gradients in fp32, and one of parameters on their way up.

On a machine without a GPU both tiers are the same memory; labels distinguish them, and every byte is still copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .. import labels
from ..bucket import GradientSink, UnitTensors
from ..precision import flattened
from .placement import Offload, PlacedSegment, Placement, ShardRange


def host_tensor(numel: int, dtype: torch.dtype, device: torch.device, category: str, name: str) -> torch.Tensor:
    """Allocates (numel,) in host memory, pinned if `device` is a GPU, not filled."""
    tensor = torch.empty(numel, dtype=dtype, pin_memory=device.type == "cuda")
    return labels.label(tensor, category, name, tier=labels.HOST)


STREAMS: dict[str, Any] = {"cuda": torch.cuda}
"""Device type -> the torch module that has its streams."""


class CopyStreams:
    """Copies to and from host memory, on CUDA behind the current stream's work, in a stream per direction."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = STREAMS.get(device.type)
        if self._cuda is not None:
            self._down, self._up = self._cuda.Stream(), self._cuda.Stream()
        self._fetched: Any = None
        self._being_read: deque[tuple[Any, Callable[[], None]]] = deque()

    def down(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """target := source, of the same dtype; returns the event at its end, or None if it has ended."""
        return self._copy(target, source, "_down")

    def up(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Copies from the host to the device, as `down` does the other way."""
        return self._copy(target, source, "_up")

    def _copy(self, target: torch.Tensor, source: torch.Tensor, way: str) -> Any:
        if self._cuda is None:
            target.copy_(source)
            return None
        stream = getattr(self, way)
        stream.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    def release(self, end: Any, give_back: Callable[[], None]) -> None:
        """Gives memory back after the event `end`, at the next call: compute waits only for the copy before."""
        self.release_all()
        self._being_read.append((end, give_back))

    def release_all(self) -> None:
        """Gives all such memory back, in the order of the compute stream, which then waits for the copies."""
        while self._being_read:
            end, give_back = self._being_read.popleft()
            end.wait()
            give_back()

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """target := source (in host memory), in the current stream, before any later work there."""
        target.copy_(source, non_blocking=True)
        if self._cuda is not None:
            self._fetched = self._cuda.current_stream().record_event()

    def wait_for_fetches(self) -> None:
        """Makes the host wait until it may write to fetched memory, which an evaluation may still be reading."""
        end, self._fetched = self._fetched, None
        wait_for(end)

    def join(self) -> None:
        """Makes the current stream wait for all copies up."""
        if self._cuda is not None:
            self._cuda.current_stream().wait_stream(self._up)

    def wait(self) -> None:
        """Makes the host wait for all copies up and for fetches."""
        if self._cuda is not None:
            self._up.synchronize()
        self.wait_for_fetches()


class HostGradients(GradientSink):
    """(numel,) gradients in host memory. `_spare`: the gradients of a delayed update, while these are filled."""

    tier = labels.HOST

    def __init__(self, unit: UnitTensors, numel: int, streams: CopyStreams) -> None:
        self._unit, self._streams = unit, streams
        self.numel = numel
        self._kept = self._new(numel, unit.dtypes.gradients)
        self._spare: torch.Tensor | None = None
        self._end: Any = None
        self._read: Any = None  # the event at the end of the copy of what was taken last

    def _new(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return host_tensor(numel, dtype, self._unit.device, labels.GRADIENTS, self._unit.name)

    def take(self, mean: torch.Tensor, adds: bool) -> None:
        if not adds and mean.dtype == self._kept.dtype:
            self._end = self._read = self._streams.down(self._kept, mean)
            return
        arrived = self._new(mean.numel(), mean.dtype)  # summed, or cast, on the host
        self._read = self._streams.down(arrived, mean)
        wait_for(self._read)
        self.settle()
        if adds:
            self._kept.add_(arrived)
        else:
            self._kept.copy_(arrived)

    def release(self, give_back: Callable[[], None]) -> None:
        end, self._read = self._read, None
        if end is None:
            give_back()
        else:
            self._streams.release(end, give_back)

    def view(self, offset: int, numel: int) -> torch.Tensor:
        return self._kept.narrow(0, offset, numel)

    def settle(self) -> None:
        end, self._end = self._end, None
        wait_for(end)

    def held_tensors(self) -> Iterator[labels.Held]:
        for gradients in (self._kept, self._spare):
            if gradients is not None:
                yield labels.Held(gradients, labels.GRADIENTS, self._unit.name, self.tier)

    def put_aside(self) -> None:
        """See HostPlacement.put_gradients_aside. Two tensors alternate, so that a step allocates nothing."""
        self.settle()
        kept = self._kept
        self._kept = self._spare if self._spare is not None else self._new(kept.numel(), kept.dtype)
        self._spare = kept


ON_THEIR_WAY_UP = "on their way up"


class Upload:
    """Copies parameters up: rounded in host memory, in one of two pinned buffers, and copied from there. `copies`:
    False if the parameter shards are in host memory too, so that nothing is copied up.
    """

    BUFFERS, BUFFER_NUMEL = 2, 2**20

    def __init__(self, device: torch.device, streams: CopyStreams, copies: bool) -> None:
        self._device, self._streams, self._copies = device, streams, copies
        self._pinned: dict[tuple[torch.dtype, int], tuple[torch.Tensor, Any]] = {}
        self._next = 0

    def held_tensors(self) -> Iterator[labels.Held]:
        """Yields the pinned buffers."""
        for rounded, _ in self._pinned.values():
            yield labels.Held(rounded, labels.PARAMETERS, ON_THEIR_WAY_UP, labels.HOST)

    def send(self, target: torch.Tensor, master: torch.Tensor) -> Any:
        """target := master, rounded. Returns the event after which `master` may change; None if it may change now."""
        if not self._copies:
            self._streams.wait_for_fetches()
            target.copy_(master)
            return None
        if target.dtype == master.dtype:
            return self._streams.up(target, master)
        for start in range(0, target.numel(), self.BUFFER_NUMEL):
            piece = slice(start, min(start + self.BUFFER_NUMEL, target.numel()))
            key = (target.dtype, self._next % self.BUFFERS)
            self._next += 1
            rounded, end = self._pinned.get(key, (None, None))
            if rounded is None:
                rounded = host_tensor(self.BUFFER_NUMEL, target.dtype, self._device, labels.PARAMETERS, ON_THEIR_WAY_UP)
            wait_for(end)
            part = rounded.narrow(0, 0, piece.stop - piece.start)
            part.copy_(master[piece])
            self._pinned[key] = rounded, self._streams.up(target[piece], part)
        return None


class HostRange(ShardRange):
    """A range whose master and states are in host memory."""

    tier = labels.HOST

    def __init__(
        self, placement: Placement, unit: UnitTensors, start: int, stop: int, device: torch.device, upload: Upload
    ) -> None:  # fmt: skip
        super().__init__(placement, unit, start, stop)
        self._device, self._upload = device, upload

    def make_master(self) -> None:
        like = self.parameters
        self.master = host_tensor(like.numel(), self.unit.dtypes.master, self._device, labels.MASTER, self.unit.name)
        self.master.copy_(like)

    def round_master(self) -> None:
        self._upload.send(self.parameters, self.master)

    @contextmanager
    def visit(self, tile: Sequence[PlacedSegment]) -> Iterator[None]:
        """Sends the tile's parameters up when it is done."""
        with labels.on_tier(labels.HOST):
            yield
        for share in tile:  # of several units
            parameters = share.shard_range.unit.parameter_shard
            target = parameters.narrow(0, share.span.offset, share.span.numel)
            self._upload.send(target, flattened(share.tensor))


class TieredPlacement(Placement):
    """A placement by a policy: the first elements of every shard leave the device, the others stay."""

    tiles_always = True
    is_tiered = True

    def __init__(self, policy: Offload, device: torch.device) -> None:
        super().__init__()
        self._policy, self._device = policy, device
        self._streams = CopyStreams(device)
        self.keeps_parameters = not policy.parameters
        self._upload = Upload(device, self._streams, copies=not policy.parameters)

    def held_tensors(self) -> Iterator[labels.Held]:
        yield from super().held_tensors()
        yield from self._upload.held_tensors()

    def offloaded_numel(self, unit: UnitTensors) -> int:
        return self._policy.part_of(unit.shard_numel, unit.layout.align)

    def new_ranges(self, unit: UnitTensors) -> list[ShardRange]:
        stop, numel = self.offloaded_numel(unit), unit.shard_numel
        if not self._policy.optimizer:
            return [ShardRange(self, unit, 0, numel)]
        return self.offloaded_ranges(unit, stop) + [ShardRange(self, unit, stop, numel)] * (stop < numel)

    def offloaded_ranges(self, unit: UnitTensors, stop: int) -> list[ShardRange]:
        """Returns the ranges of the first `stop` elements of a unit's shard, which leave the device."""
        raise NotImplementedError


class HostPlacement(TieredPlacement):
    """Host memory for the states that a policy moves off the device."""

    def __init__(self, policy: Offload, device: torch.device) -> None:
        super().__init__(policy, device)
        self._host_shards: set[UnitTensors] = set()
        self._sinks: list[HostGradients] = []

    def offloaded_ranges(self, unit: UnitTensors, stop: int) -> list[ShardRange]:
        return [HostRange(self, unit, 0, stop, self._device, self._upload)]

    def new_sink(self, unit: UnitTensors) -> HostGradients | None:
        if not self._policy.gradients:
            return None
        self._sinks.append(HostGradients(unit, self.offloaded_numel(unit), self._streams))
        return self._sinks[-1]

    def put_gradients_aside(self) -> None:
        """Waits for the current gradients, and puts them aside for a later update; new ones are stored elsewhere."""
        for sink in self._sinks:
            sink.put_aside()

    def release_copied(self) -> None:
        self._streams.release_all()

    def keep_parameters(self, unit: UnitTensors, shard: torch.Tensor) -> torch.Tensor:
        if self.keeps_parameters:
            return super().keep_parameters(unit, shard)
        self._host_shards.add(unit)
        kept = host_tensor(shard.numel(), shard.dtype, self._device, labels.PARAMETERS, unit.name)
        return kept.copy_(shard)

    def drop(self, unit: UnitTensors) -> None:
        self._host_shards.discard(unit)

    def has_parameters(self, unit: UnitTensors) -> bool:
        return unit not in self._host_shards

    def fetch(self, unit: UnitTensors, target: torch.Tensor) -> None:
        if self.keeps_parameters:
            super().fetch(unit, target)
        else:
            self._streams.fetch(target, unit.parameter_shard)

    def settle(self) -> None:
        self._streams.join()

    def wait(self) -> None:
        self._streams.wait()


def wait_for(end: Any) -> None:
    """Makes the host wait for the end of a copy."""
    if end is not None:
        end.synchronize()
