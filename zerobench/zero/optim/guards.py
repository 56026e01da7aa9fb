"""Sentences for uses of an optimizer, whose parameters are segments, as one of whole parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import optim

from .segments import ELEMENTWISE

STEP = (
    "call engine.step(), not optimizer.step(): the parameters must be exchanged (and no GradScaler.step: pass"
    " loss_scaling=zerobench.zero.LossScaling() to initialize instead)"
)


def guard(optimizer: optim.Optimizer) -> None:
    """Has `optimizer` refuse a plain run's states."""
    optimizer.register_load_state_dict_pre_hook(_check_states)


def check_groups(optimizer: optim.Optimizer, updated_by: str) -> None:
    """Raises ValueError for options of groups that the engine's updates, on `updated_by`, cannot have."""
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise ValueError("optimizer: differentiable=True keeps the graph of an update, which shards have not")
        if group.get("capturable") and updated_by == "cpu":
            raise ValueError(
                "optimizer: capturable=True is for updates on a GPU, and here the CPU makes them; leave it out"
            )


def _check_states(optimizer: optim.Optimizer, saved: dict[str, Any]) -> None:
    """Raises ValueError where `saved` is not of this rank's segments."""
    groups = zip(saved["param_groups"], optimizer.param_groups, strict=False)
    for number, (theirs, ours) in enumerate(groups):
        given, mine = theirs["params"], ours["params"]
        if len(given) != len(mine):
            raise _refusal(f"group {number} has {len(given)} parameters and this optimizer's {len(mine)} segments")
        for key, segment in zip(given, mine, strict=True):
            for name, value in _tensors_of(optimizer, saved["state"].get(key, {})):
                if value.shape != segment.shape:
                    words = (
                        f"{name!r} of parameter {key} is {tuple(value.shape)} and the segment {tuple(segment.shape)}"
                    )
                    raise _refusal(words)


def _tensors_of(optimizer: optim.Optimizer, state: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """States that have an element for each of the parameter's."""
    found = [(name, value) for name, value in state.items() if isinstance(value, torch.Tensor) and value.dim()]
    return found if type(optimizer) in ELEMENTWISE else []


def _refusal(found: str) -> ValueError:
    return ValueError(
        f"optimizer.load_state_dict: {found}; the engine's optimizer takes what its own state_dict gave on the same"
        " rank, stage and N, not a plain run's states; engine.load(path) takes a checkpoint of any stage and N"
    )
