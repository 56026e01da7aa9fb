"""Host memory as a tier (ZeRO-Offload, arXiv 2101.06840): gradients go down as they are reduced, the update runs there.

    gradients   down, a unit's part as its reduction lands, in a stream of its own, into pinned memory
    update      torch's fused kernels on all cores, a tile at a time
    parameters  up, a tile's while the next one is being updated, in a stream of its own, through pinned memory

Over a step and all ranks, in half precision: 2ψ bytes down for each reduction, 2ψ up. In host memory, a rank: 12ψ/N
masters and states, 2ψ/N gradients, and a tile of gradients in fp32 and one of parameters on their way up.

On a machine without a GPU both are one memory; labels tell the tiers apart, and every byte moves all the same.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .. import labels
from ..protocols import GradientSink
from .placement import Places, Run

if TYPE_CHECKING:
    from ..optim.segments import OptimizerSegment
    from ..units.unit import Unit


@dataclass(frozen=True)
class Offload:
    """What leaves the device. `optimizer`: masters and states of `fraction` of every shard, with their update;
    `gradients`: of the same elements, from their reduction on; `parameters`: shards of stage 3. `delayed_after`: the
    step from which on updates are one step late (optim/delayed_update.py); None: never.
    """

    optimizer: bool = True
    gradients: bool = True
    parameters: bool = False
    fraction: float = 1.0
    delayed_after: int | None = None

    def check(self, strategy: str, leaves: Collection[str]) -> None:
        """Raises ValueError, one sentence, for what makes no sense. `leaves`: states that may under `strategy`."""
        if not 0 < self.fraction <= 1:
            raise ValueError(f"offload.fraction: {self.fraction!r} cannot be; use a part of 1 above 0")
        if not (self.optimizer or self.gradients or self.parameters):
            raise ValueError("offload: nothing is to leave; name optimizer, gradients or parameters")
        if self.fraction < 1 and not self.optimizer:
            raise ValueError(f"offload.fraction: {self.fraction!r} is a part of the optimizer; let the optimizer leave")
        if not leaves:
            raise ValueError(f"offload: {strategy} does not offload; use zero1, zero2 or zero3")
        if self.parameters and "parameters" not in leaves:
            raise ValueError(f"offload.parameters: {strategy} has whole parameters on every rank; use zero3")
        if self.delayed_after is not None and not (self.optimizer and self.gradients and self.fraction == 1):
            raise ValueError(
                "offload.delayed_after: an update can run behind a forward only where it is the host's alone; let"
                " optimizer and gradients leave, with fraction=1"
            )

    def part_of(self, shard_numel: int, align: int) -> int:
        """Elements of a shard that leave."""
        part = math.ceil(shard_numel * self.fraction)
        return min(shard_numel, -(-part // align) * align)

    def places(self, device: torch.device) -> Places:
        """What an engine on `device` asks where to keep things."""
        return HostPlaces(self, device)


def host_tensor(numel: int, dtype: torch.dtype, device: torch.device, category: str, name: str) -> torch.Tensor:
    """(numel,) in host memory, pinned where `device` is a GPU, not filled."""
    made = torch.empty(numel, dtype=dtype, pin_memory=device.type == "cuda")
    return labels.label(made, category, name, tier=labels.HOST)


STREAMS: dict[str, Any] = {"cuda": torch.cuda}
"""Device -> what has streams for it."""


class Bus:
    """Copies between a device and host memory. On CUDA each direction has a stream of its own: a copy is launched
    behind all that the current stream has been given, and waited for by whoever needs it.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = STREAMS.get(device.type)
        if self._cuda is not None:
            self._down, self._up = self._cuda.Stream(), self._cuda.Stream()
        self._fetched: Any = None
        self._leaving: deque[tuple[Any, Callable[[], None]]] = deque()

    def down(self, place: torch.Tensor, source: torch.Tensor) -> Any:
        """place := source, of one dtype; returns the event of its end, None where it has ended."""
        return self._copy(place, source, "_down")

    def up(self, place: torch.Tensor, source: torch.Tensor) -> Any:
        """The other way."""
        return self._copy(place, source, "_up")

    def _copy(self, place: torch.Tensor, source: torch.Tensor, way: str) -> Any:
        if self._cuda is None:
            place.copy_(source)
            return None
        stream = getattr(self, way)
        stream.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(stream):
            place.copy_(source, non_blocking=True)
        return stream.record_event()

    def release(self, end: Any, give_back: Callable[[], None]) -> None:
        """Memory that is read until the event `end` is given back by the time of the next such call: what computes need
        not wait for this copy, and has one before it to wait for at most.
        """
        self.release_all()
        self._leaving.append((end, give_back))

    def release_all(self) -> None:
        """All of it is given back, in the order of what computes, which is then behind the copies."""
        while self._leaving:
            end, give_back = self._leaving.popleft()
            end.wait()
            give_back()

    def fetch(self, place: torch.Tensor, source: torch.Tensor) -> None:
        """place := source, of the host's, in the current stream, before whatever comes next there."""
        place.copy_(source, non_blocking=True)
        if self._cuda is not None:
            self._fetched = self._cuda.current_stream().record_event()

    def wait_for_fetches(self) -> None:
        """The host goes on when it may write to what was fetched: an evaluation may still be reading it."""
        end, self._fetched = self._fetched, None
        wait_for(end)

    def join(self) -> None:
        """The current stream goes on when all that went up is there."""
        if self._cuda is not None:
            self._cuda.current_stream().wait_stream(self._up)

    def wait(self) -> None:
        """The host does."""
        if self._cuda is not None:
            self._up.synchronize()
        self.wait_for_fetches()


class HostGradients(GradientSink):
    """(leaving,) gradients in host memory. `spare`: what a delayed update works on while these are filled."""

    tier = labels.HOST

    def __init__(self, unit: Unit, numel: int, bus: Bus) -> None:
        self._unit, self._bus = unit, bus
        self.numel = numel
        self._kept = self._new(numel, unit.dtypes.gradients)
        self._spare: torch.Tensor | None = None
        self._end: Any = None
        self._read: Any = None  # the event at the end of the copy of what was taken last

    def _new(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return host_tensor(numel, dtype, self._unit.device, labels.GRADIENTS, self._unit.name)

    def take(self, mean: torch.Tensor, adds: bool) -> None:
        if not adds and mean.dtype == self._kept.dtype:
            self._end = self._read = self._bus.down(self._kept, mean)
            return
        arrived = self._new(mean.numel(), mean.dtype)  # summed, or cast, on the host
        self._read = self._bus.down(arrived, mean)
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
            self._bus.release(end, give_back)

    def view(self, offset: int, numel: int) -> torch.Tensor:
        return self._kept.narrow(0, offset, numel)

    def settle(self) -> None:
        end, self._end = self._end, None
        wait_for(end)

    def put_aside(self) -> torch.Tensor:
        """What is here belongs to an update that comes later; what arrives from now on lies elsewhere."""
        self.settle()
        kept = self._kept
        self._kept = self._spare if self._spare is not None else self._new(kept.numel(), kept.dtype)
        self._spare = kept
        return kept


class Upload:
    """Parameters on their way up: rounded in host memory, in one of two pinned places, and copied from there."""

    PLACES = 2

    def __init__(self, device: torch.device, bus: Bus) -> None:
        self.device = device
        self._bus = bus
        self._places: dict[tuple[torch.dtype, int], tuple[torch.Tensor, Any]] = {}
        self._next = 0
        self._most = 2**20

    def send(self, place: torch.Tensor, master: torch.Tensor) -> Any:
        """place := master, rounded. Returns the event after which `master` may change, None where that is now."""
        if place.dtype == master.dtype:
            return self._bus.up(place, master)
        for start in range(0, place.numel(), self._most):
            self._send_part(place[start : start + self._most], master[start : start + self._most])
        return None

    def _send_part(self, place: torch.Tensor, master: torch.Tensor) -> None:
        key = (place.dtype, self._next % self.PLACES)
        self._next += 1
        rounded, end = self._places.get(key, (None, None))
        if rounded is None:
            rounded = host_tensor(self._most, place.dtype, self.device, labels.PARAMETERS, "on their way up")
        wait_for(end)
        part = rounded.narrow(0, 0, place.numel())
        part.copy_(master)
        self._places[key] = rounded, self._bus.up(place, part)


class NoUpload:
    """Instead of an upload where the shards of parameters are in host memory, too: nothing need go up."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def send(self, place: torch.Tensor, master: torch.Tensor) -> Any:
        """place := master, rounded."""
        self._bus.wait_for_fetches()
        place.copy_(master)


class HostRun(Run):
    """A run whose master and states are in host memory."""

    tier = labels.HOST
    rounds_late = False

    def __init__(self, unit: Unit, start: int, stop: int, device: torch.device, upload: Upload | NoUpload) -> None:
        super().__init__(unit, start, stop)
        self._device, self._upload = device, upload

    def make_master(self) -> None:
        like = self.parameters
        self.master = host_tensor(like.numel(), self.unit.dtypes.master, self._device, labels.MASTER, self.unit.name)
        self.master.copy_(like)

    def round_master(self) -> None:
        self._upload.send(self.parameters, self.master)

    @contextmanager
    def visit(self, tile: Sequence[OptimizerSegment]) -> Iterator[None]:
        """As the tile is done, its parameters go up."""
        with labels.on_tier(labels.HOST):
            yield
        for share in tile:
            segment = share.segment
            place = share.unit.parameter_shard.narrow(0, segment.offset, segment.numel)
            self._upload.send(place, share.tensor.detach())


class HostPlaces(Places):
    """See Offload."""

    tiles_always = True

    def __init__(self, policy: Offload, device: torch.device) -> None:
        self._policy, self._device = policy, device
        self._bus = Bus(device)
        self.keeps_parameters = not policy.parameters
        self._upload = NoUpload(self._bus) if policy.parameters else Upload(device, self._bus)

    def leaving(self, shard_numel: int, align: int) -> int:
        return self._policy.part_of(shard_numel, align)

    def runs(self, unit: Unit) -> list[Run]:
        stop, most = unit.leaving, unit.layout.shard_numel
        if not self._policy.optimizer:
            return [Run(unit, 0, most)]
        runs: list[Run] = [HostRun(unit, 0, stop, self._device, self._upload)]
        return runs + [Run(unit, stop, most)] * (stop < most)

    def sink(self, unit: Unit) -> HostGradients | None:
        return HostGradients(unit, unit.leaving, self._bus) if self._policy.gradients else None

    def release_copied(self) -> None:
        self._bus.release_all()

    def keep_parameters(self, unit: Unit, shard: torch.Tensor) -> torch.Tensor:
        if self.keeps_parameters:
            return super().keep_parameters(unit, shard)
        kept = host_tensor(shard.numel(), shard.dtype, self._device, labels.PARAMETERS, unit.name)
        return kept.copy_(shard)

    def fetch(self, unit: Unit, place: torch.Tensor) -> None:
        if self.keeps_parameters:
            super().fetch(unit, place)
        else:
            self._bus.fetch(place, unit.parameter_shard)

    def settle(self) -> None:
        self._bus.join()

    def wait(self) -> None:
        self._bus.wait()


def wait_for(end: Any) -> None:
    """The host goes on when a copy has ended."""
    if end is not None:
        end.synchronize()
