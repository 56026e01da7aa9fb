"""The interface of every axis of a cell: validation, options for the engine, and a label."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from ..sections import Section
from ..strategies import StrategyOptions


class CellKeys(Protocol):
    """The keys of a cell (cell.py) that its axes read. A section whose schema is an axis itself is Any."""

    strategy: StrategyOptions
    model: Any
    precision: Any
    offload: Any
    zeropp: Any
    search: Any
    world_size: int
    node_size: int | None
    shard_group: int | None
    tensor_parallel: int

    @property
    def recomputes(self) -> bool:
        """Whether blocks are recomputed in backward."""


class Axis(Section):
    """A choice that composes with others. The default methods are for a choice at its default.

    An axis that theory models also has `theory_shape`, which returns its own type.
    """

    def validate(self, cell: CellKeys) -> list[str]:
        """Returns an error message for each combination with the rest of `cell` that cannot run."""
        return []

    def engine_options(self, cell: CellKeys, folder: str | None = None) -> dict[str, Any]:
        """Keyword arguments for our engine. `folder`: for files, if the config names none."""
        return {}

    @property
    def label(self) -> str:
        """Words added to a cell's name; empty at the default."""
        return ""


class Choice(Axis):
    """An axis that is a command line group; its choice `usual` changes nothing."""

    group: ClassVar[str]
    usual: ClassVar[str] = "none"
    name: str

    @property
    def label(self) -> str:
        """The choice as on a command line: "offload=cpu"."""
        return "" if self.name == self.usual else f"{self.group}={self.name}"
