"""A chosen cell as settings of other systems: files for FSDP2, DeepSpeed and accelerate, and notes.

Each is a pure function of the resolved cell. A system without a counterpart of a strategy gets its closest one, with a
note: its memory then differs from the simulated one.

fsdp2        a module `shard.py` with the `fully_shard` calls on the units of the cell
             https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
deepspeed    `ds_config.json`, whose sizes are in elements: https://www.deepspeed.ai/docs/config-json/
accelerate   `accelerate.yaml`, for `accelerate launch --config_file`
             https://huggingface.co/docs/accelerate/package_reference/cli
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ...config.cell import CellConfig
from ...predict.build import facts_of
from ...zero.options import automatic_bucket_bytes

STAGES = {
    "ddp": 0, "zero1": 1, "megatron": 1, "zero_redundancy": 1, "zero2": 2, "fsdp2_no_reshard": 3, "zero3": 3,
    "fsdp2": 3, "deepspeed_zero1": 1, "deepspeed_zero2": 2, "deepspeed_zero3": 3,
}  # fmt: skip
"""Strategy -> the stage of ZeRO that partitions the same states; 0 for a user's own."""

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Our names of dtypes -> torch's."""

PER_NODE, LOCAL_NVME = 8, "/local_nvme"
"""GPUs per node, and the folder of files, if the cell does not say."""


@dataclass(frozen=True)
class Settings:
    """File name -> text, and notes on differences in that system."""

    files: dict[str, str]
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def of(name: str, text: str, notes: dict[str, bool]) -> Settings:
        """Returns a file with its name, and those of the notes that apply."""
        return Settings({name: text}, [note for note, applies in notes.items() if applies])


# -- FSDP2 -----------------------------------------------------------------------------------------


DDP, FSDP2 = ((Path(__file__).parent / name).read_text(encoding="utf-8") for name in ("ddp.txt", "fsdp2.txt"))
"""Templates of `shard.py`."""

RECOMPUTE = """\
    blocks = set({units})
    apply_activation_checkpointing(model, check_fn=lambda module: module in blocks)
"""

IMPORT = "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing\n"
"""How torchtitan and accelerate recompute blocks under FSDP2."""


def fsdp2(config: CellConfig) -> Settings:
    """Returns `shard.py`, whose `shard(model)` implements the cell's strategy, or the closest one."""
    paths = [path for path, _ in facts_of(config).units]
    parents, numbers = zip(*(path.rpartition(".")[::2] for path in paths), strict=True) if paths else ((), ())
    units = f"[model.get_submodule(n) for n in {paths!r}]"
    if len({*parents}) == 1 and [*numbers] == [str(number) for number in range(len(paths))]:
        units = f'list(model.get_submodule("{parents[0]}"))'
    stage, name = STAGES.get(config.strategy.name, 0), config.strategy.name
    values = {"name": name, "ranks": config.world_size, "units": units, "recompute": "", "more": ""}
    if config.recomputes:
        values |= {"recompute": RECOMPUTE.format(units=units), "more": IMPORT}
    if stage == 0:
        return Settings({"shard.py": DDP.format(**values)})
    offloads = config.offload.name != "none"
    names = ["CPUOffloadPolicy"] * offloads + ["MixedPrecisionPolicy", "fully_shard"]
    half = config.precision.name != "fp32"
    reshard = stage == 3 and name != "fsdp2_no_reshard"
    text = FSDP2.format(
        imports=", ".join(names), stored="fp32", reshard=reshard, root="None" if reshard else "False",
        parameters=f"torch.{DTYPES[config.precision.name]}" if half else "None",
        reduce=f"torch.{DTYPES[config.precision.wire_dtype or config.precision.name]}" if half else "None",
        offload=', "offload_policy": CPUOffloadPolicy()' * offloads, **values,
    )  # fmt: skip
    closest = "FSDP2 has no such stage; reshard_after_forward=False comes closest, see the row fsdp2_no_reshard"
    held = "CPUOffloadPolicy keeps parameters, gradients and optimizer in host memory, and FSDP2 has no files"
    notes = {f"{name}: {closest}": stage in (1, 2), f"offload={config.offload.name}: {held}": offloads}
    return Settings.of("shard.py", text, notes)


# -- DeepSpeed -------------------------------------------------------------------------------------


def deepspeed(config: CellConfig) -> Settings:
    """Returns `ds_config.json` for the cell."""
    stage, name, precision = STAGES.get(config.strategy.name, 0), config.strategy.name, config.precision
    settings: dict[str, Any] = {
        "train_batch_size": config.batch,
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_accumulation_steps": config.accumulation,
    }
    if config.clip is not None:
        settings["gradient_clipping"] = config.clip
    if precision.name != "fp32":
        settings[precision.name] = {"enabled": True}
    if precision.gradient_dtype not in (None, precision.name):
        settings["data_types"] = {"grad_accum_dtype": precision.gradient_dtype}
    settings["zero_optimization"] = _zero(config, stage)
    if config.recomputes:
        settings["activation_checkpointing"] = {"cpu_checkpointing": config.activation.name == "checkpoint_offload"}
    notes = {
        "fsdp2_no_reshard: stage 3 of DeepSpeed frees gathered parameters after forward; its traffic is 3 ψ":
            name == "fsdp2_no_reshard",
        "megatron: Megatron keeps fp32 gradients in one buffer; stage 1 of DeepSpeed keeps them in buckets":
            name == "megatron",
        "recomputing: the model itself must call deepspeed.checkpointing.checkpoint around each block":
            config.recomputes,
        "offload=nvme: set nvme_path to a folder on the disk": config.offload.name == "nvme",
        "ddp: stage 0 is plain data parallelism, with fp32 masters on every rank": stage == 0,
    }  # fmt: skip
    return Settings.of("ds_config.json", json.dumps(settings, indent=2) + "\n", notes)


def _zero(config: CellConfig, stage: int) -> dict[str, Any]:
    section: dict[str, Any] = {"stage": stage}
    if not stage:
        return section
    facts, item = facts_of(config), 4 if config.precision.name == "fp32" else 2
    bucket_bytes = getattr(config.strategy, "bucket_bytes", None)
    if not isinstance(bucket_bytes, int):  # the cell's automatic size
        bucket_bytes = automatic_bucket_bytes(facts.psi * item, config.data_ranks)
    numel = bucket_bytes // item
    section |= {"contiguous_gradients": True, "overlap_comm": True, "reduce_bucket_size": numel}
    if stage < 3:
        section |= {"reduce_scatter": True, "allgather_bucket_size": numel}
    else:  # its own defaults keep up to a billion elements whole; here two units, the running one and the next
        layers = getattr(config.model, "layers", None) or getattr(config.huggingface, "layers", None) or 1
        section |= {"stage3_prefetch_bucket_size": numel,
                  "stage3_max_live_parameters": 2 * -(-(facts.psi + facts.frozen) // int(layers)),
                  "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}  # fmt: skip
    if config.offload.name == "none":
        return section
    tier: dict[str, Any] = {"device": config.offload.name, "pin_memory": True}
    if config.offload.name == "nvme":
        tier["nvme_path"] = getattr(config.offload, "path", None) or LOCAL_NVME
    section["offload_optimizer"] = tier
    return section | ({"offload_param": tier} if stage == 3 and getattr(config.offload, "parameters", False) else {})


# -- accelerate ------------------------------------------------------------------------------------


def accelerate(config: CellConfig) -> Settings:
    """Returns `accelerate.yaml`: FSDP2 for stage 3, DeepSpeed for stages 1 and 2 and for files, else plain DDP."""
    stage, nodes = STAGES.get(config.strategy.name, 0), max(1, -(-config.world_size // (config.node_size or PER_NODE)))
    offload, by_fsdp = config.offload.name, stage == 3 and config.offload.name != "nvme"
    settings: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE", "debug": False, "downcast_bf16": "no", "machine_rank": 0,
        "main_training_function": "main", "num_machines": nodes, "num_processes": config.world_size,
        "mixed_precision": "no" if config.precision.name == "fp32" else config.precision.name,
        "rdzv_backend": "static" if nodes == 1 else "c10d", "same_network": True, "use_cpu": False,
    }  # fmt: skip
    if stage == 0:
        settings["distributed_type"] = "MULTI_GPU"
    elif by_fsdp:
        classes = dict.fromkeys(name for _, name in facts_of(config).units)
        settings |= {
            "distributed_type": "FSDP",
            "fsdp_config": {
                "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_transformer_layer_cls_to_wrap": ",".join(classes),
                "fsdp_reshard_after_forward": config.strategy.name != "fsdp2_no_reshard",
                "fsdp_activation_checkpointing": config.recomputes, "fsdp_offload_params": offload != "none",
                "fsdp_cpu_ram_efficient_loading": True, "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            },
        }  # fmt: skip
    else:
        moves_parameters = stage == 3 and getattr(config.offload, "parameters", False)
        section = {
            "zero_stage": stage, "gradient_accumulation_steps": config.accumulation,
            "offload_optimizer_device": offload, "offload_param_device": offload if moves_parameters else "none",
            "zero3_init_flag": stage == 3,
        }  # fmt: skip
        if offload == "nvme":
            path = getattr(config.offload, "path", None) or LOCAL_NVME
            section |= {"offload_optimizer_nvme_path": path, "offload_param_nvme_path": path}
        if config.clip is not None:
            section["gradient_clipping"] = config.clip
        settings |= {"distributed_type": "DEEPSPEED", "deepspeed_config": section}
    notes = {
        f"{config.strategy.name}: accelerate has stages 1 and 2 through DeepSpeed, which must be installed":
            stage in (1, 2),
        "recomputing: call model.gradient_checkpointing_enable() in the script": config.recomputes and not by_fsdp,
        f"micro_batch={config.micro_batch}: is the batch size of the script's data loader": True,
    }  # fmt: skip
    return Settings.of("accelerate.yaml", yaml.safe_dump(settings, sort_keys=True), notes)


# -- all systems -----------------------------------------------------------------------------------


SYSTEMS = {"fsdp2": fsdp2, "deepspeed": deepspeed, "accelerate": accelerate}
"""System -> the function that returns its settings for a resolved cell."""
