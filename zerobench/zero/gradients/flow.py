"""How gradients get from autograd into buckets, and which buckets are in flight.

    arrive    autograd has computed a gradient: it is written into the buckets that hold a piece of it, and dropped
    reduce    the buckets that the stage calls due are sent; the next one fills meanwhile
    wait      oldest first, when too many are in flight, at the end of a backward, or before a second gradient

The order is decided here; units/bucket.py has the buffers, and the stages allocate and free their memory.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook

from .. import labels
from ..comm.streams import Handle
from ..engine import ShardedEngine
from ..layout import Piece
from ..modules.tied import ArrivalHook, TiedName, names_of_tied
from ..modules.wrapping import tensors_that_require_grad
from ..units.bucket import GradientBucket
from ..units.unit import Unit
from .placeholders import StandIn, StandIns
from .plain_backward import PlainBackward

REDUCTIONS_IN_FLIGHT = 1
"""Reductions that may run while the next unit fills, if their send buffers exist only for them."""


class GradientFlow:
    """The gradients of one engine on this rank.

    `pieces`         for each trainable parameter: the units that hold it, with their pieces
    `synchronizing`  True if backwards reduce, False if they keep their gradients here (no_sync)
    `plain`          the backward that the program has started itself, if one runs
    """

    _last: Callable[[], GradientFlow | None] = staticmethod(lambda: None)  # of all engines, the last that has sent

    def __init__(self, engine: ShardedEngine) -> None:
        self._engine = engine
        self._in_flight: deque[tuple[Unit, Handle, torch.Tensor | None]] = deque()  # the last: where the mean goes
        self.stand_ins = StandIns(engine, self.drop)
        self.plain = PlainBackward(engine)
        self._is_called = False  # `engine.backward` runs
        self.synchronizing = True
        self.buckets: list[GradientBucket] = []
        self.pieces: list[list[tuple[Unit, Piece]]] = []
        self._hooks: list[ArrivalHook] = []
        self.add(engine.units)

    def add(self, units: Iterable[Unit]) -> None:
        """Takes the gradients of `units`, which are new, as are their parameters in the engine's `trainable`."""
        engine, first = self._engine, len(self.pieces)
        new = list(enumerate(engine.trainable))[first:]
        self.pieces += [[] for _ in new]
        for unit in units:
            self.buckets.append(unit.gradients)
            for piece in unit.layout.pieces:
                self.pieces[piece.parameter].append((unit, piece))
                unit.gradients.expected.add(piece.parameter)
        self._hooks += [ArrivalHook(parameter, partial(_weakly(self._arrive), i)) for i, parameter in new]
        tied = names_of_tied(engine.module)
        for i, parameter in new:
            for module, name in tied.get(parameter, []):
                TiedName(parameter, module, name, partial(_weakly(self._take_use), i))

    # -- arrive ---------------------------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """True while this engine's backward runs, not another engine's or torch.autograd.grad."""
        return self._is_called or self.plain.is_running

    @contextmanager
    def called(self) -> Iterator[None]:
        """Around autograd's run in `engine.backward`."""
        self._is_called = True
        PlainBackward.called += 1
        try:
            yield
        finally:
            self._is_called = False
            PlainBackward.called -= 1

    def begin_backward(self) -> None:
        """Makes way for new gradients: those that the caller has dropped go, and the engine's hooks run last."""
        self.stand_ins.heed()
        self.stand_ins.take_away()
        for hook in self._hooks:
            hook.go_last()

    def begin_plain(self, *_: Any) -> None:
        """Called when a gradient comes to the module's output, or to a parameter: begins a backward, if none runs."""
        if not self.in_backward:
            self.plain.begin()

    def hear(self, output: Any) -> None:
        """Called with the output of a forward: a backward of the program's own comes there first."""
        if tensors := [one for one in tensors_that_require_grad(output) if one.grad_fn is not None]:
            register_multi_grad_hook(tensors, _weakly(self.begin_plain), mode="any")

    def _arrive(self, i: int, leaf: torch.Tensor) -> None:
        """Autograd is done with a parameter; `.grad` is None if all gradients were taken, or none computed."""
        gradient = leaf.grad
        if isinstance(gradient, StandIn):
            gradient = gradient.take_added()
        else:
            leaf.grad = None
        self.begin_plain()
        flat = None if gradient is None else self._accept(i, gradient)
        for unit, piece in self.pieces[i]:
            if flat is not None:
                self._fill(unit.gradients, piece, flat)
            unit.gradients.arrived.add(i)
            if self.synchronizing:
                self.reduce(self._engine.due(unit))

    def _take_use(self, i: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """Takes the gradient of one use of a tied parameter, or returns it for autograd to add to the sum."""
        self.begin_plain()
        if not (self.in_backward and self._hooks[i].is_alone and self._engine.trainable[i].requires_grad):
            return gradient
        flat = self._accept(i, gradient)
        for unit, piece in self.pieces[i]:
            self._fill(unit.gradients, piece, flat)
        return None

    def _accept(self, i: int, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of parameter `i`, flat, and marks it as used. Raises an error if it is not accepted."""
        engine = self._engine
        name = engine.names[i]
        labels.label(gradient, labels.GRADIENTS, name)
        if gradient.is_sparse:
            raise ValueError(f"{name}: its gradient is sparse, which flat buffers do not hold")
        engine.update.used.add(i)
        return engine.orders[engine.trainable[i]].flatten(gradient)

    def _fill(self, bucket: GradientBucket, piece: Piece, flat: torch.Tensor) -> None:
        if bucket.is_in_flight:  # a second gradient, after the bucket was sent: it goes in a round of its own
            self.wait_all()
        if bucket.check is not None:
            bucket.check()
        if not bucket.filled:
            bucket.open(sends=self.synchronizing)
        bucket.fill(piece, flat[piece.start : piece.stop])

    # -- launch and wait --------------------------------------------------------------------------------------

    def reduce(self, units: Iterable[Unit]) -> None:
        """Starts the reductions of `units`, in this order; waits for the oldest if too many are in flight."""
        for unit in units:
            if not unit.gradients.is_alone:
                self._launch(unit)

    def _launch(self, unit: Unit) -> None:
        comm, bucket = self._engine.comm, unit.gradients
        # two engines may share a backward: their threads would pair messages of units of the same name and size
        last = GradientFlow._last()
        if last is not None and last is not self:
            last.wait_all()
        GradientFlow._last = weakref.ref(self)
        while not bucket.stays and len(self._in_flight) >= REDUCTIONS_IN_FLIGHT:  # before this one takes more memory
            self._wait_oldest()
        # 1 a bucket without gradients is sent as zeros: all ranks send the same buckets
        if not bucket.filled:
            bucket.open(sends=True)
        bucket.zero_missing()
        # 2 before memory for the mean is allocated, since the tensor that was cast may be freed first
        bucket.wire = bucket.cast()
        # 3 straight into the shard if the collective can write there, which saves a copy
        target = bucket.target()
        comm.launches.add("reduction", unit.name)
        if bucket.all_reduces:  # as other systems do: every slice is summed, at twice the volume
            handle = comm.all_reduce(bucket.wire, unit.name)
        else:
            handle = comm.reduce_scatter(bucket.wire, unit.name, target, unit.layout.sizes)
        bucket.is_in_flight = True
        self._in_flight.append((unit, handle, target))

    @property
    def reducing(self) -> bool:
        """True while a reduction is in flight."""
        return bool(self._in_flight)

    def wait_all(self) -> None:
        """Waits for all reductions, and for copies of means to other tiers."""
        while self._in_flight:
            self._wait_oldest()
        self._engine.placement.release_copied()

    def _wait_oldest(self) -> None:
        """Waits in launch order, which is equal on all ranks."""
        unit, handle, target = self._in_flight.popleft()
        handle.wait()
        bucket = unit.gradients
        assert bucket.wire is not None
        bucket.is_in_flight = False
        mean = unit.own_slice(bucket.wire) if target is None else target
        if bucket.rest != 1:
            mean.div_(bucket.rest)
        bucket.store(mean)
        bucket.end_round()

    # -- around a backward and a step -------------------------------------------------------------------------

    def end_backward(self) -> None:
        """Clears arrivals, which do not apply to the next backward; `.grad` shows which gradients exist."""
        for bucket in self.buckets:
            bucket.arrived.clear()
        self.stand_ins.put()

    def drop(self, numbers: set[int]) -> None:
        """Drops this rank's gradients of these parameters."""
        self.wait_all()
        for number in numbers:
            for unit, piece in self.pieces[number]:
                unit.gradients.filled.discard(piece)
        # those not yet reduced are left out when their bucket is sent (`filled`, above); the rest is zeroed in place
        update = self._engine.update
        dropped = {one for one in update.segments if one.segment.parameter in numbers and one.bucket.is_reduced}
        for segment in dropped:
            segment.used = True
        for segment in update.visited(dropped.__contains__, edits=True):
            segment.bucket.segment(segment.segment.offset, segment.segment.numel).zero_()
        for segment in dropped:
            segment.used = False
        update.drop(numbers)

    def release(self) -> None:
        """Releases all buckets: the optimizer has used the gradients, or they are dropped."""
        for bucket in self.buckets:
            bucket.release()

    def check_reduced(self, what: str) -> None:
        """Raises RuntimeError if gradients were kept back by no_sync and never reduced."""
        self.stand_ins.heed()
        if any(bucket.filled and not bucket.is_alone for bucket in self.buckets):
            raise RuntimeError(f"{what}: the last backward was under no_sync; run one outside it before {what}()")


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls a method as long as its object lives, and afterwards returns its last argument.

    The garbage collector cannot see these hooks: an engine that they reference would never be freed, nor its files and
    threads.
    """
    found = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        living = found()
        return arguments[-1] if living is None else living(*arguments)

    return call
