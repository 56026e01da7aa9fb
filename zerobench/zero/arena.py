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

import torch


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
