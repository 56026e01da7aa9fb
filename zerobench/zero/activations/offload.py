"""Memory of activations, on its way to the host and back.

[Note: the life of a moved]
What autograd saves of a unit are views: of a parameter, or of memory that the unit's forward has made. A *moved* is
such memory, a whole storage, whoever looks at it: three views of one storage travel once, and come back with the
strides that they had, so that the same kernels run over them. ::

    leaving     being copied to the host; the device's memory is still there           (a lane of their own down)
    away        on the host alone
    coming      the device has memory for it again, and it is being copied there       (another lane up)
    back        it is on the device until autograd lets go of it; what is on the host goes with it

A unit's storages are copied out while its forward runs, and must be gone when the next unit's forward ends: the compute
stream then waits for the copies (the host waits for nothing), and the device memory is freed in stream order. At most
two units' activations are so on the device. Backward fetches a unit's storages when it reaches the unit that ran after
it. A storage that is needed before its copy has completed is kept on the device.

Saved tensors are not to be written to. Autograd cannot see that behind hooks, so it is looked at here: when a moved is
away, and when backward asks for what was kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks

from .. import labels
from ..comm.streams import Collective, CommStream, Waitable
from ..modules.wrapping import tensors_that_require_grad

WRITTEN = "backward: {} was written to in place after the forward had saved it; write to a copy of it"


class AtOnce:
    """No lane: on a CPU a copy is done when it has been asked for."""

    def launch(self, copy: Collective) -> Waitable:
        """Does it."""
        copy(async_op=False)
        return self

    def wait(self) -> None:
        """There is nothing to wait for."""


class Launcher(Protocol):
    """Where copies run."""

    def launch(self, copy: Collective) -> Waitable:
        """Starts `copy` behind what computes; who waits for what is returned comes after it."""


@dataclass
class StreamPair:
    """Two, for a bus carries both ways at once. `pinned`: whether the host's memory is to be page-locked."""

    down: Launcher
    up: Launcher
    pinned: bool = False

    @staticmethod
    def of(device: torch.device) -> StreamPair:
        """A GPU's, or none."""
        return (
            StreamPair(CommStream(), CommStream(), pinned=True)
            if device.type == "cuda"
            else StreamPair(AtOnce(), AtOnce())
        )


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage as a (bytes,) uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class OffloadedStorage:
    """See the note. Starts leaving. `name`: of the unit that it is of."""

    def __init__(self, storage: torch.UntypedStorage, streams: StreamPair, name: str) -> None:
        self.name = name
        self._streams = streams
        self._device = storage.device
        self._here: torch.Tensor | None = bytes_of(storage)
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=streams.pinned)
        self._host = labels.label(host, labels.ACTIVATIONS, name, labels.HOST)
        self._travel: Waitable | None = streams.down.launch(partial(_copy, self._here, self._host))
        self._seen: list[tuple[torch.Tensor, int]] = []
        self._written = False

    def see(self, tensor: torch.Tensor) -> View:
        """`tensor`, which autograd saves, as a view of this memory. While it is leaving."""
        self._seen.append((tensor, tensor._version))
        return view_of(tensor, self)

    @property
    def takes_more(self) -> bool:
        """It is leaving, and nobody has written to it: what else is saved of this memory comes along."""
        return bool(self._seen) and self._is_intact()

    def _is_intact(self) -> bool:
        return all(tensor._version == version for tensor, version in self._seen)

    def go(self) -> None:
        """leaving -> away."""
        if self._seen:
            self._arrive()
            self._written = not self._is_intact()
            self._seen, self._here = [], None

    def fetch(self) -> None:
        """away -> coming."""
        if self._here is None:
            here = torch.empty(self._host.numel(), dtype=torch.uint8, device=self._device)
            self._here = labels.label(here, labels.ACTIVATIONS, self.name)
            self._travel = self._streams.up.launch(partial(_copy, self._host, here))

    def here(self) -> torch.Tensor:
        """-> back: the memory as (bytes,) on the device. Raises RuntimeError if its owner wrote to it while it left."""
        self.fetch()
        if self._written or not self._is_intact():
            raise RuntimeError(WRITTEN.format(f"an activation of {self.name}"))
        if not self._seen:
            self._arrive()
        assert self._here is not None
        return self._here

    def _arrive(self) -> None:
        travel, self._travel = self._travel, None
        if travel is not None:
            travel.wait()

    def __del__(self) -> None:
        if hasattr(self, "_travel"):
            self._arrive()  # a copy that nobody has waited for still reads and writes what is given back here


def _copy(source: torch.Tensor, destination: torch.Tensor, async_op: bool) -> None:
    destination.copy_(source, non_blocking=True)


class Memory(Protocol):
    """Where a view's bytes are."""

    def here(self) -> torch.Tensor:
        """(bytes,) uint8 on the device."""


@dataclass(frozen=True)
class View:
    """What autograd holds in place of a tensor whose memory may be elsewhere."""

    memory: Memory
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        """The tensor, bit for bit, with the strides that it had."""
        here = self.memory.here()
        like = torch.empty(0, dtype=self.dtype, device=here.device)
        return like.set_(here.untyped_storage(), self.offset, self.shape, self.stride)


def view_of(tensor: torch.Tensor, memory: Memory) -> View:
    """`tensor`'s view of what its storage holds, now in `memory`."""
    return View(memory, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())


@dataclass(frozen=True)
class KeptTensor:
    """What autograd holds of a tensor that stays where it is."""

    saved: torch.Tensor
    version: int

    def tensor(self) -> torch.Tensor:
        """The tensor. Raises RuntimeError if it was written to."""
        if self.saved._version != self.version:
            raise RuntimeError(WRITTEN.format(f"a saved tensor of shape {list(self.saved.shape)}"))
        return self.saved


def unpack(saved: View | KeptTensor) -> torch.Tensor:
    """The hook that autograd calls in backward."""
    return saved.tensor()


class UnitForward:
    """One run of a unit in a forward: its storages, which live as long as autograd wants them, and the run before."""

    def __init__(self, before: UnitForward | None) -> None:
        self.before = weakref.ref(before) if before is not None else lambda: None
        self._storages: list[weakref.ref[OffloadedStorage]] = []

    def add(self, moved: OffloadedStorage) -> None:
        """A moved of this run's."""
        self._storages.append(weakref.ref(moved))

    def storages(self) -> list[OffloadedStorage]:
        """Those that are still wanted."""
        return [moved for one in self._storages if (moved := one()) is not None]

    def fetch_before(self, _gradient: torch.Tensor) -> None:
        """Backward has come to this unit: what the one before it has saved is wanted next, the last tensors first."""
        before = self.before()
        for moved in reversed(before.storages() if before is not None else []):
            moved.fetch()


class Offloader:
    """Sends what autograd saves of units to the host, storages of `least_bytes` and more.

    `streams`: by device type, made as they are needed.
    """

    def __init__(self, least_bytes: int, streams: dict[str, StreamPair] | None = None) -> None:
        self._least = least_bytes
        self._streams = streams or {}
        self._last: UnitForward | None = None
        self._leaving: weakref.WeakValueDictionary[int, OffloadedStorage] = weakref.WeakValueDictionary()  # by address

    def run(self, unit: nn.Module, name: str, is_last: bool, forward: Callable[[], Any]) -> Any:
        """The forward of a unit; what it returns. Backward comes to the last one first: nothing of it is sent."""
        before, run = self._last, UnitForward(self._last)
        with saved_tensors_hooks(partial(self._pack, run, unit, name), unpack) if not is_last else nullcontext():
            output = forward()
        for moved in before.storages() if before is not None else []:
            moved.go()
        self._last = run
        tensors = list(tensors_that_require_grad(output))
        if tensors:
            register_multi_grad_hook(tensors, run.fetch_before, mode="any")  # which keeps the run as long as the graph
        return output

    def _pack(self, run: UnitForward, unit: nn.Module, name: str, tensor: torch.Tensor) -> View | KeptTensor:
        if stays_put(unit, tensor, self._least):
            return KeptTensor(tensor, tensor._version)
        storage = tensor.untyped_storage()
        moved = self._leaving.get(storage.data_ptr())
        if moved is None or not moved.takes_more:
            if tensor.device.type not in self._streams:
                self._streams[tensor.device.type] = StreamPair.of(tensor.device)
            moved = OffloadedStorage(storage, self._streams[tensor.device.type], name)
            self._leaving[storage.data_ptr()] = moved
            run.add(moved)
        return moved.see(tensor)


def stays_put(unit: nn.Module, tensor: torch.Tensor, least_bytes: int) -> bool:
    """Whether what autograd saves of `unit` is small, or no plain memory, or lies in the unit's own parameters and
    buffers: those have an owner, who may take and bring their memory.
    """
    if not _is_plain(tensor) or tensor.untyped_storage().nbytes() < least_bytes:
        return True
    owned = (one for one in (*unit.parameters(), *unit.buffers()) if _is_plain(one))
    return tensor.untyped_storage().data_ptr() in {one.untyped_storage().data_ptr() for one in owned}


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is dense memory and nothing else, on a device that has memory."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
    return plain and tensor.device.type != "meta" and not (tensor.is_conj() or tensor.is_neg())
