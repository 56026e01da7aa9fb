"""Slots: memory for temporary buffers, allocated once per size and kept (M_D: ZeRO, arXiv 1910.02054, section 6.3).

Temporary buffers are allocated here::

    Heap     torch's allocator each time: freed memory goes to other tensors, and longer-lived ones may fragment it
    Arena    a slot of that size, allocated on first use and kept for good. Every step uses the same sizes: from the
             second step on nothing is allocated, and no long-lived tensor is placed between temporary ones

Each size has as many slots as were ever in use at the same time, each with its own allocation. The paper moves tensors
into one contiguous buffer; here the sizes are not known before the first step is over, and it suffices that no slot is
allocated or freed after it. All slots belong to the compute stream: they are taken and given back in its order.
"""

from __future__ import annotations

import torch


class Heap:
    """torch's allocator: released memory can be reused by any tensor."""

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocates (numel,), not filled."""
        return torch.empty(numel, dtype=dtype, device=device)

    def give_back(self, taken: torch.Tensor) -> None:
        """Frees the memory of `taken` now, even if other references to the tensor remain."""
        taken.untyped_storage().resize_(0)

    def restore(self, tensor: torch.Tensor) -> None:
        """Gives memory to `tensor`, a permanent tensor object; not filled."""
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())

    def release(self, tensor: torch.Tensor) -> None:
        """Frees the memory of `tensor`, a permanent tensor object, until `restore`."""
        tensor.untyped_storage().resize_(0)


class Arena(Heap):
    """Slots that are allocated once. Permanent tensors keep their memory."""

    def __init__(self) -> None:
        self._slots = Slots()

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._slots.take(numel * dtype.itemsize, device).view(dtype)

    def give_back(self, taken: torch.Tensor) -> None:
        self._slots.give_back(taken)

    def release(self, tensor: torch.Tensor) -> None:
        """Keeps the memory: the next step uses it again."""


class Slots:
    """Memory by the byte: uint8 tensors, each a storage of its own. `taken`: by address; `free`: by size and device."""

    def __init__(self) -> None:
        self.taken: dict[int, torch.Tensor] = {}
        self.free: dict[tuple[int, torch.device], list[torch.Tensor]] = {}

    def take(self, size: int, device: torch.device) -> torch.Tensor:
        """Returns a slot of (size,), not filled; allocates one if none of that size is free."""
        free = self.free.setdefault((size, device), [])
        slot = free.pop() if free else torch.empty(size, dtype=torch.uint8, device=device)
        self.taken[slot.data_ptr()] = slot
        return slot

    def give_back(self, taken: torch.Tensor) -> None:
        """Gives back a slot, or another view of it that starts at its first byte."""
        slot = self.taken.pop(taken.data_ptr())
        self.free[slot.numel(), slot.device].append(slot)
