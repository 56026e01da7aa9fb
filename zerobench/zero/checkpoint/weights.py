"""Loads weights alone, such as pretrained ones, from safetensors or a checkpoint into an existing engine.

Each rank reads the elements that it keeps, in the file's dtype, into its masters and its parts of frozen parameters;
then parameters are refreshed from the masters, as after `load`. Optimizer states, options and loss scale are unchanged;
a delayed update (optim/delayed_update.py) is dropped, since it belongs to the replaced weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from .. import labels
from ..strides import MemoryOrder
from .around_load import before_load
from .consensus import ranks_of
from .contents import sharded_frozen, whole_frozen
from .weight_files import StoredTensor, WeightFiles, find_weights

if TYPE_CHECKING:
    from ..strategy import Strategy


class Keys(NamedTuple):
    """Names that the file lacks and names that the module lacks, as `module.load_state_dict` returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_weights(engine: Strategy, path: str | os.PathLike[str], strict: bool) -> tuple[Keys, dict[str, Any]]:
    """Loads weights, as `Strategy.load_weights` specifies; returns a checkpoint's user state too."""
    engine.settle()
    ranks, found = ranks_of(engine), Path(path).absolute()
    files = ranks.agree(lambda: find_weights(found, slice(ranks.rank, None, ranks.size)))
    keys, chosen = ranks.agree(lambda: _match(engine, files, strict))
    engine.zero_grad()
    before_load(engine, engine.schedule.describe_pending().get("steps", 0))
    with torch.no_grad(), labels.collective("control"):
        ranks.agree(lambda: _read(engine, chosen))
    engine.after_load()
    return keys, files.user_state


def _match(engine: Strategy, files: WeightFiles, strict: bool) -> tuple[Keys, dict[torch.Tensor, StoredTensor]]:
    """Chooses the file's tensor for each of the module's. Raises ValueError where they do not fit."""
    state = engine.module.state_dict(keep_vars=True)
    names: dict[torch.Tensor, list[str]] = {}
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor):  # such files hold no extra state of modules
            names.setdefault(tensor, []).append(name)
    chosen: dict[torch.Tensor, StoredTensor] = {}
    missing: list[str] = []
    for tensor, own in names.items():
        there = [name for name in own if name in files.tensors]
        if not there:
            missing += own
            continue
        name = there[0]
        chosen[tensor] = stored = files.tensors[name]
        if stored.shape != tuple(tensor.shape):
            raise ValueError(f"{files.path}: {name} has shape {list(stored.shape)} there, {list(tensor.shape)} here")
        if stored.dtype != tensor.dtype and not (_is_plain_float(stored.dtype) and _is_plain_float(tensor.dtype)):
            raise ValueError(f"{files.path}: {name} has dtype {stored.dtype} there, {tensor.dtype} here")
    keys = Keys(missing, [name for name in files.tensors if name not in state])
    for found, words in zip(keys, ("lacks {}, which the module has", "has {}, which the module lacks"), strict=True):
        if strict and found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise ValueError(f"{files.path}: it {words.format(found[0] + more)}; strict=False loads what both have")
    return keys, chosen


def _read(engine: Strategy, chosen: dict[torch.Tensor, StoredTensor]) -> None:
    for whole, order, start, place in _places(engine):
        if whole in chosen and place.numel():
            place.copy_(chosen[whole].part(order, start, start + place.numel()))
    for buffer in engine.module.buffers():
        if buffer in chosen and buffer.numel():
            row_major = MemoryOrder.from_dims(buffer.shape, range(buffer.dim()))
            buffer.copy_(chosen[buffer].part(row_major, 0, buffer.numel()).view(buffer.shape))


def _places(engine: Strategy) -> Iterator[tuple[nn.Parameter, MemoryOrder, int, torch.Tensor]]:
    """Yields (parameter, its memory order, first element, destination) for this rank's parts of all parameters."""
    for segment in engine.segments:
        parameter = engine.trainable[segment.segment.parameter]
        yield parameter, engine.orders[parameter], segment.segment.start, segment.tensor.view(-1)
    for _, parameter, start, chunk in sharded_frozen(engine):
        yield parameter, engine.orders[parameter], start, chunk
    for parameter in whole_frozen(engine).values():
        yield parameter, engine.orders[parameter], 0, engine.orders[parameter].flatten(parameter)


def _is_plain_float(dtype: torch.dtype) -> bool:
    return dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
