"""A cell: one point of a sweep, with every option filled in. Code after `resolve` reads only cells."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..data import TEXT_VOCABULARY, Batching
from ..models import Called
from ..registry import DATA
from ..sections import Section
from ..theory.groups import GroupShape
from . import identity
from .axis import Topology
from .schema import Config, Huggingface, Text


def data_ranks(config: Config) -> int:
    """Returns the number of ranks that train on different data, a strategy's N: world size / ranks per model."""
    return max(1, (config.world_size or 1) // max(1, config.tensor_parallel))


@dataclass(kw_only=True)
class CellConfig(Config):
    """A Config with every option filled in (resolve.py), frozen with its sections. Keys have the same paths as on the
    command line.

    `model_name`: the choice of the group, such as "gpt_tiny"; `text_hash`: hash of the training text, None for other
    data; `nodes`: machines of a distributed job; `ranks_per_gpu`: above 1 if ranks share a GPU. `huggingface`: None
    except for model=huggingface. Sizes are per rank (`micro_batch`, in samples) or over all ranks (`batch`).
    `own_threads`: the user set `launch.threads`; not part of the identity.
    """

    if TYPE_CHECKING:  # resolved: no longer None
        world_size: int
        micro_batch: int
        batch: int
        huggingface: Huggingface | None  # type: ignore[assignment]

    model_name: str
    text_hash: str | None = None
    nodes: int = 1
    ranks_per_gpu: int = 1
    own_threads: bool = field(default=True, compare=False)

    def __post_init__(self) -> None:
        for value in vars(self).values():
            if isinstance(value, Section):
                value.freeze()
        self.freeze()

    def __reduce__(self) -> Any:
        # A section's class may be made from a user's function, which other processes cannot find by name.
        return CellConfig.from_dict, (self.as_dict(),)

    def as_dict(self) -> dict[str, Any]:
        """Returns the identity: plain values for JSON and yaml, without keys at their defaults."""
        return deepcopy(self._identity)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        return identity.identity(self)

    def written(self) -> dict[str, Any]:
        """Returns the identity as stored with runs on disk, with its format version."""
        return {identity.VERSION_KEY: identity.VERSION} | self.as_dict()

    def section(self, name: str) -> dict[str, Any]:
        """Returns a section of the identity; empty at its default."""
        section: dict[str, Any] = self.as_dict().get(name, {})
        return section

    @classmethod
    def from_dict(cls, written: dict[str, Any]) -> CellConfig:
        """Returns the cell of an identity. Raises ValueError for one written by later code."""
        return cls(**identity.restore(written))

    @classmethod
    def from_json(cls, text: str) -> CellConfig:
        """Returns the cell of a row's column `config`."""
        return cls.from_dict(json.loads(text))

    @cached_property
    def cell_id(self) -> str:
        """Hash of the identity without volatile keys: 12 hex digits."""
        return identity.cell_id(self._identity)

    @property
    def data_ranks(self) -> int:
        """Ranks that train on different data and among which a strategy shards the model states: its N."""
        return data_ranks(self)

    @property
    def topology(self) -> Topology:
        return Topology(self.world_size, self.node_size, self.shard_group, self.nodes, self.tensor_parallel)

    @property
    def groups(self) -> GroupShape:
        """The ranks, their groups and codecs, in theory's form."""
        return self.topology.theory_shape(self)

    @property
    def vocabulary(self) -> int:
        """Number of different tokens in our data; 0 for a user's data."""
        return TEXT_VOCABULARY if isinstance(self.data, Text) else getattr(self.data, "vocabulary", None) or 0

    @property
    def batching(self) -> Batching:
        """The source of the run's batches, for data.build_batches."""
        options = {key: value for key, value in self.data.values().items() if key != DATA.identity}
        path = self.data.path if isinstance(self.data, Text) else None
        return Batching(
            self.data.name, options, path, self.vocabulary, self.data_ranks, self.micro_batch, self.accumulation,
            self.sequence, self.seed, self.precision.dtype,
        )  # fmt: skip

    @property
    def called(self) -> Called:
        return Called(self.model.kind, self.model_name, self.data.name)

    @property
    def recomputes(self) -> bool:
        """Whether blocks are recomputed in backward."""
        return self.activation.policy().recompute or self.model.checkpoints

    @property
    def model_options(self) -> dict[str, Any]:
        return self.model.options | ({} if self.huggingface is None else self.huggingface.values())

    @property
    def optimizer_label(self) -> str:
        """ "adamw/fused", or "adamw/fused, clipped at 1", with the norm if it is not 2."""
        if self.clip is None:
            return self.optimizer.label
        norm = f" (norm {self.clip_norm})" if self.clip_norm != "2" else ""
        return f"{self.optimizer.label}, clipped at {self.clip:g}{norm}"

    @property
    def systems_label(self) -> str:
        """Axes that are not at their defaults, as on a command line: "offload=cpu activation=checkpoint"."""
        arena, rank = "arena=true" if self.arena else "", f"rank={self.rank}" if self.rank is not None else ""
        compiled = f"compile={self.compile}" if self.compile != "none" else ""
        axes = (self.offload, self.activation, self.buffers, self.zeropp)
        return " ".join(filter(None, [*(axis.label for axis in axes), arena, compiled, self.topology.label, rank]))


@dataclass(frozen=True)
class Cell:
    """One point of a sweep: its config, and error messages for options that are invalid."""

    config: CellConfig
    problems: tuple[str, ...]

    @property
    def cell_id(self) -> str:
        return self.config.cell_id

    def changed(self, **changes: Any) -> Cell:
        """Returns the cell with changed values at the top level of its config."""
        return replace(self, config=replace(self.config, **changes))
