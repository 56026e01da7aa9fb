"""The interface of every axis of a cell: validation, options for the engine, and a label.

`Topology` is the one axis that is not a command line group: nodes, between which bytes travel more slowly, and
shard groups, each of which has a whole model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from ..sections import Section
from ..strategies import StrategyOptions, names_with, spec_of
from ..theory.groups import GroupShape


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
    device: str

    @property
    def data_ranks(self) -> int:
        """Ranks that train on different data."""

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


@dataclass
class Topology(Axis):
    """Ranks and their groups. `node_size`, `shard_group`: None for all ranks; `nodes`: machines of a distributed job;
    `tensor_parallel`: ranks that share one model, 1 for none.
    """

    world_size: int
    node_size: int | None = None
    shard_group: int | None = None
    nodes: int = 1
    tensor_parallel: int = 1

    def validate(self, cell: CellKeys) -> list[str]:
        """Returns error messages for groups that the strategy does not support or that do not divide the world."""
        name, ranks, problems = cell.strategy.name, self.world_size or 1, []
        for key, size, least in (("node_size", self.node_size, 1), ("shard_group", self.shard_group, 2)):
            if size is None:
                continue
            if not spec_of(name).composes.groups:
                why = (
                    f"strategy={name} knows no groups of ranks; leave it out, or use {', '.join(names_with('groups'))}"
                )
                problems.append(f"{key}={size}: {why}")
            elif size < least or ranks % size:
                problems.append(f"{key}={size}: must be a divisor of world_size={ranks}, and at least {least}")
        if None not in (self.node_size, self.shard_group) and self.node_size != self.shard_group:
            why = f"with node_size={self.node_size} a shard group must be a node"
            problems.append(f"shard_group={self.shard_group}: {why}")
        return problems

    def engine_options(self, cell: CellKeys, folder: str | None = None) -> dict[str, Any]:
        sizes = {"node_size": self.node_size, "shard_group": self.shard_group}
        return {key: size for key, size in sizes.items() if size is not None}

    def theory_shape(self, cell: CellKeys) -> GroupShape:
        sizes, on_gpu = (cell.data_ranks, self.node_size, self.shard_group), cell.device != "cpu"
        return GroupShape(*sizes, on_gpu=on_gpu, **(cell.zeropp.theory_shape() if cell.data_ranks > 1 else {}))

    @property
    def ranks_per_node(self) -> int:
        """`node_size` if set, else the ranks of one machine, with a job's ranks spread evenly over machines."""
        return self.node_size or -(-self.world_size // self.nodes)

    @property
    def label(self) -> str:
        sizes = {"node_size": self.node_size, "shard_group": self.shard_group}
        sizes["tensor_parallel"] = self.tensor_parallel if self.tensor_parallel > 1 else None
        return " ".join(f"{key}={size}" for key, size in sizes.items() if size is not None)
