"""DeepSpeed: `ds_config.json`, whose sizes are in elements.

https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

import json
from typing import Any

from ....config.cell import CellConfig
from ....predict.estimate import estimate
from .base import Settings, stage_of

ITEM = {"fp32": 4, "bf16": 2, "fp16": 2}
LARGEST_BUCKET = 25 * 2**20
"""Bytes of our automatic buckets at most; at least 1 MiB."""


def deepspeed(config: CellConfig) -> Settings:
    """Returns `ds_config.json` for the cell."""
    stage = stage_of(config)
    found: dict[str, Any] = {
        "train_batch_size": config.batch,
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_accumulation_steps": config.accumulation,
    }
    if config.clip is not None:
        found["gradient_clipping"] = config.clip
    if config.precision.name != "fp32":
        found[config.precision.name] = {"enabled": True}
    if config.precision.gradient_dtype not in (None, config.precision.name):
        found["data_types"] = {"grad_accum_dtype": config.precision.gradient_dtype}
    found["zero_optimization"] = _zero(config, stage)
    if config.recomputes:
        found["activation_checkpointing"] = {"cpu_checkpointing": config.activation.name == "checkpoint_offload"}
    return Settings({"ds_config.json": json.dumps(found, indent=2) + "\n"}, _notes(config, stage))


def _zero(config: CellConfig, stage: int) -> dict[str, Any]:
    numel = _bucket_numel(config)
    found: dict[str, Any] = {"stage": stage}
    if stage:
        found |= {"contiguous_gradients": True, "overlap_comm": True, "reduce_bucket_size": numel}
    if stage in (1, 2):
        found |= {"reduce_scatter": True, "allgather_bucket_size": numel}
    if stage == 3:  # its own defaults keep up to a billion elements whole
        found |= {"stage3_prefetch_bucket_size": numel, "stage3_max_live_parameters": _unit_numel(config),
                  "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}  # fmt: skip
    return found | _offload(config, stage)


def _offload(config: CellConfig, stage: int) -> dict[str, Any]:
    name = config.offload.name
    if name == "none" or not stage:
        return {}
    place: dict[str, Any] = {"device": name, "pin_memory": True}
    if name == "nvme":
        place["nvme_path"] = getattr(config.offload, "path", None) or "/local_nvme"
    moved = bool(getattr(config.offload, "parameters", False))
    return {"offload_optimizer": place} | ({"offload_param": place} if moved and stage == 3 else {})


def _bucket_numel(config: CellConfig) -> int:
    """Returns the elements of a bucket: the cell's, or as our automatic one: half of a rank's shard."""
    given, item = getattr(config.strategy, "bucket_bytes", None), ITEM[config.precision.name]
    if isinstance(given, int):
        return given // item
    shard = estimate(config).psi * item // config.world_size
    return min(max(shard // 2, 2**20), LARGEST_BUCKET) // item


def _unit_numel(config: CellConfig) -> int:
    """Returns the elements that may be gathered at once: two units, one that runs and one ahead."""
    layers = getattr(config.model, "layers", None) or getattr(config.huggingface, "layers", None) or 1
    return 2 * -(-estimate(config).psi // int(layers))


def _notes(config: CellConfig, stage: int) -> list[str]:
    notes = []
    if config.strategy.name == "fsdp2_no_reshard":
        notes.append("fsdp2_no_reshard: DeepSpeed's stage 3 gives parameters back after forward; its traffic is 3 ψ")
    if config.strategy.name == "megatron":
        notes.append("megatron: gradients are fp32 in one buffer there; DeepSpeed's stage 1 keeps them in buckets")
    if config.recomputes:
        notes.append("recomputing: the model itself must call deepspeed.checkpointing.checkpoint around each block")
    if config.offload.name == "nvme":
        notes.append("offload=nvme: set nvme_path to a folder on the disk")
    return notes if stage else [*notes, "ddp: stage 0 is plain data parallelism, with fp32 masters on every rank"]
