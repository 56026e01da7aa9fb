"""A unit of stage 3: whole parameters of one module group, and its states.

    sharded      this rank's `parameter_shard`; the parameters are hidden (parameters/access.py): reads are errors
    gathering    `full_parameters` has its memory back and is being filled by an all-gather
    unsharded    the parameters are views of `full_parameters`

By default the shard of trained half-precision parameters is the shard of their masters, which a gather first rounds.
A unit that *stays* is always unsharded, as in stages 1 and 2: its small parameters are not worth a gather.
A unit that is *held* stays unsharded until its reader releases it.

[Note: one storage a unit for life]
Autograd saves some weights as views and some as the leaf itself. Swapping in another storage would free
nothing until the graph is freed, and then give wrong gradients. So each unit has one permanent storage, resized
to nothing and back. While it is empty the parameters are views of a NaN: same shape, visible misuse.

A module group has a unit for each dtype and device, and separate ones for frozen and for owned parameters (stage3.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import nn

from .. import labels
from ..comm.base import Comm, Handle
from ..layout import Layout, MemoryOrder
from ..offload.placement import Placement
from ..parameters.access import Hiding, placeholder
from ..precision import TRAINED, Dtypes
from .unit import Unit

FREED = "storage of size 0"
"""torch's message for a view that reads a unit's storage while the storage is empty."""

IN_PARTS = (
    "where zero3 holds a part of it only; in a forward, name a module that contains every use in units=, or let"
    " persistence_numel keep it whole; in another method, register that by engine.register_forward_method; elsewhere,"
    " read it inside `with engine.full_parameters()`"
)

UNHEARD = (
    "to parameters that zero3 had not gathered, which it does when a gradient comes to a tensor that their module"
    " returned, or left in an attribute, in the engine's forward; return the tensor that the loss is made of, or name"
    " the module that made it in units="
)

SECOND_ORDER = (
    "goes through gradients of torch.autograd.grad(create_graph=True), as a gradient penalty does, and so reads"
    " parameters that zero3 has given back: it does not support double backward; use zero1 or zero2"
)


def stored_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Returns the dtype of the flat buffer that holds `parameter`: its own, or uint8 if that cannot be trained."""
    return parameter.dtype if parameter.dtype in TRAINED else torch.uint8


class GatheredUnit(Unit):
    """Whole parameters of one module group, one dtype, trainable or frozen. Starts unsharded.

    `gather`     the gather in flight, between `launch_unshard` and `unshard`
    `is_from_source`  True if the full parameters are those of the last gather from `source`, which ZeRO++ may have
                 quantized; False for the model's own values, and for an exact gather
    `is_kept`    True if small parameters are kept whole on every rank, by an option
    `stays`      True if it is always unsharded: kept, or the full parameters of a single rank
    `held`       number of readers that keep it unsharded
    """

    gather: Handle | None = None
    is_from_source = False
    held = 0

    def __init__(
        self, name: str, layout: Layout, comm: Comm, dtypes: Dtypes, placement: Placement,
        orders: dict[nn.Parameter, MemoryOrder], stays: bool, broadcast_initial: Callable[[torch.Tensor], None],
        hiding: Hiding,
    ) -> None:  # fmt: skip
        super().__init__(name, layout, comm, dtypes, placement)
        self.comm = comm
        self.source = comm.new_source(layout.sizes)
        self._hiding = hiding
        self.parameters = parameters = list(orders)
        self._orders = list(orders.values())
        self.trainable = layout.pieces[0].parameter >= 0
        self.is_kept = stays
        self.stays = stays or (comm.size == 1 and placement.keeps_parameters and not dtypes.keeps_masters)
        like = parameters[0]
        self.full_parameters = torch.zeros(layout.padded_numel, dtype=dtypes.parameters, device=like.device)
        labels.label(self.full_parameters, labels.PARAMETERS, name)
        # permanent: the storage of the full buffer is resized, but never replaced
        self._views = [
            order.view(self.full_parameters.narrow(0, piece.offset, piece.numel).view(parameter.dtype))
            for piece, parameter, order in zip(self.layout.pieces, parameters, self._orders, strict=True)
        ]
        self._holes = [placeholder(parameter) for parameter in parameters]
        for parameter, view in zip(parameters, self._views, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        broadcast_initial(self.full_parameters)
        self.parameter_shard = self.own_slice(self.full_parameters)
        if not self.stays:
            self.parameter_shard = placement.keep_parameters(self, self.parameter_shard)
        self.free()

    def held_tensors(self) -> Iterator[labels.Held]:
        yield from super().held_tensors()
        yield from self.source.held_tensors(self.name)

    def views(self) -> Iterable[tuple[nn.Parameter, torch.Tensor]]:
        """Returns each parameter with its view of the full buffer."""
        return zip(self.parameters, self._views, strict=True)

    def store(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """Keeps this rank's part of one parameter's `values`."""
        if self.is_whole:
            parameter.copy_(values)
            return
        number = next(number for number, p in enumerate(self.parameters) if p is parameter)
        piece, flat = self.layout.pieces[number], self._orders[number].flatten(values)
        first = self.start
        start, stop = max(piece.offset, first), min(piece.offset + piece.numel, first + self.shard_numel)
        if start < stop:
            if parameter.dtype not in TRAINED:
                flat = flat.to(parameter.dtype).view(torch.uint8)
            part = flat[start - piece.offset : stop - piece.offset].to(self.dtypes.parameters)  # not finer than those
            self.placement.put(self, start - first, part)

    def launch_unshard(self, exactly: bool = False) -> None:
        """sharded -> gathering: fills this rank's slice and launches the all-gather of the others. `exactly`: with the
        bits of the shards, even if training gathers quantized values.
        """
        if self.is_whole or self.gather is not None:
            return
        full = self.full_parameters
        # Memory that was allocated in inference mode could not be saved by a later forward for its backward.
        with torch.inference_mode(False), torch.no_grad():
            full.untyped_storage().resize_(full.numel() * full.element_size())
            try:
                self.placement.fetch(self, self.own_slice(full))
            except RuntimeError as error:
                full.untyped_storage().resize_(0)
                if "mutate a captured Tensor" not in str(error):  # a transform may write only to tensors of its own
                    raise
                raise RuntimeError(
                    f"{self.name}: zero3 cannot gather it inside of a transform of torch.func (jvp, grad, vjp, ...);"
                    " call the transform on engine.module inside `with engine.full_parameters()`, on every rank, or"
                    " use zero2"
                ) from error
            self.comm.launches.add("gather", self.name)
            if exactly:
                self.gather = self.comm.exact.all_gather(full, self.name, self.layout.sizes)
            else:
                self.gather = self.source.launch(full, self.name)
                self.is_from_source = True

    def unshard_exactly(self) -> None:
        """-> unsharded, with the exact bits of the shards."""
        if not self._is_exact:
            self.reshard()
            self.launch_unshard(exactly=True)
        self.unshard()

    def unshard(self) -> None:
        """-> unsharded: the parameters are views of the full buffer."""
        self.launch_unshard()
        if self.gather is None:
            return
        self.gather.wait()
        self.gather, self.is_whole = None, True
        labels.unit(labels.GATHERED, self.name, self.full_parameters.nbytes)
        for parameter, view in zip(self.parameters, self._views, strict=True):
            self._hiding.show(parameter, view)

    @property
    def _may_go(self) -> bool:
        return (self.is_whole or self.gather is not None) and not (self.stays or self.held)

    def reshard(self) -> None:
        """unsharded -> sharded; first updates the shard if a forward has written to the parameters in place."""
        if self._may_go:
            self.unshard()
            self.keep_written()
            self.free()

    def free(self) -> None:
        """unsharded -> sharded, whatever was written: frees the storage; the parameters read as NaN."""
        if not self._may_go:
            return
        self.unshard()  # a gather that was launched ahead and not needed must still be completed
        for parameter, hole in zip(self.parameters, self._holes, strict=True):
            self._hiding.hide(parameter, hole)
        torch.clear_autocast_cache()  # which would keep a copy of each parameter
        size = self.full_parameters.nbytes
        self._release()
        labels.unit(labels.FREED, self.name, size)
        self.is_whole = self.is_from_source = False

    def _release(self) -> None:
        if self.is_from_source:
            self.source.before_release(self.full_parameters, self.name)
        self.full_parameters.untyped_storage().resize_(0)

    def dissolve(self) -> None:
        """Frees all memory: other units have taken the parameters, which are present."""
        self._release()
        self.placement.drop(self)

    def keep_written(self) -> None:
        """Updates the shard from this rank's slice, if a forward has written to the parameters in place."""
        if self.is_whole and not (self.stays or self.held) and self.versions.written():
            self.keep_parameters(())

    @property
    def _is_exact(self) -> bool:
        """True if gathers have the exact bits of the shards, not the quantized values of ZeRO++."""
        return self.comm.exact is self.comm

    def keep_parameters(self, loaded: Collection[int]) -> None:
        if self.is_from_source and not self._is_exact:
            raise RuntimeError(
                f"{self.name}: its parameters were written to while they held the quantized values of ZeRO++;"
                " write in place inside `with engine.full_parameters()`"
            )
        if not self.stays:
            self.placement.wait()
            self.placement.keep(self, self.own_slice(self.full_parameters), loaded)
        self.follow(loaded)

    def follow(self, loaded: Collection[int]) -> None:
        self.source.invalidate()
        super().follow(loaded)

    def refresh(self) -> None:
        """Called after the parameters changed. A unit that stays gathers them unquantized: they contain its shard."""
        self.source.after_update()
        if self.stays:
            self.comm.launches.add("gather", self.name)
            self.comm.exact.all_gather(self.full_parameters, self.name, sizes=self.layout.sizes).wait()


class GathersAhead:
    """Gathers ahead of backward, delayed until memory is available.

    While backward runs a unit, its gradients fill a buffer of the unit's size while the previous unit's gradients are
    still being reduced from another. A gathered unit in addition to both would be stage 3's peak: it is gathered once
    half of this unit's gradients have been written and the reduction has completed, for which `make_room` waits.
    """

    def __init__(self, make_room: Callable[[], None]) -> None:
        self._make_room = make_room
        self._entered: Sequence[GatheredUnit] = ()
        self._waiting: Sequence[GatheredUnit] = ()

    def enter(self, units: Sequence[GatheredUnit], following: Sequence[GatheredUnit], must_wait: bool) -> None:
        """Enters `units` in backward, with `following` next; gathers the following units now unless it must wait."""
        self._entered, self._waiting = units, following
        if not must_wait:
            self.launch()

    def written(self, unit: Unit) -> None:
        """Called when a gradient of `unit` has come."""
        if self._waiting and unit in self._entered:
            arrived = unit.gradients.arrived
            if 2 * sum(piece.numel for piece in unit.layout.pieces if piece.parameter in arrived) >= unit.layout.numel:
                self._make_room()
                self.launch()

    def launch(self) -> None:
        """Gathers the waiting units, at the latest when backward reaches them, in the same order on all ranks."""
        waiting, self._waiting = self._waiting, ()
        for unit in waiting:
            unit.launch_unshard()

    def forget(self) -> None:
        """Clears the state when the backward ends."""
        self._entered, self._waiting = (), ()
