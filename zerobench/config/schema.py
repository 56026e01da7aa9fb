"""Every schema as a dataclass. The yaml files under conf/ bind to these by type; a run's config is one of them.

Nothing here names code to import: a choice is a name in a table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from ..sections import Section
from ..strategies import StrategyOptions, built_in, specs
from . import schema_memory
from .schema_training import OPTIMIZERS, PRECISIONS, Optimizer, Precision

TUNED = "_tuned"
"""The end of a choice's name that has the values which serve this harness's models, not the peer's own defaults."""


@dataclass
class Model(Section):
    """The model that is trained. `kind` names the builder in zerobench.models."""

    kind: str = MISSING

    @property
    def can_checkpoint(self) -> bool:
        """True for a model that can compute its blocks again in backward itself."""
        return hasattr(self, "checkpointing")

    @property
    def checkpoints(self) -> bool:
        """True for a model that does so."""
        return bool(getattr(self, "checkpointing", False))

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments for its builder."""
        return {key: value for key, value in self.values().items() if key != "kind"}


@dataclass
class Gpt(Model):
    """Our GPT. `vocabulary: null` follows the data, `positions: null` follows `sequence`.

    `tiles`: what each of the MLP's matrices is cut into; under zero3 each is gathered apart (memory-centric tiling).
    """

    kind: str = "gpt"
    layers: int = 6
    hidden: int = 384
    heads: int = 6
    vocabulary: int | None = None
    positions: int | None = None
    tied: bool = True
    checkpointing: bool = False
    tiles: int = 1


@dataclass
class Mlp(Model):
    """Our MLP."""

    kind: str = "mlp"
    layers: int = 8
    hidden: int = 512
    vocabulary: int | None = None


@dataclass
class HuggingfaceModel(Model):
    """A transformers architecture; its shape stands in `huggingface`."""

    kind: str = "huggingface"


@dataclass
class Huggingface(Section):
    """The shape for model=huggingface. `options` go to the architecture's own config. `config`: a local config.json
    that the whole shape comes from; `options` then replace what it says. `loss`: plain, the cross-entropy of logits in
    fp32; kept: the same, with these logits alive until the next forward, as in a loop that holds on to what the model
    returned; fused: a kernel that keeps the model's own logits alone.
    """

    architecture: str = "gpt2"
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    vocabulary: int | None = None
    positions: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    loss: str = "plain"
    config: str | None = None


@dataclass
class Data(Section):
    """Where tokens come from: `name` is text or synthetic."""

    name: str = MISSING


@dataclass
class Text(Data):
    """A local text file, byte by byte (vocabulary 256); `path: null` is the English that Python carries."""

    name: str = "text"
    path: str | None = None


@dataclass
class Synthetic(Data):
    """Uniform random tokens from the seed; `vocabulary: null` is the model's."""

    name: str = "synthetic"
    vocabulary: int | None = None


@dataclass
class Measure(Section):
    """Steps that are measured, after steps that are not. Accounting starts when optimizer states exist.

    `repeats`: launches of each cell, interleaved with those of the sweep's other cells. `passes`: both, or one alone in
    half the time: timed (no bytes, no volumes) or accounted (no times). `trace`: one more under torch.profiler tells
    how much communication is hidden behind computation. `snapshot`: allocations of the accounted pass with labels, for
    torch's viewer. `events`: the accounted pass's last step, event by event. `check_training`: losses
    and gradient norms are held against DDP's of the same training, auto: where the sweep or the results folder has such
    a run; true: else one is made, hidden; false: not at all.
    """

    steps: int = 10
    warmup: int = 3
    repeats: int = 1
    check_training: str = "auto"
    passes: str = "both"
    trace: bool = False
    snapshot: bool = False
    events: bool = False


RETRIED = ("crash", "timeout", "oom")
"""Statuses with which a launch may be run again: another machine, or another moment, may end it otherwise."""


@dataclass
class Launch(Section):
    """How ranks are run. `timeout_s` bounds each pass; `threads` (a rank): null shares the cores out. `group_by`: under
    a launcher of Hydra's, the keys in which the cells of one job agree, as "model,world_size", since times are paired
    on one machine only; all: one job; null: a job per cell. `retry`: statuses with which a launch is run again, at
    most `retries` times. `check_memory`: a cell whose states alone are predicted to be larger than the memory of this
    machine, or of a GPU of it, is refused.
    """

    timeout_s: float = 1800.0
    threads: int | None = None
    group_by: str | None = None
    retry: list[str] = field(default_factory=list)
    retries: int = 1
    check_memory: bool = True


@dataclass
class Search(Section):
    """With a memory limit (a rank, as in `96 MiB`) a cell becomes a search: which micro-batch x accumulation x
    checkpointing fits and trains fastest? The winners are measured again, `repeats` launches of `steps` steps.
    """

    memory_limit: str | None = None
    checkpointing: list[bool] = field(default_factory=lambda: [False, True])
    steps: int = 10
    repeats: int = 3


@dataclass
class Config:
    """One cell of a sweep, as a user writes it."""

    strategy: StrategyOptions = MISSING
    model: Model = MISSING
    data: Data = MISSING
    optimizer: Optimizer = MISSING
    precision: Precision = MISSING
    measure: Measure = field(default_factory=Measure)
    offload: schema_memory.Offload = field(default_factory=schema_memory.Offload)
    activation: schema_memory.Activation = field(default_factory=schema_memory.Activation)
    buffers: schema_memory.Buffers = field(default_factory=schema_memory.Buffers)
    zeropp: schema_memory.Zeropp = field(default_factory=schema_memory.Zeropp)
    launch: Launch = field(default_factory=Launch)
    huggingface: Huggingface = field(default_factory=Huggingface)
    world_size: int | None = None
    node_size: int | None = None
    shard_group: int | None = None
    rank: int | None = None
    arena: bool = False
    device: str = "auto"
    backend: str = "auto"
    seed: int = 0
    deterministic: bool = False
    draw_on: str = "cpu"
    tensors: str = "real"
    micro_batch: int | None = None
    accumulation: int = 1
    batch: int | None = None
    sequence: int = 128
    clip: float | None = None
    clip_norm: str = "2"
    search: Search = field(default_factory=Search)
    results_dir: str = "results/runs"
    rerun: bool = False
    fail_fast: bool = False
    objective: str | None = None


OF_A_SWEEP = ("objective",)
"""Keys of a sweep, which its cells do not have."""


SCHEMAS: dict[str, dict[str, type]] = {
    "strategy": {name: spec.options for name, spec in built_in().items()},
    "model": {"gpt": Gpt, "mlp": Mlp, "huggingface": HuggingfaceModel},
    "data": {"text": Text, "synthetic": Synthetic},
    "optimizer": OPTIMIZERS,
    "precision": PRECISIONS,
    "measure": {"measure": Measure},
    **schema_memory.SCHEMAS,
}
"""Group -> schema name -> dataclass. A yaml of the group names its schema in its defaults list."""


def config_dir() -> Path:
    """conf/: inside the package in an installed wheel, beside it in a checkout."""
    package = Path(__file__).parent.parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def store_schemas(users: dict[str, dict[str, type]]) -> None:
    """Puts the schemas into Hydra's ConfigStore, and those of `users`, by group, among the choices."""
    store = ConfigStore.instance()
    store.store(name="config_schema", node=Config)
    for group, schemas in SCHEMAS.items():
        for name, schema in schemas.items():
            store.store(group=f"schema/{group}", name=name, node=schema)
    for group, schemas in users.items():
        for name, schema in schemas.items():
            store.store(group=group, name=name, node=schema)
    for name, choice in strategy_choices().items():
        store.store(group="strategy", name=name, node=choice)


def strategy_choices() -> dict[str, Any]:
    """The choices of the group `strategy`: each row of the table and, where it can be tuned, NAME_tuned."""
    choices: dict[str, Any] = {}
    for name, spec in sorted(specs().items(), key=lambda row: (row[1].of_user, row[0])):
        choices[name] = spec.options
        if spec.tuning:
            choices[f"{name}{TUNED}"] = spec.options(tuned=True)
    return choices
