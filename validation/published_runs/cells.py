"""Converts a published run to a cell and a device by the tables below, and reports assumptions.

model        its architecture is recognized by part of the printed name; its shape is the row's
assumed      values missing from the row, and their replacements in the simulation; one note each, in the errors file
not given    the run cannot be simulated; NotGivenError has the reason
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import OmegaConf

from zerobench.config import schema as schemas
from zerobench.config.cell import CellConfig
from zerobench.config.resolve import resolve
from zerobench.config.schema_memory import SCHEMAS
from zerobench.config.schema_training import OPTIMIZERS, PRECISIONS
from zerobench.host.environment import FAKE, SIMULATED
from zerobench.predict.build import facts_of
from zerobench.sections import known
from zerobench.simulation.execute import Target
from zerobench.strategies import spec_of

from .rows import NotGivenError, PublishedRun

SHAPE = ("layers", "hidden", "heads", "vocab")
"""Columns that every model needs."""


@dataclass(frozen=True)
class Family:
    """An architecture. `names`: a pattern for printed names. `ffn`, `kv_heads`: its settings for these columns, empty
    if it has none; `ties`: whether embeddings are tied; `has_flash`: whether its attention in transformers is flash's.
    """

    architecture: str
    names: str
    ffn: str = ""
    kv_heads: str = ""
    ties: bool = False
    has_flash: bool = True


FAMILIES = (
    Family("qwen3", r"qwen-?3", "intermediate_size", "num_key_value_heads"),
    Family("qwen2", r"qwen-?2", "intermediate_size", "num_key_value_heads"),
    Family("mistral", r"mistral", "intermediate_size", "num_key_value_heads"),
    Family("llama", r"llama|granite-7b", "intermediate_size", "num_key_value_heads"),
    Family("mpt", r"\bmpt", ties=True, has_flash=False),
    Family("gpt_neox", r"neox|pythia", "intermediate_size"),
    Family("bloom", r"bloom", ties=True, has_flash=False),
    Family("falcon", r"falcon", "ffn_hidden_size", ties=True),
    Family("gpt2", r"gpt", "n_inner", ties=True),
)
"""Architectures in the order in which names are matched."""

OTHERS = {
    r"\bt5": "an encoder with a decoder, which is not simulated here: its loss is of another kind",
    r"bert": "an encoder with a loss over masked tokens, which is not simulated here",
}
"""Pattern of a name -> why it cannot be simulated."""

FSDP = {"zero1": "fsdp2_no_reshard", "zero2": "fsdp2_no_reshard", "zero3": "fsdp2"}
OURS = {stage: stage for stage in ("zero1", "zero2", "zero3")}

STRATEGIES: dict[str, dict[str, str]] = {
    "fsdp1": FSDP, "fsdp2": FSDP, "megatron-fsdp": FSDP, "thunder": FSDP, "torch": FSDP,
    "deepspeed": OURS, "colossalai": OURS, "zerobench": OURS, "megatron": {"zero1": "megatron"},
    "nanotron": {"zero1": "zero1"},
}  # fmt: skip
"""System -> its stage -> the simulated strategy. DDP is DDP in every system, and a single GPU is DDP on one rank."""

STAND_INS = {
    "fsdp1": "FSDP2 in place of FSDP1", "megatron-fsdp": "FSDP2 in place of Megatron-FSDP",
    "thunder": "FSDP2 in place of Thunder's FSDP", "deepspeed": "our engine in place of DeepSpeed",
    "colossalai": "our engine in place of ColossalAI", "megatron": "our engine in place of Megatron's optimizer",
    "nanotron": "our engine in place of nanotron's",
}  # fmt: skip
"""System -> note about its replacement."""

OPTIONS: dict[tuple[str, str], dict[str, Any]] = {("nanotron", "zero1"): {"bucket_bytes": 25 * 2**20}}
"""(system, simulated strategy) -> options that match the system."""

FUSED_ADAM = ("nanotron",)
"""Systems whose examples and benches set Adam's fused kernel (nanotron: optimizer_factory.torch_adam_is_fused)."""

FUSES_NORMS = ("nanotron",)
"""Systems whose models have single-kernel norms; compiled models do too."""

POLICIES = {"none": "none", "full": "checkpoint", "selective": "selective"}
"""act_ckpt -> activation."""


@dataclass(frozen=True)
class RunPlan:
    """The cell that represents a run, and the device. `assumed`: notes; `open_keys`: the columns that they concern."""

    config: CellConfig
    target: Target
    assumed: tuple[str, ...]
    open_keys: frozenset[str] = field(default_factory=frozenset)

    def changed(self, **changes: Any) -> RunPlan:
        return replace(self, config=replace(self.config, **changes))


Notes = dict[str, str]
"""Column, or another name -> what is assumed."""


def plan_of(run: PublishedRun, flash: bool = False) -> RunPlan:
    """Returns the plan of a run. Raises NotGivenError, with the reason, if it cannot be simulated.

    `flash`: for time predictions, which cover eager operators: nothing is compiled, and a model without flash attention
    in transformers is built as our GPT, which has the same blocks.
    """
    notes = Notes()
    _refuse(run)
    on_cpu = "cpu" in run.gpu.lower()
    strategy = _strategy(run, notes)
    family = family_of(run)
    compiles = run.compile == "1" and not flash
    as_gpt = flash and not family.has_flash
    if as_gpt:
        notes["model"] = f"our GPT, with flash attention, in place of {family.architecture}, without biases"
    config = schemas.Config(
        strategy=schemas.SCHEMAS["strategy"][strategy](**OPTIONS.get((run.system, strategy), {})),
        model=schemas.Gpt("gpt", *_shape(run)) if as_gpt else schemas.HuggingfaceModel(),
        data=schemas.Synthetic(),
        optimizer=_optimizer(run, on_cpu, notes),
        precision=_precision(run, strategy, notes),
        activation=_activation(run, notes),
        huggingface=built_as(run, family),
        world_size=run.gpus, micro_batch=run.micro_batch, accumulation=run.grad_accum or 1, sequence=run.seq or 1,
        device="cpu", backend=SIMULATED, tensors=FAKE, compile="blocks" if compiles else "none",
    )  # fmt: skip
    if run.grad_accum is None:
        notes["grad_accum"] = "one micro-batch a step"
    draft: Any = OmegaConf.to_object(OmegaConf.structured(config))
    cell = resolve(draft, "gpt" if as_gpt else "huggingface", [], target="cpu" if on_cpu else "cuda")
    if cell.problems:
        raise NotGivenError("; ".join(cell.problems))
    if not as_gpt and run.params is not None:
        built = facts_of(cell.config).psi
        if abs(off := built / run.params - 1) > 0.001:
            notes["params"] = f"the model as built has {built:,} parameters, {off:+.1%} of the row's number"
    if compiles:
        notes["compile"] = "blocks compiled, the loss not"
    elif run.compile not in ("", "0"):
        notes["compile"] = f"simulated eagerly, although the source compiles ({run.compile})"
    target = Target()
    if not on_cpu:
        takes_flash = cell.config.precision.name != "fp32"
        words = "flash attention" if takes_flash else "the kernel of attention that torch chooses: flash takes no fp32"
        notes["attention"] = words
        fuses_norms = flash and (run.system in FUSES_NORMS or run.compile not in ("", "0"))
        target = Target("cuda", "flash" if takes_flash else None, fused_norms=fuses_norms)
    return RunPlan(cell.config, target, tuple(notes.values()), frozenset(notes))


def _refuse(run: PublishedRun) -> None:
    """Raises NotGivenError for unsupported parallelism, precisions and tiers, and for missing sizes."""
    others = [f"{name}={size}" for name in ("tp", "pp", "cp") if (size := getattr(run, name) or 1) > 1]
    if others:
        raise NotGivenError(f"{' '.join(others)}: only data parallelism is simulated")
    if re.search(r"fp8|float8|fp4|int8", run.precision, re.IGNORECASE):
        raise NotGivenError(f"precision={run.precision}: less than 16 bits is not simulated")
    if missing := [column for column in ("gpus", "seq", "micro_batch") if getattr(run, column) is None]:
        raise NotGivenError(f"the row does not give {', '.join(missing)}")
    if "offload" in run.notes.lower():
        raise NotGivenError("the notes mention offloading, and no column says which states are offloaded")


def family_of(run: PublishedRun) -> Family:
    """Returns the architecture of a run's model. Raises NotGivenError, with the reason, if it is not simulated."""
    name = run.model.lower()
    for pattern, reason in OTHERS.items():
        if re.search(pattern, name):
            raise NotGivenError(f"{run.model}: {reason}")
    if missing := [column for column in SHAPE if getattr(run, column) is None]:
        raise NotGivenError(f"the row does not give {', '.join(missing)}")
    for family in FAMILIES:
        if re.search(family.names, name):
            return family
    names = ", ".join(family.architecture for family in FAMILIES)
    raise NotGivenError(f"model={run.model}: no architecture is known by that name; known are {names}")


def built_as(run: PublishedRun, family: Family) -> schemas.Huggingface:
    """Returns the options by which transformers builds a run's model."""
    sizes = {family.ffn: run.ffn, family.kv_heads: run.kv_heads}
    options: dict[str, Any] = {name: size for name, size in sizes.items() if name and size is not None}
    if family.architecture == "falcon":
        options |= {"multi_query": run.kv_heads == 1, "new_decoder_architecture": (run.kv_heads or 1) > 1}
    options["tie_word_embeddings"] = family.ties or re.search(r"\btied embeddings", run.notes) is not None
    return schemas.Huggingface(family.architecture, *_shape(run), run.seq, options)


def _shape(run: PublishedRun) -> tuple[int, int, int, int]:
    return known(run.layers), known(run.hidden), known(run.heads), known(run.vocab)


def _strategy(run: PublishedRun, notes: Notes) -> str:
    if run.strategy in ("ddp", "single"):
        if run.strategy == "single":
            notes["strategy"] = "DDP on one rank in place of no engine"
        return "ddp"
    system = run.system or "zerobench"
    found = STRATEGIES.get(system, {}).get(run.strategy)
    if found is None:
        raise NotGivenError(f"strategy={run.strategy} of {system}: no strategy here corresponds to it")
    if system in STAND_INS:
        notes["system"] = STAND_INS[system]
    return found


def _optimizer(run: PublishedRun, on_cpu: bool, notes: Notes) -> Any:
    printed = run.optimizer.lower()
    if not printed:
        notes["optimizer"] = "AdamW"
    elif not re.search(r"adam|sgd", printed):
        raise NotGivenError(f"optimizer={run.optimizer}: neither Adam nor SGD")
    name = "sgd" if "sgd" in printed else "adamw"
    how = "auto" if on_cpu else "fused" if run.system in FUSED_ADAM else "foreach"
    if how == "foreach":
        notes["implementation"] = f"{name} by foreach, the default of torch on a GPU"
    return OPTIMIZERS[name](implementation=how)


def _precision(run: PublishedRun, strategy: str, notes: Notes) -> Any:
    """Returns the precision; assumes ZeRO's mixed precision if only a half precision is given."""
    printed, casts = run.precision.lower(), strategy.startswith("fsdp2")
    name = next((name for name in ("bf16", "fp16", "fp32") if re.search(rf"\b(amp_)?{name}\b", printed)), None)
    if printed and name is None:
        raise NotGivenError(f"precision={run.precision}: none of fp32, bf16, fp16")
    if name is None:
        name = "bf16"
        notes["precision"] = "bf16 with fp32 master weights and states"
    elif name != "fp32":
        notes["masters"] = "fp32 master weights and states"
    if name == "fp16" and casts:
        name = "bf16"
        notes["dtype"] = "bf16 in place of fp16, which has the same size"
    if name == "fp32":
        return PRECISIONS[name]()
    if casts:
        if "fp32 reduce" not in printed:
            notes["wire"] = "gradients reduced in fp32"
        return PRECISIONS[name](wire_dtype="fp32")
    if "fp32 accumulation" in printed:
        if spec_of(strategy).composes.gradient_dtypes:
            return PRECISIONS[name](gradient_dtype="fp32")
        notes["gradients"] = f"gradients accumulated in the model's dtype, as {strategy} does here, and not in fp32"
    return PRECISIONS[name]()


def _activation(run: PublishedRun, notes: Notes) -> Any:
    if run.act_ckpt and run.act_ckpt not in POLICIES:
        raise NotGivenError(f"act_ckpt={run.act_ckpt}: none of {', '.join(POLICIES)}")
    if not run.act_ckpt:
        notes["act_ckpt"] = "no activations recomputed"
    if run.act_ckpt == "selective":
        notes["selective"] = "selective by operators, as torchtitan does by default"
    return SCHEMAS["activation"][POLICIES[run.act_ckpt or "none"]]()
