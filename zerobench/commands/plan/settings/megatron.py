"""Megatron-LM: `megatron.args`, one argument a line, for pretrain_gpt.py.

https://github.com/NVIDIA/Megatron-LM, megatron/training/arguments.py
"""

from __future__ import annotations

from ....config.cell import CellConfig
from ....config.schema import Gpt
from .base import Settings, stage_of

SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
"""Stage -> Megatron-FSDP's word for it."""


def megatron(config: CellConfig) -> Settings:
    """Returns `megatron.args` for the cell. The model's shape is there for a GPT of ours."""
    arguments = [
        "--tensor-model-parallel-size 1", "--pipeline-model-parallel-size 1",
        f"--micro-batch-size {config.micro_batch}", f"--global-batch-size {config.batch}",
        f"--seq-length {config.sequence}", *_shape(config), *_precision(config), *_sharding(config),
    ]  # fmt: skip
    if config.recomputes:
        arguments += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    if config.offload.name != "none":
        arguments += ["--optimizer-cpu-offload", f"--optimizer-offload-fraction {_fraction(config):g}"]
    if config.clip is not None:
        arguments += [f"--clip-grad {config.clip:g}"]
    return Settings({"megatron.args": "\n".join(arguments) + "\n"}, _notes(config))


def _shape(config: CellConfig) -> list[str]:
    model = config.model
    if not isinstance(model, Gpt):
        return []
    untied = [] if model.tied else ["--untie-embeddings-and-output-weights"]
    return [
        f"--num-layers {model.layers}", f"--hidden-size {model.hidden}", f"--num-attention-heads {model.heads}",
        f"--max-position-embeddings {model.positions}", *untied,
    ]  # fmt: skip


def _precision(config: CellConfig) -> list[str]:
    if config.precision.name == "fp32":
        return []
    own = config.precision.wire_dtype == "bf16" and config.strategy.name != "megatron"
    return [f"--{config.precision.name}", *(["--grad-reduce-in-bf16"] if own else [])]


def _sharding(config: CellConfig) -> list[str]:
    stage = stage_of(config)
    if stage == 0:
        return ["--overlap-grad-reduce"]
    shared = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    if stage == 1:
        return shared
    fsdp = ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {SHARDING[stage]}", "--ckpt-format fsdp_dtensor"]
    return [*shared, *fsdp, "--no-gradient-accumulation-fusion"]


def _fraction(config: CellConfig) -> float:
    return float(getattr(config.offload, "fraction", 1.0))


def _notes(config: CellConfig) -> list[str]:
    notes = []
    if config.strategy.name not in ("megatron", "ddp"):
        words = (
            "Megatron accumulates gradients in fp32; the row `megatron` was executed as its distributed optimizer is"
        )
        notes.append(f"{config.strategy.name}: {words}")
    if config.offload.name == "nvme":
        notes.append("offload=nvme: Megatron's optimizer goes to host memory, not to files")
    if not isinstance(config.model, Gpt):
        notes.append(f"model={config.model_name}: its shape is yours to add")
    return notes
