"""The engine as writes to its parameters see it, so that imports run downwards only: strategy.py has the whole."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from .versions import Versions


class ParameterPlacement(Protocol):
    """The tier of a unit's shard (offload/placement.py)."""

    def wait(self) -> None:
        """Masters may change afterwards."""

    def follow(self, unit: Any, loaded: Collection[int], asks: bool) -> None:
        """The masters of a unit follow its shard of parameters."""

    def note_parameters(self, unit: Any) -> None:
        """A unit's shard of parameters is as the engine left it."""

    def may_be_written(self, unit: Any) -> bool:
        """True where that may not be so any more."""


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

    def keep_written(self) -> None:
        """The shard follows what a forward wrote to the full parameters."""

    def check_kept(self) -> None:
        """Raises RuntimeError where it could not."""

    def keep_parameters(self, loaded: Collection[int]) -> None:
        """Shards and masters follow the full parameters."""

    def follow(self, loaded: Collection[int]) -> None:
        """Masters follow the shard."""


class CommView(Protocol):
    """Collectives (comm/base.py). `on_streams`: they and the computation run behind the host."""

    on_streams: bool


class SegmentView(Protocol):
    """A segment of the optimizer's (optim/segments.py)."""

    tensor: nn.Parameter


class ScheduleView(Protocol):
    """When updates are made (optim/delayed_update.py)."""

    @property
    def is_at_work(self) -> bool:
        """True while masters are being updated."""

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
    def comm(self) -> CommView:
        """Its collectives."""

    @property
    def segments(self) -> Sequence[SegmentView]:
        """The optimizer's parameters."""

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
