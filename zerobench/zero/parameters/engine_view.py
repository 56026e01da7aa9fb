"""The engine as writes to its parameters see it, so that imports run downwards only: strategy.py has the whole."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import torch
from torch import nn

from .versions import Versions


class ParameterPlacement(Protocol):
    """The tier of a unit's shard (offload/placement.py)."""

    def wait(self) -> None:
        """Masters may change afterwards."""


class ParameterUnit(Protocol):
    """A unit (units/unit.py) as its parameters' holder. `versions`: theirs, by which writes are found."""

    name: str
    is_whole: bool
    full_parameters: torch.Tensor
    versions: Versions

    @property
    def placement(self) -> ParameterPlacement:
        """Where shards are."""

    def homes(self) -> Iterable[tuple[nn.Parameter, torch.Tensor]]:
        """Each parameter of a unit that is not always whole, with its view of the full buffer."""

    def own_slice(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's view of a full tensor."""

    def keep_parameters(self, loaded: Collection[int]) -> None:
        """Shards and masters follow the full parameters."""

    def follow(self, loaded: Collection[int]) -> None:
        """Masters follow the shard."""


class ScheduleView(Protocol):
    """When updates are made (optim/delayed_update.py)."""

    def check_writable(self, name: str) -> None:
        """Raises RuntimeError where masters cannot follow what was written to `name` now."""


class WritesView(Protocol):
    """Writes of others (parameters/writes.py)."""

    def loaded(self, parameter: nn.Parameter) -> None:
        """All of `parameter` was copied to."""

    def store(self, unit: ParameterUnit, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """Keeps this rank's part of `values`."""


class ParameterEngine(Protocol):
    """The engine as the owner of a module's parameters."""

    module: nn.Module
    trainable: list[nn.Parameter]

    @property
    def schedule(self) -> ScheduleView:
        """When updates are made."""

    def parameters_by_unit(self) -> Sequence[tuple[ParameterUnit, Sequence[nn.Parameter]]]:
        """All units with their parameters."""

    def store(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """Keeps what this rank holds of `parameter`."""


class LoadingEngine(Protocol):
    """The engine as torch's load_state_dict meets it."""

    module: nn.Module

    @property
    def writes(self) -> WritesView:
        """Writes of others."""

    def unit_of_parts(self) -> dict[nn.Parameter, ParameterUnit]:
        """The unit of each parameter that is not always whole."""

    def settle(self) -> None:
        """Completes what is on its way."""
