"""Hugging Face accelerate: `accelerate.yaml`, for `accelerate launch --config_file`.

https://huggingface.co/docs/accelerate/package_reference/cli
"""

from __future__ import annotations

from typing import Any

import yaml

from ....config.cell import CellConfig
from .base import Settings, nodes_of, stage_of, units_of


def accelerate(config: CellConfig) -> Settings:
    """Returns `accelerate.yaml`: FSDP2 for stage 3, DeepSpeed for stages 1 and 2 and for files, else plain DDP."""
    stage = stage_of(config)
    found: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE", "debug": False, "downcast_bf16": "no", "machine_rank": 0,
        "main_training_function": "main", "num_machines": nodes_of(config), "num_processes": config.world_size,
        "mixed_precision": "no" if config.precision.name == "fp32" else config.precision.name,
        "rdzv_backend": "static" if nodes_of(config) == 1 else "c10d", "same_network": True, "use_cpu": False,
    }  # fmt: skip
    if stage == 0:
        found["distributed_type"] = "MULTI_GPU"
    elif stage == 3 and config.offload.name != "nvme":
        found |= {"distributed_type": "FSDP", "fsdp_config": _fsdp(config)}
    else:
        found |= {"distributed_type": "DEEPSPEED", "deepspeed_config": _deepspeed(config, stage)}
    return Settings({"accelerate.yaml": yaml.safe_dump(found, sort_keys=True)}, _notes(config, stage))


def _fsdp(config: CellConfig) -> dict[str, Any]:
    classes = dict.fromkeys(name for _, name in units_of(config))
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": ",".join(classes),
        "fsdp_reshard_after_forward": config.strategy.name != "fsdp2_no_reshard",
        "fsdp_activation_checkpointing": config.recomputes,
        "fsdp_offload_params": config.offload.name != "none",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def _deepspeed(config: CellConfig, stage: int) -> dict[str, Any]:
    moved = bool(getattr(config.offload, "parameters", False))
    found: dict[str, Any] = {
        "zero_stage": stage, "gradient_accumulation_steps": config.accumulation,
        "offload_optimizer_device": config.offload.name,
        "offload_param_device": config.offload.name if moved and stage == 3 else "none",
        "zero3_init_flag": stage == 3,
    }  # fmt: skip
    if config.offload.name == "nvme":
        path = getattr(config.offload, "path", None) or "/local_nvme"
        found |= {"offload_optimizer_nvme_path": path, "offload_param_nvme_path": path}
    return found | ({"gradient_clipping": config.clip} if config.clip is not None else {})


def _notes(config: CellConfig, stage: int) -> list[str]:
    notes = []
    if stage in (1, 2):
        notes.append(
            f"{config.strategy.name}: accelerate has stages 1 and 2 through DeepSpeed, which must be installed"
        )
    if config.recomputes and not (stage == 3 and config.offload.name != "nvme"):
        notes.append("recomputing: call model.gradient_checkpointing_enable() in the script")
    return [*notes, f"micro_batch={config.micro_batch}: is the batch size of the script's data loader"]
