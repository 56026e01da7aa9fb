"""Settings of a chosen cell for FSDP2, DeepSpeed and accelerate: valid, with documented names alone."""

import ast
import importlib
import json
from dataclasses import replace

import pytest
import yaml

from tests.cells import cell
from zerobench.commands.plan.settings import SYSTEMS
from zerobench.config import schema_memory
from zerobench.config.cell import CellConfig
from zerobench.config.schema_memory import CheckpointActivations
from zerobench.config.schema_training import Bf16
from zerobench.strategies.options import Zero2

MIB = 2**20

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "megatron", "fsdp2", "fsdp2_no_reshard")

DEEPSPEED = {
    "stage", "contiguous_gradients", "overlap_comm", "reduce_bucket_size", "reduce_scatter", "allgather_bucket_size",
    "stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold", "offload_optimizer", "offload_param",
}  # fmt: skip
"""Documented keys of `zero_optimization` (deepspeed.ai/docs/config-json)."""

DEEPSPEED_TOP = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "bf16",
    "fp16", "data_types", "zero_optimization", "activation_checkpointing",
}  # fmt: skip

ACCELERATE = {
    "compute_environment", "debug", "downcast_bf16", "machine_rank", "main_training_function", "num_machines",
    "num_processes", "mixed_precision", "rdzv_backend", "same_network", "use_cpu", "distributed_type", "fsdp_config",
    "deepspeed_config", "fsdp_version", "fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_reshard_after_forward", "fsdp_activation_checkpointing", "fsdp_offload_params",
    "fsdp_cpu_ram_efficient_loading", "fsdp_state_dict_type", "zero_stage", "gradient_accumulation_steps",
    "gradient_clipping", "offload_optimizer_device", "offload_param_device", "zero3_init_flag",
    "offload_optimizer_nvme_path", "offload_param_nvme_path",
}  # fmt: skip
"""Documented keys of accelerate's config file (huggingface.co/docs/accelerate)."""


@pytest.fixture(scope="module")
def chosen() -> dict[str, CellConfig]:
    """One resolved cell per strategy and tier, with blocks recomputed."""
    tiers = {"none": STRATEGIES, "cpu": ("zero2", "zero3"), "nvme": ("zero3",)}
    schemas = schema_memory.SCHEMAS["offload"]
    same = {"precision": Bf16(), "activation": CheckpointActivations(), "clip": 1.0, "accumulation": 2}
    cells = {
        f"{name} {tier}": cell(name, 4, bucket_bytes=25 * MIB, offload=schemas[tier](), **same)
        for tier, names in tiers.items()
        for name in names
    }
    assert not any(one.problems for one in cells.values())
    return {name: one.config for name, one in cells.items()}


@pytest.mark.parametrize("system", SYSTEMS)
def test_settings_are_valid_and_have_documented_names_alone(system: str, chosen: dict[str, CellConfig]) -> None:
    for name, config in chosen.items():
        found = SYSTEMS[system](config)
        (text,) = found.files.values()
        CHECKS[system](text)
        assert SYSTEMS[system](config) == found, name
        assert all("\n" not in note for note in found.notes)


def _valid_python(text: str) -> None:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            assert all(hasattr(module, alias.name) for alias in node.names)


def _valid_deepspeed(text: str) -> None:
    found = json.loads(text)
    assert set(found) <= DEEPSPEED_TOP
    assert set(found["zero_optimization"]) <= DEEPSPEED
    assert found["train_batch_size"] == 4 * found["train_micro_batch_size_per_gpu"] * 2


def _valid_accelerate(text: str) -> None:
    found = yaml.safe_load(text)
    keys = set(found) | set(found.get("fsdp_config", {})) | set(found.get("deepspeed_config", {}))
    assert keys <= ACCELERATE
    assert ("fsdp_config" in found) == (found["distributed_type"] == "FSDP")


CHECKS = {"fsdp2": _valid_python, "deepspeed": _valid_deepspeed, "accelerate": _valid_accelerate}


def test_settings_say_what_the_cell_is(chosen: dict[str, CellConfig]) -> None:
    zero = {name: json.loads(SYSTEMS["deepspeed"](chosen[name]).files["ds_config.json"]) for name in chosen}
    assert [zero[f"{one} none"]["zero_optimization"]["stage"] for one in STRATEGIES] == [0, 1, 2, 3, 1, 3, 3]
    assert zero["zero2 cpu"]["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert "offload_param" not in zero["zero3 cpu"]["zero_optimization"]
    assert zero["zero3 nvme"]["zero_optimization"]["offload_param"]["nvme_path"]
    shard = {name: SYSTEMS["fsdp2"](chosen[name]).files["shard.py"] for name in chosen}
    assert "reshard_after_forward=True" in shard["zero3 none"]
    assert "reshard_after_forward=False" in shard["fsdp2_no_reshard none"]
    assert "param_dtype=torch.bfloat16" in shard["fsdp2 none"]
    assert "CPUOffloadPolicy()" in shard["zero3 cpu"]
    assert "DistributedDataParallel(" in shard["ddp none"]
    assert SYSTEMS["fsdp2"](chosen["zero1 none"]).notes
    strategy = chosen["zero2 none"].strategy
    assert isinstance(strategy, Zero2)
    whole = replace(chosen["zero2 none"], strategy=replace(strategy, bucket_bytes=MIB))
    again = json.loads(SYSTEMS["deepspeed"](whole).files["ds_config.json"])
    assert again["zero_optimization"]["reduce_bucket_size"] == MIB // 2
