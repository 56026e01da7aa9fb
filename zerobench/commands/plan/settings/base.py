"""The common part of all systems' settings."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ....config.cell import CellConfig
from ....fake.skipped_random_draws import Undrawn
from ....predict.build import build_model
from ....zero.modules.wrapping import default_units

STAGES = {
    "ddp": 0, "zero1": 1, "megatron": 1, "zero_redundancy": 1, "zero2": 2, "fsdp2_no_reshard": 3, "zero3": 3,
    "fsdp2": 3, "deepspeed_zero1": 1, "deepspeed_zero2": 2, "deepspeed_zero3": 3,
}  # fmt: skip
"""Strategy -> what it partitions, as a stage of ZeRO."""

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Our words for dtypes -> torch's."""

PER_NODE = 8
"""GPUs of a node, where the cell does not say."""


@dataclass(frozen=True)
class Settings:
    """File name -> text, and sentences on what the system does otherwise."""

    files: dict[str, str]
    notes: list[str] = field(default_factory=list)


def stage_of(config: CellConfig) -> int:
    """Returns the stage of ZeRO that a cell's strategy comes to."""
    return STAGES.get(config.strategy.name, 0)


def units_of(config: CellConfig) -> list[tuple[str, str]]:
    """Returns the units of stage 3, in order: each module's path and the name of its class."""
    with torch.device("meta"), Undrawn():
        return [(name, type(unit).__name__) for name, unit in default_units(build_model(config))]


def list_of(paths: list[str]) -> str | None:
    """Returns the path of the module list whose members are `paths`, in order; None where there is none."""
    parents = {path.rpartition(".")[0] for path in paths}
    numbers = [path.rpartition(".")[2] for path in paths]
    is_list = len(parents) == 1 and numbers == [str(number) for number in range(len(paths))]
    return parents.pop() if is_list and paths else None


def nodes_of(config: CellConfig) -> int:
    """Returns the number of nodes of the world."""
    return max(1, -(-config.world_size // (config.node_size or PER_NODE)))
