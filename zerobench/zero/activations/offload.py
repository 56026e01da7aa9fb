"""Offloading of activations to host memory, with their prefetch in backward, and their partition over ranks (P_a).

[Note: the life of an offloaded storage]
The tensors that autograd saves for a unit are views of a parameter, or of memory that the unit's forward allocated.
Such memory is offloaded as a whole storage: three views of one storage are copied once, and come back with their
strides, so that the same kernels run over them. ::

    copying out     being copied to the host; the device memory is still allocated     (stream `down`)
    on the host     in host memory only
    copying back    device memory is allocated again, and the copy back is running     (stream `up`)
    back            on the device until autograd drops it; the host copy is freed with it

A unit's storages are copied out while its forward runs, and must be gone when the next unit's forward ends: the compute
stream then waits for the copies (the host does not wait), and the device memory is freed in stream order. So the device
holds the activations of at most two units. Backward fetches a unit's storages when it reaches the unit that ran after
it. A storage that is needed before its copy has completed is kept on the device.

Saved tensors must not be written to. Autograd cannot check that behind hooks, so it is checked here: when the
device memory of a storage is freed, and when backward reads a tensor that was kept.

[Note: slots]
Inputs of recomputed units are stored in slots (bucket.py): tensors that autograd saves are copied there, without
allocations.

[Note: parts]
P_a (ZeRO, arXiv 1910.02054, section 6.1): ranks that share a model have equal activations between its units. Each rank
keeps such a saved tensor as ::

    part     1/n of its elements, flat, in its own memory: on the device, or offloaded
    whole    gathered when backward reaches the unit, before the unit is recomputed

Small, uneven or strided tensors stay whole. Parts and wholes have the same bits: nothing is rounded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from operator import call
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks

from .. import labels
from ..bucket import Slots
from ..comm.backends import CommStream
from ..comm.base import Handle, Threads, Waitable
from ..modules.wrapping import tensors_that_require_grad

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Saved = Callable[[], torch.Tensor]
"""The object that autograd keeps instead of a tensor; called in backward, it rebuilds the tensor."""

PLAIN = {torch.Tensor, nn.Parameter}
"""Types of tensors that consist only of their storage."""

WRITTEN = "backward: {} was written to in place after the forward had saved it; write to a copy of it"


@dataclass
class StreamPair:
    """A stream per direction, since a bus transfers both ways at once. `pinned`: page-locks the host memory."""

    down: CommStream | Threads
    up: CommStream | Threads
    pinned: bool = False

    @staticmethod
    def of(device: torch.device) -> StreamPair:
        """Creates a GPU's streams; on other devices copies run immediately."""
        if device.type == "cuda":
            return StreamPair(CommStream(), CommStream(), pinned=True)
        return StreamPair(Threads(), Threads())


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's whole storage as a (bytes,) uint8 tensor on its device."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


class OffloadedStorage:
    """A tensor's storage, of unit `name`, copied to the host and back (see the note), from now on."""

    def __init__(self, tensor: torch.Tensor, streams: StreamPair, name: str) -> None:
        self.name = name
        self._streams = streams
        self._device = tensor.device
        self._on_device: torch.Tensor | None = bytes_of(tensor)
        host = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8, pin_memory=streams.pinned)
        self._host = labels.label(host, labels.ACTIVATIONS, name, labels.HOST)
        self._copying: Waitable | None = streams.down.launch(partial(_copy, self._on_device, self._host))
        self._views: list[tuple[torch.Tensor, int]] = []
        self._written = False

    def save_view(self, tensor: torch.Tensor) -> Saved:
        """Returns `tensor`, which autograd saves, as a view of this storage, while it is copied out."""
        self._views.append((tensor, tensor._version))
        return view_of(tensor, self.memory)

    @property
    def shares_copy(self) -> bool:
        """True while it is copied out and has not been written to: further views of this memory share the copy."""
        return bool(self._views) and self._is_intact()

    def _is_intact(self) -> bool:
        return all(tensor._version == version for tensor, version in self._views)

    def free_device(self) -> None:
        """Waits for the copy, checks for writes during it, and frees the device memory: copying out -> on the host."""
        if self._views:
            self._wait()
            self._written = not self._is_intact()
            self._views, self._on_device = [], None

    def fetch(self) -> None:
        """Starts the copy back: on the host -> copying back."""
        if self._on_device is None:
            memory = torch.empty(self._host.numel(), dtype=torch.uint8, device=self._device)
            self._on_device = labels.label(memory, labels.ACTIVATIONS, self.name)
            self._copying = self._streams.up.launch(partial(_copy, self._host, memory))

    def memory(self) -> torch.Tensor:
        """Returns the memory on the device, (bytes,): -> back. Raises RuntimeError if it was written to in between."""
        self.fetch()
        if self._written or not self._is_intact():
            raise RuntimeError(WRITTEN.format(f"an activation of {self.name}"))
        if not self._views:
            self._wait()
        assert self._on_device is not None
        return self._on_device

    def _wait(self) -> None:
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.wait()

    def __del__(self) -> None:
        if hasattr(self, "_copying"):
            self._wait()  # an unfinished copy still reads and writes the memory that is freed here


def _copy(source: torch.Tensor, destination: torch.Tensor, async_op: bool) -> Waitable:
    destination.copy_(source, non_blocking=True)
    return Handle([])


def view_of(tensor: torch.Tensor, memory: Saved) -> Saved:
    """Returns a function that rebuilds `tensor`, bit for bit, from `memory()`, its storage's (bytes,) uint8."""
    dtype, offset, shape, stride = tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride()

    def rebuild() -> torch.Tensor:
        storage = memory()
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage.untyped_storage(), offset, shape, stride)

    return rebuild


def kept(tensor: torch.Tensor) -> Saved:
    """Returns a function that returns `tensor`, or raises RuntimeError if it was written to meanwhile."""
    version = tensor._version

    def unchanged() -> torch.Tensor:
        if tensor._version != version:
            raise RuntimeError(WRITTEN.format(f"a saved tensor of shape {list(tensor.shape)}"))
        return tensor

    return unchanged


class UnitForward:
    """One run of a unit in a forward, with weak references to its storages, which autograd owns, and the run before."""

    def __init__(self, before: UnitForward | None) -> None:
        self.before = weakref.ref(before) if before is not None else lambda: None
        self._storages: list[weakref.ref[OffloadedStorage]] = []

    def add(self, moved: OffloadedStorage) -> None:
        """Adds a storage of this run."""
        self._storages.append(weakref.ref(moved))

    def storages(self) -> list[OffloadedStorage]:
        """Returns the storages that autograd still holds."""
        return [moved for reference in self._storages if (moved := reference()) is not None]

    def fetch_before(self, _gradient: torch.Tensor) -> None:
        """Prefetches the previous unit's storages, last saved first, when backward reaches this unit."""
        before = self.before()
        for moved in reversed(before.storages() if before is not None else []):
            moved.fetch()


class ActivationPartition:
    """Divides tensors over `mesh`, which has one axis, or is None for a model that does not run."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self._mesh = mesh

    def divides(self, tensor: torch.Tensor) -> bool:
        """Returns True if all ranks can keep an equal part."""
        return self._mesh is not None and tensor.is_contiguous() and tensor.numel() % self._mesh.size() == 0

    def pack(self, tensor: torch.Tensor, name: str, keep: Callable[[torch.Tensor], Saved]) -> Saved:
        """Returns the object that rebuilds `tensor` from the ranks' parts; `keep` stores this rank's part."""
        from torch.distributed.tensor import DTensor, Replicate, Shard  # most of a second, for those who use it

        assert self._mesh is not None
        mesh, shape = self._mesh, tensor.shape
        everywhere = DTensor.from_local(tensor.detach().view(-1), mesh, [Replicate()], run_check=False)
        part = everywhere.redistribute(placements=[Shard(0)]).to_local()
        kept = keep(labels.label(part, labels.ACTIVATIONS, name))

        def whole() -> torch.Tensor:
            with torch.no_grad():
                flat = DTensor.from_local(kept(), mesh, [Shard(0)], run_check=False).full_tensor()
            return labels.label(flat, labels.ACTIVATIONS, name).view(shape)

        return whole


class Offloader:
    """Offloads the tensors that autograd saves for units to the host, in storages of at least `least_bytes`. `streams`:
    by device type, created on first use. `partition`: keeps only this rank's part of a tensor. `moves`: False if the
    parts stay on the device.
    """

    def __init__(
        self, least_bytes: int, streams: dict[str, StreamPair] | None = None,
        partition: ActivationPartition | None = None, moves: bool = True,
    ) -> None:  # fmt: skip
        self._least, self._partition, self._moves = least_bytes, partition, moves
        self._streams = streams or {}
        self._last: UnitForward | None = None
        self._copying_out: weakref.WeakValueDictionary[int, OffloadedStorage] = (
            weakref.WeakValueDictionary()
        )  # by address

    def run(self, unit: nn.Module, name: str, is_last: bool, forward: Callable[[], Any]) -> Any:
        """Runs the forward of a unit and returns its result. The last unit's tensors stay: they are read first."""
        before, run = self._last, UnitForward(self._last)
        keep = kept if is_last or not self._moves else partial(self._move, run, name)
        stays = is_last and self._partition is None
        with nullcontext() if stays else saved_tensors_hooks(partial(self._pack, keep, unit, name), call):
            output = forward()
        for moved in before.storages() if before is not None else []:
            moved.free_device()
        self._last = run
        tensors = list(tensors_that_require_grad(output))
        if tensors and self._moves:
            register_multi_grad_hook(tensors, run.fetch_before, mode="any")  # keeps the run alive with the graph
        return output

    def _pack(self, keep: Callable[[torch.Tensor], Saved], unit: nn.Module, name: str, tensor: torch.Tensor) -> Saved:
        if stays_put(unit, tensor, self._least):
            return kept(tensor)
        if self._partition is not None and self._partition.divides(tensor):
            return self._partition.pack(tensor, name, keep)
        return keep(tensor)

    def _move(self, run: UnitForward, name: str, tensor: torch.Tensor) -> Saved:
        storage = tensor.untyped_storage()
        moved = self._copying_out.get(storage.data_ptr())
        if moved is None or not moved.shares_copy:
            if tensor.device.type not in self._streams:
                self._streams[tensor.device.type] = StreamPair.of(tensor.device)
            moved = OffloadedStorage(tensor, self._streams[tensor.device.type], name)
            self._copying_out[storage.data_ptr()] = moved
            run.add(moved)
        return moved.save_view(tensor)


def stays_put(unit: nn.Module, tensor: torch.Tensor, least_bytes: int) -> bool:
    """Returns True for a small or unusual tensor, and for the unit's own, whose memory the strategy may free."""
    if not _is_plain(tensor) or tensor.untyped_storage().nbytes() < least_bytes:
        return True
    owned = (own for own in (*unit.parameters(), *unit.buffers()) if _is_plain(own))
    return tensor.untyped_storage().data_ptr() in {own.untyped_storage().data_ptr() for own in owned}


def _is_plain(tensor: torch.Tensor) -> bool:
    """Returns True if a tensor is a plain dense one, on a device with memory."""
    plain = type(tensor) in PLAIN and tensor.layout == torch.strided
    return plain and tensor.device.type != "meta" and not (tensor.is_conj() or tensor.is_neg())


class SlotSwapper:
    """Stores tensors of at least `least_bytes` that autograd saves for units in slots: inputs of recomputed units."""

    def __init__(self, least_bytes: int) -> None:
        self._least = least_bytes
        self._slots = Slots()

    def run(self, unit: nn.Module, name: str, is_last: bool, forward: Callable[[], Any]) -> Any:
        """Runs the forward of a unit and returns its result."""
        with saved_tensors_hooks(partial(self._pack, unit, name), call):
            return forward()

    def _pack(self, unit: nn.Module, name: str, tensor: torch.Tensor) -> Saved:
        if stays_put(unit, tensor, self._least):
            return kept(tensor)
        stored = bytes_of(tensor)
        slot = self._slots.take(stored.numel(), stored.device)
        labels.label(slot, labels.ACTIVATIONS, name).copy_(stored)
        saved = view_of(tensor, lambda: slot)
        weakref.finalize(saved, self._slots.give_back, slot)  # when autograd drops it
        return saved
