"""How gradients move: from autograd into units, and from full units over the ranks.

    arrive    autograd has made a gradient: it is written into its unit, divided by N, and dropped
    launch    a unit's gradients are cast to the wire's dtype and sent; the next unit fills meanwhile
    land      the mean of the own slice is there, where the optimizer looks or to be put there by the stage

Which memory opens and closes on the way is the stage's business (strategy.py, the events).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .. import labels
from ..layout import Piece
from ..modules.tied import ArrivalHook, TiedPlace, tied_places
from ..units.unit import Departing, Unit
from .placeholders import StandIns

if TYPE_CHECKING:
    from ..strategy import Strategy

REDUCTIONS_IN_FLIGHT = 1
"""Reductions that may run while the next unit fills, where what they send lives for them alone."""


class GradientFlow:
    """The gradients of one engine on this rank.

    `places`         of each trainable parameter: the pieces that hold it
    `synchronizing`  whether backwards reduce, or keep their gradients here (no_sync)
    `in_backward`    whether this engine's backward runs, not another engine's or torch.autograd.grad's
    """

    def __init__(self, engine: Strategy) -> None:
        self._engine = engine
        self._in_flight: deque[Unit] = deque()
        self._departing: deque[Departing] = deque()
        self.stand_ins = StandIns(engine)
        self.in_backward = False
        self.synchronizing = True
        self.places: list[list[tuple[Unit, Piece]]] = [[] for _ in engine.trainable]
        for unit in engine.units:
            for piece in unit.layout.pieces:
                self.places[piece.parameter].append((unit, piece))
        self._hooks = [
            ArrivalHook(parameter, partial(_weakly(self._arrive), i)) for i, parameter in enumerate(engine.trainable)
        ]
        tied = tied_places(engine.module)
        for i, parameter in enumerate(engine.trainable):
            for module, name in tied.get(parameter, []):
                TiedPlace(parameter, module, name, partial(_weakly(self._take_use), i))
            for unit, _ in self.places[i]:
                unit.expected.add(i)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Autograd's backward; every gradient arrives and, outside no_sync, is reduced."""
        self.stand_ins.heed()
        self.stand_ins.take_away()
        self._engine.update.begin()
        for hook in self._hooks:
            hook.go_last()
        self.in_backward = True
        try:
            loss.backward(retain_graph=retain_graph)
        finally:
            self.in_backward = False
        if self.synchronizing:
            self._engine.finish_reductions()
            self.land_all()
        for unit in self._engine.units:
            unit.arrived.clear()
        self.stand_ins.put()

    def _arrive(self, i: int, leaf: torch.Tensor) -> None:
        """Autograd is done with a parameter: with None where all its gradients were taken, or a Function has none."""
        engine = self._engine
        gradient, leaf.grad = leaf.grad, None
        flat = None if gradient is None else self._accept(i, gradient)
        for unit, piece in self.places[i]:
            if flat is not None:
                self._write(unit, piece, flat)
            unit.arrived.add(i)
            if self.synchronizing:
                engine.gradients_written(unit)

    def _take_use(self, i: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """The gradient of one use of a tied parameter; it goes on to the parameter where that is owed the sum."""
        if not (self.in_backward and self._hooks[i].is_alone and self._engine.trainable[i].requires_grad):
            return gradient
        flat = self._accept(i, gradient)
        for unit, piece in self.places[i]:
            self._write(unit, piece, flat)
        return None

    def _accept(self, i: int, gradient: torch.Tensor) -> torch.Tensor:
        """`gradient`, of parameter `i`, flat; it counts from now on. Raises where it cannot."""
        engine = self._engine
        name = engine.names[i]
        labels.label(gradient, labels.GRADIENTS, name)
        if gradient.is_sparse:
            raise ValueError(f"{name}: its gradient is sparse, which flat buffers do not hold")
        if not self.in_backward:
            raise RuntimeError(
                "call engine.backward(loss), not loss.backward(): the gradients must be reduced; for the backward of"
                " another engine's loss, freeze this one's model by requires_grad_(False)"
            )
        engine.update.used.add(i)
        return engine.orders[engine.trainable[i]].flatten(gradient)

    def _write(self, unit: Unit, piece: Piece, flat: torch.Tensor) -> None:
        engine = self._engine
        engine.check_gradient(unit)
        if unit.reduction is not None:  # a second gradient, after the unit was sent: it goes in a round of its own
            self.land_all()
        if not unit.filled:
            engine.open_gradients(unit)
        unit.write_gradient(piece, flat[piece.start : piece.stop], 1 / engine.comm.ranks)

    def launch(self, unit: Unit) -> None:
        """Starts the reduction of `unit`'s gradients; waits for the oldest if too many are in flight."""
        engine = self._engine
        if unit.is_alone:
            return
        if not unit.filled:
            engine.open_gradients(unit)
        while len(self._in_flight) >= engine.most_in_flight(unit):
            self._land()
        unit.zero_missing_gradients()
        wire = unit.cast_to_wire()
        engine.send_gradients(unit)
        unit.mean = engine.place_for_mean(unit)
        unit.reduction = engine.options.reduction(engine.comm, wire, unit.name, engine.stamp(unit), unit.mean)
        self._in_flight.append(unit)

    @property
    def reducing(self) -> bool:
        """Whether a reduction is in flight."""
        return bool(self._in_flight)

    def land_all(self) -> None:
        """No reduction is in flight afterwards."""
        while self._in_flight:
            self._land()
        self._let_go()

    def _let_go(self) -> None:
        while self._departing:
            self._departing.popleft().let_go()

    def _land(self) -> None:
        unit = self._in_flight.popleft()
        assert unit.reduction is not None
        unit.reduction.wait()
        unit.reduction = None
        self._engine.close_gradients(unit, unit.reduced_slice())
        unit.mean = None
        if unit.departure is None:
            unit.drop_wire()
        else:  # who computes need not wait for the copy: the next one's landing does
            self._let_go()
            self._departing.append(unit.take_departing())
        unit.filled.clear()
        unit.reduced = True

    def check_reduced(self, what: str) -> None:
        """Raises RuntimeError where gradients were kept back by no_sync and never reduced."""
        self.stand_ins.heed()
        if any(unit.filled and not unit.is_alone for unit in self._engine.units):
            raise RuntimeError(f"{what}: the last backward was under no_sync; run one outside it before {what}()")


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a method as long as its object lives; gives back its last argument afterwards. These hooks are out of the
    garbage collector's sight: an engine that they held would stay for good, with its files and threads.
    """
    found = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        living = found()
        return arguments[-1] if living is None else living(*arguments)

    return call
