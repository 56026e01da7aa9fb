"""The engine's state as dicts: the plain module's, whole, and each rank's own part."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .strategy import Strategy


def full_state_dict(engine: Strategy, rank0_only: bool) -> dict[str, Any]:
    """The plain module's `state_dict`, copied; units that are not whole are gathered one after the other."""
    engine.settle()
    keep = engine.comm.rank == 0 or not rank0_only
    gathered: dict[torch.Tensor, torch.Tensor] = {}
    with torch.no_grad():
        for unit in engine.holders():
            with engine.whole(unit):
                if keep:
                    gathered |= {p: p.detach().clone() for p in engine.parameters_of(unit)}
    if not keep:
        return {}

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value  # a module's extra state
        return gathered[value] if value in gathered else value.detach().clone()

    return {name: copy(value) for name, value in engine.module.state_dict(keep_vars=True).items()}


def state_dict(engine: Strategy) -> dict[str, Any]:
    """This rank's part, copied, and what it belongs to."""
    engine.settle()
    return {
        "stage": engine.stage,
        "world_size": engine.comm.size,
        "rank": engine.comm.rank,
        "tensors": {name: tensor.detach().clone() for name, tensor in _own_tensors(engine).items()},
        "optimizer": deepcopy(engine.optimizer.state_dict()),
    }


def load_state_dict(engine: Strategy, saved: dict[str, Any]) -> None:
    """Checks everything, then copies. Raises ValueError where `saved` does not fit this engine."""
    engine.settle()
    for key, mine in (("stage", engine.stage), ("world_size", engine.comm.size), ("rank", engine.comm.rank)):
        if saved.get(key) != mine:
            raise ValueError(f"state_dict: {key} is {saved.get(key)}, but this engine's is {mine}")
    own, given = _own_tensors(engine), saved["tensors"]
    for name, tensor in own.items():
        if name not in given or given[name].shape != tensor.shape:
            raise ValueError(f"state_dict: {name} is missing or of another size than this model's")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(given[name])
    engine.optimizer.load_state_dict(deepcopy(saved["optimizer"]))
    engine.after_load()


def _own_tensors(engine: Strategy) -> dict[str, torch.Tensor]:
    """What this rank must keep to go on: by name, live. A stage that shards frozen parameters holds them in units."""
    shards = {f"unit {unit.name}": unit.parameter_shard for unit in engine.holders()}
    shards |= {f"unit {unit.name}": unit.master_shard for unit in engine.units}
    frozen = {} if engine.holders() else {n: p for n, p in engine.module.named_parameters() if not p.requires_grad}
    return {**shards, **frozen, **dict(engine.module.named_buffers())}
