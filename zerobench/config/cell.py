"""A cell: one point of a sweep, with every option filled in, and its identity. Code after `resolve` reads only cells.

The identity is the config as stored with a run, without the `omitted` keys that have their defaults. So a new option
does not change the ids of cells that do not use it. A Key (zerobench/sections.py) may be omitted, volatile or local.
"""

from __future__ import annotations

import hashlib
import json
from copy import deepcopy
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from ..data import TEXT_VOCABULARY, Batching
from ..models import Called
from ..registry import DATA
from ..sections import Section
from ..strategies import StrategyOptions
from ..theory.groups import GroupShape
from .keys import GROUPS, KEYS, omitted
from .schema import OF_A_SWEEP, SCHEMAS, SECTIONS, Config, Data, Huggingface, Measure, Model, Text
from .schema_training import Optimizer, Precision

VERSION, VERSION_KEY = 2, "schema_version"

BASES: dict[str, type[Section]] = {
    "strategy": StrategyOptions, "model": Model, "data": Data, "optimizer": Optimizer, "precision": Precision,
}  # fmt: skip
"""Group -> base of its schemas, for a choice that this process does not know: a user's, or one of an older version."""

WATCHED = "watched"
"""Kind of the model in a user's watched loop: only the names of its strategy and optimizer are known, no options."""

MOVED = {
    key: key.partition(".")[2]
    for key, declared in KEYS.items()
    if key.startswith("launch.") or (key.startswith("measure.") and declared.volatile)
}
"""Key of a cell -> its name at the top level of the written form."""

DEFAULTS: dict[str, Any] = {MOVED.get(key, key): default for key, default in omitted().items()}
DEFAULTS |= {"nodes": 1, "ranks_per_gpu": 1}
"""Key -> the default at which an identity leaves it out; for a group's choice, with the whole section."""

VOLATILE = (*(MOVED.get(name, name) for name, declared in {**GROUPS, **KEYS}.items() if declared.volatile), VERSION_KEY)
"""Keys that do not change the measurement."""

LOCAL = (*(MOVED.get(name, name) for name, declared in KEYS.items() if declared.local), "nodes", "data.text_hash")
"""Keys that depend on the machine. They change times and losses, but no bytes and no volume."""


def work_id(config: Any) -> str:
    """Returns a hash of the measured work that is the same on any machine: without volatile and local keys."""
    kept = config.as_dict()
    for key in LOCAL:
        _remove(kept, key)
    return config_hash(kept)


def config_hash(written: dict[str, Any]) -> str:
    """Returns the hash of an identity without volatile keys: 12 hex digits."""
    kept = {key: value for key, value in written.items() if key not in VOLATILE}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]


def _remove(written: dict[str, Any], key: str) -> None:
    *path, last = key.split(".")
    node = written
    for part in path:
        node = node.get(part) or {}
    node.pop(last, None)


def _section(kind: Any, values: dict[str, Any]) -> Section:
    """Returns a section of these values. Options that its schema lacks, as those of a user's choice that was not
    imported, become fields of a class of its own.
    """
    names = [field.name for field in fields(kind)]
    more = tuple(key for key in values if key not in names)
    section: Section = (_extended(kind, more) if more else kind)(**values)
    return section


@cache
def _extended(kind: type, names: tuple[str, ...]) -> type:
    return make_dataclass(kind.__name__, [(name, Any, field(default=None)) for name in names], bases=(kind,))


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
        """Every key in its written form, without those at their defaults."""
        compared = [field.name for field in fields(self) if field.compare and field.name not in OF_A_SWEEP]
        own = {name: getattr(self, name) for name in compared}
        written = {name: value.values() if isinstance(value, Section) else value for name, value in own.items()}
        written["model"]["name"] = written.pop("model_name")
        text_hash = written.pop("text_hash")
        if self.data.name == "text":
            written["data"]["vocabulary"] = TEXT_VOCABULARY
        if text_hash is not None:
            written["data"]["text_hash"] = text_hash
        for key, name in MOVED.items():
            section, last = key.split(".")
            written[name] = written[section].pop(last)
        del written["launch"]
        if written["huggingface"] is None:
            del written["huggingface"]
        for key, default in DEFAULTS.items():
            section, _, last = key.rpartition(".")
            if section and section not in written:
                continue
            if (written[section].get(last, default) if section else written[key]) == default:
                _remove(written, section if last == "name" else key)
        return written

    def written(self) -> dict[str, Any]:
        """Returns the identity as stored with runs on disk, with its format version."""
        return {VERSION_KEY: VERSION} | self.as_dict()

    def section(self, name: str) -> dict[str, Any]:
        """Returns a section of the identity; empty at its default."""
        section: dict[str, Any] = self.as_dict().get(name, {})
        return section

    @classmethod
    def from_dict(cls, written: dict[str, Any]) -> CellConfig:
        """Returns the cell of an identity, with defaults filled in; version 1 has no version number. Unknown keys are
        kept in sections and dropped at the top level. Raises ValueError for an identity written by later code.
        """
        version = written.get(VERSION_KEY, 1)
        if not isinstance(version, int) or version > VERSION:
            raise ValueError(f"{VERSION_KEY}={version}: this code reads up to {VERSION}; use a newer zerobench")
        written = {key: dict(value) if isinstance(value, dict) else value for key, value in written.items()}
        model, data = (section if isinstance(section := written.get(name), dict) else {} for name in ("model", "data"))
        if data.get("name") == "text":
            data.pop("vocabulary", None)
        restored: dict[str, Any] = {"model_name": model.pop("name", None), "text_hash": data.pop("text_hash", None)}
        for key, name in MOVED.items():
            section, last = key.split(".")
            if name in written:
                written.setdefault(section, {})[last] = written.pop(name)
        for name, default in ((declared.name, declared.default) for declared in fields(Config)):
            value = written.get(name, default)
            values: dict[str, Any] = value if isinstance(value, dict) else {}
            if name in SECTIONS or name == "measure":
                restored[name] = _section(SECTIONS.get(name, Measure), values)
            elif name in SCHEMAS:
                choices = SCHEMAS[name]
                chosen = choices.get(str(values.get("kind" if name == "model" else "name")))
                if name in ("strategy", "optimizer") and model.get("kind") == WATCHED:
                    chosen = BASES[name]
                restored[name] = _section(chosen or BASES.get(name) or next(iter(choices.values())), values)
            elif name not in OF_A_SWEEP:
                restored[name] = value
        if "huggingface" not in written:
            restored["huggingface"] = None
        return cls(**restored, nodes=written.get("nodes", 1), ranks_per_gpu=written.get("ranks_per_gpu", 1))

    @classmethod
    @lru_cache(2**12)
    def from_json(cls, text: str) -> CellConfig:
        """Returns the cell of a row's column `config`; rows of the same cell share it."""
        return cls.from_dict(json.loads(text))

    @cached_property
    def cell_id(self) -> str:
        """Hash of the identity without volatile keys: 12 hex digits."""
        return config_hash(self._identity)

    @property
    def data_ranks(self) -> int:
        """Ranks that train on different data and among which a strategy shards the model states: its N."""
        return data_ranks(self)

    @property
    def groups(self) -> GroupShape:
        """The ranks, their groups and codecs, in theory's form."""
        codecs = self.zeropp.theory_shape() if self.data_ranks > 1 else {}
        return GroupShape(self.data_ranks, self.node_size, self.shard_group, on_gpu=self.device != "cpu", **codecs)

    @property
    def ranks_per_node(self) -> int:
        """`node_size` if set, else the ranks of one machine, with a job's ranks spread evenly over machines."""
        return self.node_size or -(-self.world_size // self.nodes)

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
        values = {
            "arena": ("true", self.arena), "compile": (self.compile, self.compile != "none"),
            "node_size": (self.node_size, self.node_size is not None),
            "shard_group": (self.shard_group, self.shard_group is not None),
            "tensor_parallel": (self.tensor_parallel, self.tensor_parallel > 1),
            "rank": (self.rank, self.rank is not None),
        }  # fmt: skip
        labels = [axis.label for axis in (self.offload, self.activation, self.buffers, self.zeropp)]
        return " ".join(
            filter(None, [*labels, *(f"{key}={value}" for key, (value, differs) in values.items() if differs)])
        )


@dataclass(frozen=True, eq=False)
class Cell:
    """A launch of one point of a sweep: its config, and error messages for options that are invalid. `name`:
    distinguishes it from the others of its sweep; `repeat`: number of the launch; `overrides`: those that compose it.
    """

    config: CellConfig
    problems: tuple[str, ...]
    name: str = ""
    repeat: int = 0
    overrides: tuple[str, ...] = ()

    @property
    def cell_id(self) -> str:
        return self.config.cell_id

    def changed(self, **changes: Any) -> Cell:
        """Returns the cell with changed values at the top level of its config."""
        return replace(self, config=replace(self.config, **changes))
