"""Inputs of recomputed units in slots (arena.py): tensors that autograd saves are copied there, without allocations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from .. import labels
from ..arena import Slots
from .offload import KeptTensor, View, bytes_of, stays_put, unpack, view_of


class InSlot:
    """The bytes of a storage, copied to a slot, which is given back when autograd drops the last reference."""

    def __init__(self, storage_bytes: torch.Tensor, slots: Slots, name: str) -> None:
        self._slots = slots
        self._slot = slots.take(storage_bytes.numel(), storage_bytes.device)
        labels.label(self._slot, labels.ACTIVATIONS, name)
        self._slot.copy_(storage_bytes)

    def here(self) -> torch.Tensor:
        """Returns the slot."""
        return self._slot

    def __del__(self) -> None:
        if hasattr(self, "_slot"):
            self._slots.give_back(self._slot)


class SlotSwapper:
    """Stores tensors that autograd saves of units in slots, from `least_bytes` on: inputs of recomputed units."""

    def __init__(self, least_bytes: int) -> None:
        self._least = least_bytes
        self._slots = Slots()

    def run(self, unit: nn.Module, name: str, is_last: bool, forward: Callable[[], Any]) -> Any:
        """Runs the forward of a unit and returns its result."""
        with saved_tensors_hooks(partial(self._pack, unit, name), unpack):
            return forward()

    def _pack(self, unit: nn.Module, name: str, tensor: torch.Tensor) -> View | KeptTensor:
        if stays_put(unit, tensor, self._least):
            return KeptTensor(tensor, tensor._version)
        return view_of(tensor, InSlot(bytes_of(tensor), self._slots, name))
