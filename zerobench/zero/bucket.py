"""The memory of one unit on this rank: temporary buffers, and its gradients, from autograd to the optimizer.

[Note: the life of a gradient bucket]

    open       `full` has memory: before the first gradient of a round
    fill       a gradient, divided by N, or in fp16 by about √N, is written into its piece of `full`, or added to a
               gradient that waits there
    prepare    all gradients have come: missing ones become zeros, and the tensor to send is cast to the wire's dtype
    store      this rank's slice of the mean has come, and is kept in `shard`, or in the sink of a tier
    release    the optimizer has used it, or it is dropped: back to no gradients and no memory

A round lasts from open to store; micro-batches make several rounds before a release. A bucket holds buffers; when each
of these is called, and the reduction between prepare and store, is decided in gradients/flow.py. The stages differ in
when memory is allocated and freed: stage1.py has buckets that stay whole until the update, stage2.py frees buckets once
reduced.

    full     (padded_numel,)   this rank's gradients divided by N, or in fp16 by about √N
    shard    (shard_numel,)    the mean over the ranks, whose segments the optimizer sees, without the sink's part

At N = 1, without a sink, `full` and `shard` are one tensor, which has memory from the first gradient to the update.

[Note: slots]
Temporary buffers are allocated here (M_D: ZeRO, arXiv 1910.02054, section 6.3)::

    Heap     torch's allocator each time: freed memory goes to other tensors, and longer-lived ones may fragment it
    Arena    a slot of that size, allocated on first use and kept for good. Every step uses the same sizes: from the
             second step on nothing is allocated, and no long-lived tensor is placed between temporary ones

Each size has as many slots as were ever in use at the same time, each with its own allocation. The paper moves tensors
into one contiguous buffer; here the sizes are not known before the first step is over, and it suffices that no slot is
allocated or freed after it. All slots belong to the compute stream: they are taken and given back in its order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from . import labels
from .comm.base import Comm
from .layout import Layout, Piece
from .precision import Dtypes


class Heap:
    """torch's allocator: released memory can be reused by any tensor."""

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocates (numel,), not filled."""
        return torch.empty(numel, dtype=dtype, device=device)

    def give_back(self, taken: torch.Tensor) -> None:
        """Frees the memory of `taken` now, even if other references to the tensor remain."""
        taken.untyped_storage().resize_(0)

    def restore(self, tensor: torch.Tensor) -> None:
        """Gives memory to `tensor`, a permanent tensor object, if it has none; not filled."""
        if not tensor.untyped_storage().size():  # torch would replace memory of the same size, and copy it
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


class UnitTensors:
    """Parameters of one unit on one rank. `heap`: allocates temporary memory; an arena has it in slots."""

    full_parameters: torch.Tensor
    parameter_shard: torch.Tensor
    heap = Heap()

    def __init__(self, name: str, layout: Layout, comm: Comm, dtypes: Dtypes) -> None:
        self.name = name
        self.layout = layout
        self.rank = comm.rank
        self.start, stop = layout.bounds(comm.rank)
        self.shard_numel = stop - self.start
        self.size = comm.size
        self.dtypes = dtypes

    @property
    def device(self) -> torch.device:
        """The device of the full parameters, wherever the shards are."""
        return self.full_parameters.device

    @property
    def shard_category(self) -> str:
        """The label of the parameter shard."""
        return labels.MASTER if self.dtypes.keeps_masters else labels.PARAMETERS

    def own_slice(self, full: torch.Tensor) -> torch.Tensor:
        """Returns this rank's (shard_numel,) view of a (padded_numel,) tensor."""
        return full.narrow(0, self.start, self.shard_numel)


class GradientSink(Protocol):
    """The destination, off the device, of the reduced gradients of a shard's first `numel` elements."""

    tier: str
    numel: int

    def take(self, mean: torch.Tensor, adds: bool) -> None:
        """Keeps `mean`, (numel,), from the device, or adds it to the gradients kept here."""

    def release(self, give_back: Callable[[], None]) -> None:
        """Calls `give_back`, for the memory of the last `take`, once it has been read: now, or after a copy."""

    def view(self, offset: int, numel: int) -> torch.Tensor:
        """Returns a view of elements [offset, offset + numel) of the gradients."""

    def settle(self) -> None:
        """Waits until all gradients that were taken can be read."""

    def held_tensors(self) -> Iterator[labels.Held]:
        """Yields its tensors in memory."""
        return iter(())


def divisors(wire: torch.dtype, count: int) -> tuple[float, float]:
    """Returns the divisors (before, after) a sum over `count` ranks, whose product is `count`: (count, 1), but in fp16
    both about √count, so that small gradients do not vanish and sums do not overflow, as in FSDP2. There `before` is a
    power of two, so dividing by it is exact unless it underflows.
    """
    before = 1.0 if wire == torch.float16 else float(count)
    while before * before < count and count % before == 0:
        before *= 2
    return before, count / before


class GradientBucket:
    """One unit's gradients. Subclasses decide when memory is allocated and freed: open, prepare, store and release.

    `expected`    parameters, by number, whose gradients come in a backward
    `arrived`     parameters whose gradients have all come in the current backward
    `filled`      pieces whose elements of `full` have gradients that are not yet reduced
    `is_local`    True if nothing is sent, with one rank and no sink: full gradients and shard are one tensor
    `is_in_flight` True if its reduction was launched and not waited for
    `is_reduced`  True if the shard holds a mean that `step` has not consumed
    `all_reduces` True if every rank gets the whole sum, not only its own slice
    `divisor_after` the divisor of a sum over the ranks, 1 except in fp16
    `sink`        the destination of the shard's first elements, if they leave the device
    """

    shard: torch.Tensor
    full: torch.Tensor | None = None
    sink: GradientSink | None = None
    check: Callable[[], None] | None = None
    """Raises RuntimeError if a gradient comes while the unit's parameters, which it needs, are absent."""
    reduces_in_place = False
    """True if its reduction runs in place on a stream: it takes and frees no buffer of its own, so it may be launched
    however many others are in flight.
    """

    def __init__(self, unit: UnitTensors, comm: Comm, reduce_with: str) -> None:
        self.unit = unit
        self._divisor_before, self.divisor_after = divisors(unit.dtypes.wire, comm.averaged_ranks)
        self.all_reduces = reduce_with == "all_reduce"
        self.is_local = comm.size == 1
        self.expected: set[int] = set()
        self.arrived: set[int] = set()
        self.filled: set[Piece] = set()
        self.is_in_flight = self.is_reduced = False

    # -- defined by a stage ---------------------------------------------------------------------------------

    def open(self, sends: bool) -> None:
        """released, or reduced -> open. `sends`: gradients are reduced in this backward, not kept by no_sync."""

    def prepare(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """open -> ready to send; if no gradient has come since it was released or reduced, it opens first and sends
        zeros. Returns (sent, into): `sent`, (padded_numel,), in the wire's dtype; `into`, (shard_numel,), receives the
        mean, or None if it goes to this rank's slice of `sent`.
        """
        raise NotImplementedError

    def store(self, mean: torch.Tensor) -> None:
        """in flight -> reduced. `mean`: (shard_numel,), the tensor that `prepare` chose."""

    def release(self) -> None:
        """-> released: the optimizer has used the gradients, or they are dropped."""
        self.filled.clear()
        self.arrived.clear()
        self.is_reduced = self.is_in_flight = False

    # -- the same in all stages -----------------------------------------------------------------------------

    @property
    def has_all_gradients(self) -> bool:
        """True if every expected gradient has come."""
        return self.arrived >= self.expected

    def fill(self, piece: Piece, gradient: torch.Tensor) -> None:
        """Writes a gradient, (piece.numel,), scaled, to its piece of `full`, or adds it to the one there."""
        assert self.full is not None
        view, scale = self.full.narrow(0, piece.offset, piece.numel), 1 / self._divisor_before
        if piece in self.filled:
            view.add_(gradient, alpha=scale)
        elif view.dtype == gradient.dtype:
            torch.mul(gradient, scale, out=view)  # in one pass, without a copy of the gradient
        else:  # into a wider dtype this rounds once; into a narrower one twice, unless the divisor is a power of two
            view.copy_(gradient).mul_(scale)
        self.filled.add(piece)

    def zero_missing(self) -> None:
        """Zeroes padding and pieces without a gradient, which are sent too."""
        assert self.full is not None
        for piece in self.unit.layout.pieces:
            if piece not in self.filled:
                self.full.narrow(0, piece.offset, piece.numel).zero_()
        for offset, numel in self.unit.layout.gaps:
            self.full.narrow(0, offset, numel).zero_()

    def take_memory(self, dtype: torch.dtype, category: str) -> torch.Tensor:
        """Allocates (padded_numel,) from the heap, not filled. `category`: its label, by whether it is sent or kept."""
        buffer = self.unit.heap.take(self.unit.layout.padded_numel, dtype, self.shard.device)
        return labels.label(buffer, category, self.unit.name)

    def end_round(self) -> None:
        """-> reduced: the next gradient opens another round."""
        self.filled.clear()
        self.is_in_flight, self.is_reduced = False, True

    def held_tensors(self) -> Iterator[labels.Held]:
        """Yields its tensors between backwards: the shard, a sum that no_sync has kept, and the sink's."""
        for tensor in (self.shard, self.full):
            if tensor is not None:
                yield labels.Held(tensor, labels.GRADIENTS, self.unit.name)
        if self.sink is not None:
            yield from self.sink.held_tensors()

    # -- for the optimizer ----------------------------------------------------------------------------------

    def segment(self, offset: int, numel: int) -> torch.Tensor:
        """A view of the mean of elements [offset, offset + numel) of the rank's shard."""
        return self.shard.narrow(0, offset, numel)

    def drop(self, offset: int, numel: int) -> None:
        """Zeroes the mean of these elements."""
        self.segment(offset, numel).zero_()

    def tier_of(self, offset: int) -> str:
        """The tier of the gradient of element `offset` of the shard."""
        return labels.DEVICE

    def wait_for_copies(self) -> None:
        """Waits until all reduced gradients are where `segment` looks, including copies to other tiers."""
        if self.sink is not None:
            self.sink.settle()
