"""An engine as its parts see it: its tensors, and the events of a unit that the stages implement (strategy.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn, optim

from . import labels
from .comm.base import Comm
from .layout import MemoryOrder
from .offload.placement import Placement
from .optim.segments import OptimizerSegment
from .optim.update import Update
from .units.unit import Unit


class ShardedEngine:
    """A model and its optimizer under one ZeRO stage.

    `trainable`  the parameters that are trained, in order, and their `names`; `frozen`: the others
    `orders`     the memory order of each parameter's elements
    `steps`      steps taken so far
    """

    stage = 0
    module: nn.Module
    optimizer: optim.Optimizer
    comm: Comm
    names: list[str]
    trainable: list[nn.Parameter]
    frozen: list[nn.Parameter]
    orders: dict[nn.Parameter, MemoryOrder]
    units: list[Unit]
    placement: Placement
    update: Update
    steps: int

    # -- the events, which a stage defines -------------------------------------------------------------

    def adopt(self) -> None:
        """Builds `self.units` from the parameters and fills them with rank 0's values."""

    def adopt_unfrozen(self, numbers: Sequence[int]) -> None:
        """Adds units to the end of `self.units` for the trainable parameters of these numbers, which were frozen."""

    def store(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """Keeps this rank's part of `values`, the whole values of `parameter`, in any dtype and on any device."""

    def read(self, parameter: nn.Parameter) -> torch.Tensor:
        """Returns a copy of the whole values of `parameter`; collective."""
        return parameter.detach().clone()

    def due(self, unit: Unit) -> Iterable[Unit]:
        """Called when all gradients of a parameter are in `unit`; returns the units to be reduced now, in order."""
        return ()

    def left_over(self) -> Iterable[Unit]:
        """Called after the backward; returns the units still to be reduced, in an order equal on all ranks."""
        raise NotImplementedError

    def raise_if_weights_are_temporary(self, what: str) -> None:
        """Raises RuntimeError inside `temporary_weights`."""

    def begin_backward(self) -> None:
        """Called before the first gradient of a backward."""

    def finish_backward(self) -> None:
        """Called when autograd has computed all gradients: reduces those that are left."""

    def abandon_backward(self) -> None:
        """Called when an exception has ended a backward."""

    def after_update(self) -> None:
        """Called when the parameter shards have new values."""

    def settle(self) -> None:
        """Completes transfers in flight, so that all of this rank's states can be read."""

    def forget(self) -> None:
        """Called when gradients are dropped: clears the stage's own state about them."""

    def gathered_units(self) -> list[Unit]:
        """Returns the units whose parameters must be made whole before they can be read."""
        return []

    def held_tensors(self) -> Iterator[labels.Held]:
        """Yields the engine's tensors except optimizer states. If tensors share a storage, the last label is valid."""
        raise NotImplementedError

    @contextmanager
    def whole(self, unit: Unit) -> Iterator[None]:
        """Makes `unit.full_parameters` available inside, on every rank."""
        yield

    @contextmanager
    def following_reads(self) -> Iterator[None]:
        """Follows reads of whole parameters inside the context, so that a backward through them gathers these again."""
        yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients that `step` has not consumed. `set_to_none` exists for compatibility with torch."""

    def after_load(self) -> None:
        """Refreshes the parameters after segments were overwritten."""

    def send_parameters(self) -> None:
        """Refreshes the parameters of all ranks after parameter shards were overwritten."""

    def close_forwards(self) -> None:
        """Frees gathered parameters, whatever was written to them; earlier forwards have no backward any more."""

    # -- queries --------------------------------------------------------------------------------------

    def parameters_by_unit(self) -> list[tuple[Unit, list[nn.Parameter]]]:
        """Returns all units with their parameters, including frozen ones if the stage shards them."""
        return [(unit, self.parameters_of(unit)) for unit in self.gathered_units() or self.units]

    @property
    def segments(self) -> list[OptimizerSegment]:
        """The optimizer's part of this rank's shards."""
        return self.update.segments

    def parameters_of(self, unit: Unit) -> list[nn.Parameter]:
        """Returns the trainable parameters with a piece in `unit`, in order."""
        return list({self.trainable[piece.parameter]: None for piece in unit.layout.pieces})

    def extra_state(self) -> dict[str, Any]:
        """Returns the engine's own JSON values for a checkpoint, equal on all ranks."""
        raise NotImplementedError

    def load_extra_state(self, extra: dict[str, Any]) -> None:
        """Restores the result of `extra_state`."""

    def names_in(self, unit: str) -> list[str]:
        """Names the trainable parameters of the unit of that name, for messages about its collectives."""
        pieces = [piece for each in self.units if each.name == unit for piece in each.layout.pieces]
        return [self.names[number] for number in dict.fromkeys(piece.parameter for piece in pieces)]
