"""The engine as its checkpoints see it, so that imports run downwards only: strategy.py has the whole."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn, optim

from ..comm.base import Comm
from ..offload.placement import Placement
from ..optim.delayed_update import UpdateSchedule
from ..optim.segments import OptimizerSegment
from ..optim.update import Update
from ..parameters.writes import Writes
from ..strides import MemoryOrder
from ..units.unit import Unit


class CheckpointEngine(Protocol):
    """The engine as the owner of a state."""

    stage: int
    module: nn.Module
    optimizer: optim.Optimizer
    comm: Comm
    units: list[Unit]
    trainable: list[nn.Parameter]
    frozen: list[nn.Parameter]
    names: list[str]
    orders: dict[nn.Parameter, MemoryOrder]
    placement: Placement
    update: Update
    schedule: UpdateSchedule
    writes: Writes

    @property
    def segments(self) -> list[OptimizerSegment]:
        """The optimizer's part of this rank's shards."""

    def holders(self) -> list[Unit]:
        """The units whose parameters must be made whole before they can be read."""

    def parameters_of(self, unit: Unit) -> list[nn.Parameter]:
        """Those with a piece in `unit`."""

    def whole(self, unit: Unit) -> AbstractContextManager[None]:
        """Inside, the unit's parameters are whole on every rank."""

    def settle(self) -> None:
        """Completes what is on its way."""

    def after_update(self) -> None:
        """The parameter shards hold new values."""

    def after_load(self) -> None:
        """The segments hold values from elsewhere."""

    def zero_grad(self) -> None:
        """Drops the gradients."""

    def _extra_state(self) -> dict[str, Any]: ...

    def _load_extra_state(self, extra: dict[str, Any]) -> None: ...
