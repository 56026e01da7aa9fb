"""All schemas as dataclasses. The yaml files under conf/ refer to them by type, and a run's config is one of them.

No config names code to import: a choice is a name in a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from ..sections import Key, Section
from ..strategies import StrategyOptions, built_in, specs
from . import schema_memory
from .schema_training import OPTIMIZERS, PRECISIONS, Optimizer, Precision

TUNED = "_tuned"
"""Suffix of a choice with options tuned for this harness's models instead of the library's own defaults."""


@dataclass
class Model(Section):
    """The model that is trained. `kind` names the builder in zerobench.models."""

    kind: str = MISSING

    @property
    def can_checkpoint(self) -> bool:
        """Whether the model itself can recompute its blocks in backward."""
        return hasattr(self, "checkpointing")

    @property
    def checkpoints(self) -> bool:
        return bool(getattr(self, "checkpointing", False))

    @property
    def options(self) -> dict[str, Any]:
        return {key: value for key, value in self.values().items() if key != "kind"}


LAYERS = Key("transformer blocks, or hidden layers of an MLP", unit="blocks", rule="at least 1")
HIDDEN = Key("width of the model", unit="features", rule="a multiple of `heads`")
HEADS = Key("attention heads; must divide hidden", unit="heads", rule="a divisor of `hidden`")
VOCABULARY = Key(
    "number of different tokens; null: the vocabulary of the data",
    unit="tokens",
    rule="at least the vocabulary of the data",
)
POSITIONS = Key("longest sequence; null: as sequence", unit="tokens", rule="at least `sequence`")

LORA = Key(
    "rank of the adapters at the Linears of the blocks, which alone are trained; 0: no adapters", unit="features",
    limits=(0, 1e6), omitted=True,
)(0)  # fmt: skip
LOSS_CHUNKS = Key(
    "parts of the tokens in which head and loss are computed, and again in backward", unit="parts", limits=(1, 1e6),
    omitted=True,
)(1)  # fmt: skip
MLP_CHUNKS = Key(
    "parts of the sequence in which each MLP is computed, and again in backward", unit="parts", limits=(1, 1e6),
    omitted=True,
)(1)  # fmt: skip


@dataclass
class Transformer(Model):
    """The shape of our GPTs. `vocabulary: null` follows the data, `positions: null` follows `sequence`."""

    layers: int = LAYERS(6)
    hidden: int = HIDDEN(384)
    heads: int = HEADS(6)
    vocabulary: int | None = VOCABULARY(None)
    positions: int | None = POSITIONS(None)
    tied: bool = Key("embedding and head are one weight")(True)
    checkpointing: bool = Key("blocks recompute their activations in backward")(False)


@dataclass
class Gpt(Transformer):
    """Our GPT. `tiles`: what each of the MLP's matrices is cut into; under zero3 each is gathered apart (memory-centric
    tiling).
    """

    kind: str = "gpt"
    tiles: int = Key(
        "tiles of each matrix of the MLP; zero3 gathers each tile separately", unit="tiles", limits=(1, 1e6),
        omitted=True,
    )(1)  # fmt: skip
    lora: int = LORA
    loss_chunks: int = LOSS_CHUNKS
    mlp_chunks: int = MLP_CHUNKS


@dataclass
class GptMoe(Transformer):
    """Our GPT with a mixture of experts: each token passes through `top_k` of `experts`, which have no capacity."""

    kind: str = "gpt_moe"
    experts: int = Key("experts of each block", unit="experts", limits=(1, 1e5))(8)
    top_k: int = Key("experts that each token passes through", unit="experts", rule="1 to `experts`")(2)
    expert_hidden: int | None = Key(
        "width of an expert's inner layer; null: four times `hidden`", unit="features", limits=(1, 1e6)
    )(None)
    separate_experts: bool = Key(
        "each expert is a module, which zero3 gathers separately; false: two tensors for all of a block"
    )(False)
    balance: float = Key("coefficient of the loss that balances the experts; 0: none", limits=(0, 1e3))(0.01)
    routing: str = Key(
        "learned, or fixed for a measurement: balanced (experts in turn) or skewed (all tokens to the same experts); a"
        " simulation takes learned as balanced", words=("learned", "balanced", "skewed"), omitted=True,
    )("learned")  # fmt: skip
    loss_chunks: int = LOSS_CHUNKS


@dataclass
class Mlp(Model):
    """Our MLP."""

    kind: str = "mlp"
    layers: int = LAYERS(8)
    hidden: int = HIDDEN(512)
    vocabulary: int | None = VOCABULARY(None)


@dataclass
class HuggingfaceModel(Model):
    """A transformers architecture; its shape is in `huggingface`."""

    kind: str = "huggingface"
    lora: int = LORA
    loss_chunks: int = LOSS_CHUNKS
    mlp_chunks: int = MLP_CHUNKS


@dataclass
class Huggingface(Section):
    """The shape for model=huggingface. Where `config` names a file, `options` replace what it says. `loss`: plain, the
    cross-entropy of logits in fp32; kept: as in a loop that holds on to what the model returned; fused: a kernel that
    keeps the model's own logits alone.
    """

    architecture: str = Key(
        "a causal language model of transformers, such as gpt2 or llama", rule="a causal language model of transformers"
    )("gpt2")
    layers: int = LAYERS(4)
    hidden: int = HIDDEN(128)
    heads: int = HEADS(4)
    vocabulary: int | None = VOCABULARY(None)
    positions: int | None = POSITIONS(None)
    options: dict[str, Any] = Key(
        "settings of the architecture's own config, as huggingface.options.NAME=VALUE", rule="a mapping"
    ).made(dict)
    loss: str = Key(
        "memory of the logits: plain, kept until the next forward, or fused", words=("plain", "kept", "fused"),
        omitted=True,
    )("plain")  # fmt: skip
    config: str | None = Key(
        "a local config.json, or its folder: the whole shape comes from it; read as data",
        rule="a config.json, or its folder", omitted=True, local=True,
    )(None)  # fmt: skip


@dataclass
class Data(Section):
    """Where tokens come from: `name` is text or synthetic."""

    name: str = MISSING


@dataclass
class Text(Data):
    """A local text file, byte by byte (vocabulary 256); `path: null` is the English that Python carries."""

    name: str = "text"
    path: str | None = Key(
        "a local text file, read byte by byte; null: the English that Python carries", rule="a file", local=True
    )(None)


@dataclass
class Synthetic(Data):
    """Uniform random tokens from the seed; `vocabulary: null` is the model's."""

    name: str = "synthetic"
    vocabulary: int | None = Key(
        "number of different tokens that are drawn; null: the model's", unit="tokens", limits=(2, 1e9)
    )(None)


@dataclass
class Measure(Section):
    """Steps that are measured, after steps that are not. Accounting starts when optimizer states exist."""

    steps: int = Key("measured steps of each pass", unit="steps", limits=(1, 1e7))(10)
    warmup: int = Key(
        "unmeasured steps before them; at least 2, so that optimizer states exist; with offload.delayed at least"
        " offload.delayed_after + 1", unit="steps", limits=(2, 1e7),
    )(3)  # fmt: skip
    repeats: int = Key(
        "launches per cell, interleaved with the other cells; 3 or more give an interval", unit="launches",
        limits=(1, 1000), volatile=True,
    )(1)  # fmt: skip
    check_training: str = Key(
        "compare losses and gradient norms with DDP's: auto (if such a run exists), true or false",
        words=("auto", "true", "false"), volatile=True,
    )("auto")  # fmt: skip
    passes: str = Key(
        "both, both_once (bytes and volumes in the first launch of a cell only), timed (no bytes, no volumes) or"
        " accounted (no times)", words=("both", "both_once", "timed", "accounted"), omitted=True,
    )("both")  # fmt: skip
    trace: bool = Key("a third pass, which measures how much communication is hidden behind computation", omitted=True)(
        False
    )
    snapshot: bool = Key(
        "a file per rank with each allocation and its labels, for pytorch.org/memory_viz", omitted=True
    )(False)
    events: bool = Key(
        "the last measured step as a table: each storage, collective, module and unit, in order (zerobench replay)",
        omitted=True,
    )(False)  # fmt: skip
    save: str = Key(
        "saves of a checkpoint in the measured steps: none, blocking (the loop waits until it is on the disk) or"
        " asynchronous (a thread writes a copy)", words=("none", "blocking", "asynchronous"), omitted=True,
    )("none")  # fmt: skip
    save_every: int = Key("measured steps from one save to the next", unit="steps", limits=(1, 1e7), omitted=True)(5)


RETRIED = ("crash", "timeout", "oom")
"""Statuses after which a launch may be retried: it may succeed at another time or on another machine."""


@dataclass
class Launch(Section):
    """How ranks are run."""

    timeout_s: float = Key("time limit of a pass", unit="seconds", limits=(0.001, 1e7), volatile=True)(1800.0)
    threads: int | None = Key(
        "threads of each rank; null: an exported OMP_NUM_THREADS, else the cores, divided by the ranks", unit="threads",
        limits=(1, 2**10), local=True,
    )(None)  # fmt: skip
    retry: list[str] = Key(
        "statuses after which a launch is repeated, out of crash, timeout and oom, such as '[crash,timeout]'",
        rule="a list of `crash`, `timeout`, `oom`", omitted=True, volatile=True,
    ).made(list)  # fmt: skip
    retries: int = Key(
        "repetitions of such a launch, at most", unit="attempts", limits=(1, 100), omitted=True,
        volatile=True,
    )(1)  # fmt: skip
    check_memory: bool = Key(
        "refuse cells whose predicted states exceed the memory of this machine", omitted=True, volatile=True
    )(True)


@dataclass
class Search(Section):
    """With a memory limit (a rank, as in `96 MiB`) a cell becomes a search: which micro-batch x accumulation x
    checkpointing fits and trains fastest? The winners are measured again, `repeats` launches of `steps` steps.
    """

    memory_limit: str | None = Key(
        "limit per rank, as '96 MiB'; a cell then becomes a search", unit="bytes", rule="a size, as `96 MiB`"
    )(None)
    checkpointing: list[bool] = Key(
        "whether to recompute activations: the choices that are tried", rule="a list of `false`, `true`"
    ).made(lambda: [False, True])
    steps: int = Key("measured steps of the winners", unit="steps", limits=(1, 1e7))(10)
    repeats: int = Key("launches per winner", unit="launches", limits=(1, 1000))(3)


@dataclass
class Config(Section):
    """One cell of a sweep, as a user writes it."""

    strategy: StrategyOptions = Key(
        "how ranks share model states: DDP, our ZeRO stages, Megatron's optimizer, or a peer"
    )(MISSING)
    model: Model = Key("the model to train")(MISSING)
    data: Data = Key("the data to train on")(MISSING)
    optimizer: Optimizer = Key("the torch optimizer that updates it")(MISSING)
    precision: Precision = Key("dtypes of the model, gradients and traffic")(MISSING)
    measure: Measure = Key("number of measured steps, and what is recorded").made(Measure)
    offload: schema_memory.OffloadConfig = Key(
        "the memory that holds model states: ZeRO-Offload (cpu), ZeRO-Infinity (nvme)", omitted=True
    ).made(schema_memory.OffloadConfig)
    activation: schema_memory.Activation = Key(
        "whether activations are kept, recomputed or offloaded", omitted=True
    ).made(schema_memory.Activation)
    buffers: schema_memory.Buffers = Key(
        "constant-size buffers, or one fused buffer that grows with the model", omitted=True
    ).made(schema_memory.Buffers)
    zeropp: schema_memory.ZeroppConfig = Key(
        "ZeRO++ on zero3: less traffic, by codes and secondary shards", omitted=True
    ).made(schema_memory.ZeroppConfig)
    launch: Launch = Key("how ranks are run").made(Launch)
    huggingface: Huggingface = Key("the shape of model=huggingface").made(Huggingface)
    world_size: int | None = Key(
        "number of ranks N; null: all of a joined job (torchrun), else one per GPU if there are several, else 2",
        unit="ranks", limits=(1, 2**10),
    )(None)  # fmt: skip
    node_size: int | None = Key(
        "ranks of a node; collectives then take two hops; null: all ranks are one node", unit="ranks",
        rule="a divisor of `world_size`", omitted=True,
    )(None)  # fmt: skip
    shard_group: int | None = Key(
        "ranks that share a shard, a divisor of world_size (hybrid sharding, MiCS); null: all", unit="ranks",
        rule="a divisor of `world_size`", omitted=True,
    )(None)  # fmt: skip
    tensor_parallel: int = Key(
        "ranks that share one model's matrices (Megatron); the strategy's N is world_size over it", unit="ranks",
        limits=(1, 2**10), omitted=True,
    )(1)  # fmt: skip
    rank: int | None = Key(
        "rank of a simulated world to run; null: the rank with the most bytes", unit="number",
        rule="0 to `world_size` - 1", omitted=True,
    )(None)  # fmt: skip
    arena: bool = Key("activations kept for backward, and gradients, in slots that are allocated once", omitted=True)(
        False
    )
    compile: str = Key(
        "none, or blocks: torch.compile makes one graph of each block, before the strategy wraps the model",
        words=("none", "blocks"), omitted=True,
    )("none")  # fmt: skip
    device: str = Key("auto, cpu or cuda; auto: cuda if each rank has its own GPU", words=("auto", "cpu", "cuda"))(
        "auto"
    )
    backend: str = Key(
        "auto, gloo, nccl, or simulated: one rank of world_size alone, without times and losses",
        words=("auto", "gloo", "nccl", "simulated"),
    )("auto")
    seed: int = Key("seed of initial weights and of the order of data", limits=(0, 2**31))(0)
    deterministic: bool = Key("deterministic kernels only; an operation without one raises an error", omitted=True)(
        False
    )
    draw_on: str = Key(
        "draws initial values: cpu, or device, which is quicker on a GPU, with other values", words=("cpu", "device"),
        omitted=True,
    )("cpu")  # fmt: skip
    tensors: str = Key(
        "real, or fake: of a simulated world, sizes and traffic without values or memory; any strategy",
        words=("real", "fake"), omitted=True,
    )("real")  # fmt: skip
    micro_batch: int | None = Key(
        "size of a micro-batch, per rank in one forward; null: follows from batch, else 4", unit="samples",
        rule="at least 1",
    )(None)  # fmt: skip
    accumulation: int = Key("micro-batches of a step, per rank", unit="micro-batches", limits=(1, 1e6))(1)
    batch: int | None = Key(
        "batch of a step over all ranks, instead of micro_batch", unit="samples",
        rule="a multiple of `world_size` · `accumulation`",
    )(None)  # fmt: skip
    sequence: int = Key("length of a sequence", unit="tokens", limits=(1, 1e9))(128)
    clip: float | None = Key(
        "gradients are scaled down to this norm before each update; null: no clipping", unit="global norm",
        rule="above 0",
    )(None)  # fmt: skip
    clip_norm: str = Key("norm to clip at: 2 or inf", words=("2", "inf"))("2")
    search: Search = Key("look for the fastest micro-batch that fits a memory limit", volatile=True).made(Search)
    results_dir: str = Key("folder of the runs, each a folder in it", rule="a folder", volatile=True)("results/runs")
    rerun: bool = Key("measure again what an earlier run of the same cell and code has measured", volatile=True)(False)
    fail_fast: bool = Key("stop at the first cell that fails", volatile=True)(False)
    objective: str | None = Key(
        "column of the table of runs that a Hydra sweeper minimizes, such as hydra/sweeper=optuna",
        rule="columns of numbers, each with a minus before it if larger is better, with commas between them",
    )(None)  # fmt: skip


OF_A_SWEEP = ("objective",)
"""Keys of a sweep that its cells do not have."""


SECTIONS: dict[str, type[Section]] = {"launch": Launch, "search": Search, "huggingface": Huggingface}
"""Sections that have no choices."""

SCHEMAS: dict[str, dict[str, type]] = {
    "strategy": {name: spec.options for name, spec in built_in().items()},
    "model": {"gpt": Gpt, "gpt_moe": GptMoe, "mlp": Mlp, "huggingface": HuggingfaceModel},
    "data": {"text": Text, "synthetic": Synthetic},
    "optimizer": OPTIMIZERS,
    "precision": PRECISIONS,
    "measure": {"measure": Measure},
    **schema_memory.SCHEMAS,
}
"""Group -> schema name -> dataclass. A yaml file of the group names its schema in its defaults list."""


def config_dir() -> Path:
    """Returns conf/: inside the package in an installed wheel, next to it in a checkout."""
    package = Path(__file__).parent.parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def store_schemas(users: dict[str, dict[str, type]]) -> None:
    """Adds our schemas to Hydra's ConfigStore, and the schemas of `users`, by group, to the choices."""
    store = ConfigStore.instance()
    if not _choices:
        store.store(name="config_schema", node=Config)
        users = users | {f"schema/{group}": schemas for group, schemas in SCHEMAS.items()}
    for group, schemas in users.items():
        for name, schema in schemas.items():
            store.store(group=group, name=name, node=schema)
    for name, choice in strategy_choices().items():
        if _choices.get(name) != choice:
            store.store(group="strategy", name=name, node=choice)
            _choices[name] = choice


_choices: dict[str, Any] = {}
"""Strategies already stored. Storing all takes a fifth of a composition's time, and a process may compose often."""


def strategy_choices() -> dict[str, Any]:
    """Returns the choices of the group `strategy`: each row of the table and, if it has a tuning, NAME_tuned."""
    choices: dict[str, Any] = {}
    for name, spec in sorted(specs().items(), key=lambda row: (row[1].of_user, row[0])):
        choices[name] = spec.options
        if spec.tuning:
            choices[f"{name}{TUNED}"] = spec.options(tuned=True)
    return choices
