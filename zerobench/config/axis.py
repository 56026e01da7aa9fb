"""The questions that every axis of a cell answers: is it valid, which options has the engine, how is it called."""

from __future__ import annotations

from typing import Any, Protocol

from ..sections import Section
from ..strategies import StrategyOptions


class CellView(Protocol):
    """The part of a cell that its axes read: a CellConfig, which is made of them and so imports their modules."""

    @property
    def strategy(self) -> StrategyOptions:
        """The resolved section."""

    @property
    def model(self) -> Any:
        """The resolved section, a schema.Model."""

    @property
    def precision(self) -> Any:
        """The resolved section, a precision.Precision."""

    @property
    def zeropp(self) -> Any:
        """The resolved section, a zeropp.Zeropp."""

    @property
    def search(self) -> Any:
        """The resolved section, a schema.Search."""

    @property
    def recomputes(self) -> bool:
        """True where blocks are computed again in backward."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def node_size(self) -> int | None:
        """Ranks per node."""

    @property
    def shard_group(self) -> int | None:
        """Ranks that share a shard."""


class Axis(Section):
    """A choice that composes with others. Each question's default is the answer of a choice at its default.

    An axis that theory models has `theory_shape` as well, which returns a type of its own.
    """

    def validate(self, cell: CellView) -> list[str]:
        """Returns a sentence for each combination with the rest of `cell` that cannot run."""
        return []

    def engine_options(self, cell: CellView, folder: str | None = None) -> dict[str, Any]:
        """Keyword arguments for our engine. `folder`: for files, where the config names none."""
        return {}

    @property
    def label(self) -> str:
        """Words for a cell's name; empty at the default."""
        return ""
