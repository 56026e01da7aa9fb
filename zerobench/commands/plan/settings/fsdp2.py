"""torch's FSDP2: a module `shard.py` with the `fully_shard` calls on the units of the cell.

https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from ....config.cell import CellConfig
from .base import DTYPES, Settings, list_of, stage_of, units_of

DDP = '''\
"""{name}: every rank holds all states; there is nothing to shard."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel


def shard(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the model in DistributedDataParallel."""
    init_device_mesh("cuda", ({ranks},))
{recompute}    return DistributedDataParallel(model, gradient_as_bucket_view=True)
'''

FSDP2 = '''\
"""{name}: build the optimizer after shard(model), on the sharded parameters."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import {imports}


def shard(model: torch.nn.Module) -> torch.nn.Module:
    """Shards each block, then what is left of the model; the model's parameters are {stored} shards from then on."""
    mesh = init_device_mesh("cuda", ({ranks},))
    policy = MixedPrecisionPolicy(param_dtype={parameters}, reduce_dtype={reduce})
    how = {{"mesh": mesh, "mp_policy": policy{offload}}}
{recompute}    units = {units}
    for unit in units:
        fully_shard(unit, reshard_after_forward={reshard}, **how)
    fully_shard(model, reshard_after_forward={root}, **how)
    return model
'''

RECOMPUTE = """\
    blocks = set({units})
    apply_activation_checkpointing(model, check_fn=lambda module: module in blocks)
"""

IMPORT = "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing\n"
"""As torchtitan and accelerate recompute blocks under FSDP2."""


def fsdp2(config: CellConfig) -> Settings:
    """Returns `shard.py`, whose `shard(model)` does what the cell's strategy does, or comes closest."""
    paths = [path for path, _ in units_of(config)]
    modules = list_of(paths)
    units = f'list(model.get_submodule("{modules}"))' if modules else f"[model.get_submodule(n) for n in {paths!r}]"
    recompute = RECOMPUTE.format(units=units) if config.recomputes else ""
    stage, name = stage_of(config), config.strategy.name
    values = {"name": name, "ranks": config.world_size, "units": units, "recompute": recompute}
    if stage == 0:
        return Settings({"shard.py": _with_checkpoint(DDP.format(**values), config)})
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
    return Settings({"shard.py": _with_checkpoint(text, config)}, _notes(config, stage))


def _with_checkpoint(text: str, config: CellConfig) -> str:
    """Returns the text with the import that recomputing needs."""
    return text.replace("import torch\n", f"import torch\n{IMPORT}", 1) if config.recomputes else text


def _notes(config: CellConfig, stage: int) -> list[str]:
    notes = []
    if stage in (1, 2):
        words = "FSDP2 has no such stage; reshard_after_forward=False comes closest, look at the row fsdp2_no_reshard"
        notes.append(f"{config.strategy.name}: {words}")
    if config.offload.name != "none":
        words = "CPUOffloadPolicy keeps parameters, gradients and optimizer in host memory"
        notes.append(f"offload={config.offload.name}: {words}, and FSDP2 has no files")
    return notes
