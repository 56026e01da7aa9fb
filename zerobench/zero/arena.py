"""Memory that comes and goes, in slots: one allocation a size, made once (M_D: ZeRO, arXiv 1910.02054, section 6.3).

Whoever needs memory for a while asks for it here::

    Heap     torch's allocator each time: what is free is another's, and may be cut up by what lives longer
    Arena    a slot of that size, made when it is first wanted and kept for good. A step wants what the one before it
             wanted: from the second on nothing is allocated, and nothing that stays lies between what comes and goes

Of each size there are as many slots as were ever taken at once, each an allocation of its own. The paper moves tensors
into one contiguous buffer; here nobody knows all sizes before the first step is over, and it is enough that none comes
or goes after it: a slot that is kept for good does not come to lie between others. All of them belong to the stream
that computes: they are taken and given back in its order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from . import labels
from .parcels import Kept, View, bytes_of, stays_put, unpack, view_of


class Heap:
    """torch's allocator: what is given back is anyone's."""

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """(numel,), not filled."""
        return torch.empty(numel, dtype=dtype, device=device)

    def give_back(self, taken: torch.Tensor) -> None:
        """`taken` is not needed any more. Its memory goes now, whoever still holds the tensor."""
        taken.untyped_storage().resize_(0)

    def restore(self, tensor: torch.Tensor) -> None:
        """`tensor`, one for life, has memory; not filled."""
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())

    def release(self, tensor: torch.Tensor) -> None:
        """`tensor`, one for life, needs no memory for a while."""
        tensor.untyped_storage().resize_(0)


class Arena(Heap):
    """Slots that are made once. Tensors for life keep what they have been given."""

    def __init__(self) -> None:
        self._slots = Slots()

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._slots.take(numel * dtype.itemsize, device).view(dtype)

    def give_back(self, taken: torch.Tensor) -> None:
        self._slots.give_back(taken)

    def release(self, tensor: torch.Tensor) -> None:
        """It keeps its memory: the next step wants it again."""


class Slots:
    """Memory by the byte: uint8 tensors, each a storage of its own. `taken`: by address; `free`: by size and device."""

    def __init__(self) -> None:
        self.taken: dict[int, torch.Tensor] = {}
        self.free: dict[tuple[int, torch.device], list[torch.Tensor]] = {}

    def take(self, size: int, device: torch.device) -> torch.Tensor:
        """(size,), not filled."""
        free = self.free.setdefault((size, device), [])
        slot = free.pop() if free else torch.empty(size, dtype=torch.uint8, device=device)
        self.taken[slot.data_ptr()] = slot
        return slot

    def give_back(self, taken: torch.Tensor) -> None:
        """A slot, or another view of it from its beginning on, is not needed any more."""
        slot = self.taken.pop(taken.data_ptr())
        self.free[slot.numel(), slot.device].append(slot)


class InSlot:
    """The bytes of a storage, copied to a slot, which is given back when nobody wants them any more."""

    def __init__(self, storage_bytes: torch.Tensor, slots: Slots, name: str) -> None:
        self._slots = slots
        self._slot = slots.take(storage_bytes.numel(), storage_bytes.device)
        labels.label(self._slot, labels.ACTIVATIONS, name)
        self._slot.copy_(storage_bytes)

    def here(self) -> torch.Tensor:
        """The slot."""
        return self._slot

    def __del__(self) -> None:
        if hasattr(self, "_slot"):
            self._slots.give_back(self._slot)


class Shelf:
    """Keeps what autograd saves of units in slots, storages of `least_bytes` and more: inputs of recomputed units."""

    def __init__(self, least_bytes: int) -> None:
        self._least = least_bytes
        self._slots = Slots()

    def run(self, unit: nn.Module, name: str, is_last: bool, forward: Callable[[], Any]) -> Any:
        """The forward of a unit; what it returns."""
        with saved_tensors_hooks(partial(self._pack, unit, name), unpack):
            return forward()

    def _pack(self, unit: nn.Module, name: str, tensor: torch.Tensor) -> View | Kept:
        if stays_put(unit, tensor, self._least):
            return Kept(tensor, tensor._version)
        return view_of(tensor, InSlot(bytes_of(tensor.untyped_storage()), self._slots, name))
