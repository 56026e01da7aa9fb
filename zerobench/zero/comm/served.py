"""An engine as messages about its collectives name it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..layout import Layout


class ServedUnit(Protocol):
    """A unit of the engine, as a collective's `unit` names it."""

    @property
    def name(self) -> str:
        """The unit's name."""

    @property
    def layout(self) -> Layout:
        """The numbers of its parameters, among others."""


class ServedEngine(Protocol):
    """The engine whose collectives they are. `names`: of its trainable parameters, by number; `steps`: taken so far."""

    names: list[str]
    steps: int

    @property
    def units(self) -> Sequence[ServedUnit]:
        """Its units."""
