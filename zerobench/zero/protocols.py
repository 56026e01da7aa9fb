"""Units and sinks as the engine's lower modules see them, so that imports run downwards only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from .arena import Heap
from .layout import Layout
from .precision import Dtypes


class UnitView(Protocol):
    """A unit (units/unit.py) as its gradients and its tiers see it.

    `parameter_shard`   (shard_numel,) this rank's part of its parameters
    """

    parameter_shard: torch.Tensor

    @property
    def name(self) -> str:
        """For errors, labels and traces."""

    @property
    def rank(self) -> int:
        """The number of this rank's shard."""

    @property
    def layout(self) -> Layout:
        """Where its parameters lie, and which part is this rank's."""

    @property
    def dtypes(self) -> Dtypes:
        """Of its parameters, gradients, wire and masters."""

    @property
    def device(self) -> torch.device:
        """The device, wherever shards are."""

    @property
    def heap(self) -> Heap:
        """Where memory that comes and goes is from."""

    def own_slice(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's (shard_numel,) view of a (padded_numel,) tensor."""


class GradientSink(Protocol):
    """Where the gradients of a shard's first `numel` elements go when they are reduced: those that leave the device."""

    tier: str
    numel: int

    def take(self, mean: torch.Tensor, adds: bool) -> None:
        """`mean`, (numel,), on the device: keeps it, or adds it to what is here."""

    def release(self, give_back: Callable[[], None]) -> None:
        """Calls `give_back`, for the memory of what was taken last, once that has been read: now, or behind a copy."""

    def view(self, offset: int, numel: int) -> torch.Tensor:
        """The gradients of that range, where they are."""

    def settle(self) -> None:
        """Waits until all that was taken can be read."""
