"""A step of the optimizer on tensors of one element, with a checkpoint's options and states: whether it would raise."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..engine import ShardedEngine
from ..optim.segments import ELEMENTWISE
from ..optim.step_by_tiles import raw_step, stand_in
from .facts import IMPLEMENTATION, decode, dtype_name, is_elements
from .safetensors import DTYPES


def problems_of_step(engine: ShardedEngine, states: Mapping[str, Any], options: Sequence[Any]) -> Iterator[str]:
    """Yields why a step with these options and states would raise, or would not continue that of the checkpoint.

    A user's own optimizer is not tried: its step may have effects elsewhere.
    """
    optimizer, tried = engine.optimizer, set[str]()
    if type(optimizer) not in ELEMENTWISE:
        return
    group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    for segment in engine.segments:
        name, number = engine.names[segment.segment.parameter], group_of.get(id(segment.tensor))
        state = states.get(name, {})
        if number is None or (key := json.dumps([number, str(segment.tensor.dtype), state])) in tried:
            continue
        tried.add(key)
        group = optimizer.param_groups[number] | {
            key: decode(value) for key, value in options[number].items() if key not in IMPLEMENTATION
        }
        saved = {
            key: torch.zeros(1, dtype=DTYPES[value["elements"]]) if is_elements(value) else decode(value)
            for key, value in state.items()
        }
        try:
            fresh = _step(optimizer, group, segment.tensor.dtype, {})
        except Exception:  # such as Adagrad's, whose states are made with it
            fresh = {}
        try:
            _step(optimizer, group, segment.tensor.dtype, saved)
        except Exception as error:
            yield f"optimizer: a step with the options and states of {name} in the checkpoint raises {error!r:.200}"
        for key, value in saved.items():
            here = fresh.get(key)
            if is_elements(state[key]) and isinstance(here, torch.Tensor) and here.dtype != value.dtype:
                there = dtype_name(value.dtype)
                yield f"{name}: its state {key} is {there} in the checkpoint, {dtype_name(here.dtype)} here"


def _step(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], dtype: torch.dtype, state: dict[str, Any]
) -> dict[str, Any]:
    """Takes a step on the CPU, in a copy of the optimizer; returns the states after it."""
    tensor = torch.zeros(1, dtype=dtype)
    tensor.grad = torch.zeros(1, dtype=dtype)
    options = {key: value.cpu().clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
    copy = stand_in(optimizer, [options | {"params": [tensor], "capturable": False}])
    copy.state = defaultdict(dict, {tensor: dict(state)} if state else {})
    raw_step(copy)
    return copy.state[tensor]
