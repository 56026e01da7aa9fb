"""The tensors of a checkpoint: what saving reads from an engine, and what loading fills.

[Note: the tensors of a checkpoint]
    master.<parameter>              what the optimizer updates; each rank's segments are its chunks
    optimizer.<parameter>.<state>   states of the parameter's size, in the same chunks
    frozen.<parameter>              parameters that are not trained: the stage's shards, else whole from one rank
    pending.<parameter>             gradients of a delayed update (optim/delayed_update.py), in the same chunks
    buffer.<name>                   the module's persistent buffers, from rank 0

All are flat. A parameter's elements are in the order of its memory (see metadata.py), and a chunk is identified by its
first element in the whole parameter, so it does not depend on stage, N or bucket size. Tied parameters are saved once,
under their first name. If the loading engine has a parameter in another memory order, each rank reads all of it and
picks its elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .. import labels
from ..engine import ShardedEngine
from ..low_bit import block_of
from ..optim.segments import OptimizerSegment
from ..precision import flat_of
from .around_load import put
from .metadata import IMPLEMENTATION, buffers_of, decode, is_elements, saved_order
from .operations import Flat
from .safetensors import DTYPES


def tensors_of(engine: ShardedEngine, copy: bool) -> dict[str, Flat]:
    """Returns this rank's part of the state: the live tensors, or with `copy` CPU copies, so that training can go on.

    Only the first of several replicas has a part; the others return an empty dict.
    """
    if engine.comm.replica > 0:
        return {}
    flats: dict[str, Flat] = {}
    for segment in engine.segments:
        name, start = engine.names[segment.segment.parameter], segment.segment.start
        whole = engine.trainable[segment.segment.parameter]
        _put(flats, f"master.{name}", whole, start, segment.tensor)
        for key, value in engine.optimizer.state.get(segment.tensor, {}).items():
            block = block_of(engine.optimizer, key)
            if isinstance(value, torch.Tensor) and (block > 1 or value.shape == segment.tensor.shape):
                _put(flats, f"optimizer.{name}.{key}", whole, start, value, block)
    for segment, gradient in engine.schedule.pending_gradients():
        index = segment.segment.parameter
        _put(flats, f"pending.{engine.names[index]}", engine.trainable[index], segment.segment.start, gradient)
    for name, parameter, start, chunk in sharded_frozen(engine):
        _put(flats, f"frozen.{name}", parameter, start, chunk)
    for number, (name, parameter) in enumerate(whole_frozen(engine).items()):
        if number % engine.comm.size == engine.comm.rank:
            _put(flats, f"frozen.{name}", parameter, 0, engine.orders[parameter].flatten(parameter))
    if engine.comm.rank == 0:
        for name, buffer in buffers_of(engine.module).items():
            _put(flats, f"buffer.{name}", buffer, 0, buffer.reshape(-1))
    if copy:
        for flat in flats.values():
            flat.chunks = {start: chunk.to("cpu", copy=True) for start, chunk in flat.chunks.items()}
    return flats


class Targets:
    """The tensors that a checkpoint with these facts is read into, and the steps that remain once they are filled."""

    def __init__(self, engine: ShardedEngine, facts: Mapping[str, Any], pending: Mapping[str, torch.dtype]) -> None:
        """Allocates them. `pending`: parameters whose gradients are in the checkpoint -> the gradients' dtype."""
        self.engine = engine
        self.facts = facts
        self._pending: dict[OptimizerSegment, torch.Tensor] = {}
        self.flats: dict[str, Flat] = {}
        self._pending_dtypes = pending
        self._states: list[dict[str, Any]] = []  # a segment's new optimizer state, in the order of engine.segments
        self._late: list[tuple[torch.Tensor, Callable[[], torch.Tensor]]] = []  # not readable in place; their values
        for segment in engine.segments:
            self._add_segment(segment)
        for name, parameter, start, chunk in sharded_frozen(engine):
            self._add("frozen.{}", name, parameter, start, chunk)
        for name, parameter in whole_frozen(engine).items():
            self._add("frozen.{}", name, parameter, 0, engine.orders[parameter].flatten(parameter))
        for name, buffer in buffers_of(engine.module).items():
            self._add_buffer(f"buffer.{name}", buffer)

    def _add(
        self, key: str, name: str, parameter: nn.Parameter, start: int, chunk: torch.Tensor, block: int = 1
    ) -> None:  # fmt: skip
        """Registers `chunk` to be filled from element `start` of the flat tensor `key`, whose {} is the parameter name.

        `block`: the parameter's elements per element of `chunk`.
        """
        own, saved = self.engine.orders[parameter], saved_order(self.facts, name)
        if own.agrees(saved):
            _put(self.flats, key.format(name), parameter, start, chunk, block)
            return
        if key.format(name) not in self.flats:
            _put(self.flats, key.format(name), parameter, 0, torch.empty(parameter.numel(), dtype=chunk.dtype))
        whole, stop = self.flats[key.format(name)].chunks[0], start + chunk.numel()
        self._late.append((flat_of(chunk), lambda: own.flatten(saved.view(whole))[start:stop]))

    def _add_segment(self, segment: OptimizerSegment) -> None:
        index, start = segment.segment.parameter, segment.segment.start
        name, whole = self.engine.names[index], self.engine.trainable[index]
        self._add("master.{}", name, whole, start, segment.tensor)
        old = self.engine.optimizer.state.get(segment.tensor, {})
        new: dict[str, Any] = {}
        for key, value in self.facts["optimizer"]["states"].get(name, {}).items():
            if is_elements(value):
                block = value.get("block", 1)
                new[key] = _tensor_for(segment.tensor, DTYPES[value["elements"]], old.get(key), block)
                labels.label(new[key], labels.OPTIMIZER, f"{name} {key}")
                self._add(f"optimizer.{{}}.{key}", name, whole, start, new[key], block)
            else:
                new[key] = decode(value)
        self._states.append(new)
        if name in self._pending_dtypes:
            gradient = torch.empty(
                segment.segment.numel, dtype=self._pending_dtypes[name], device=segment.tensor.device
            )
            self._pending[segment] = labels.label(gradient, labels.GRADIENTS, f"{name} pending", tier=segment.tier)
            self._add("pending.{}", name, whole, start, gradient)

    def _add_buffer(self, name: str, tensor: torch.Tensor) -> None:
        flat = tensor.detach()
        if not tensor.is_contiguous():
            flat = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            self._late.append((tensor, lambda: flat))
        _put(self.flats, name, tensor, 0, flat.view(-1))

    def finish(self) -> None:
        """Restores the rest of the state once the tensors are filled, then refreshes parameters from the masters."""
        engine, optimizer = self.engine, self.engine.optimizer
        for tensor, values in self._late:
            put(tensor, values())
        group_of = {id(tensor): group for group in optimizer.param_groups for tensor in group["params"]}
        for segment, state in zip(engine.segments, self._states, strict=True):
            group = group_of.get(id(segment.tensor), {})
            optimizer.state.pop(segment.tensor, None)
            if state:
                optimizer.state[segment.tensor] = {
                    key: _placed(key, value, segment.tensor, group) for key, value in state.items()
                }
        for group, options in zip(optimizer.param_groups, self.facts["optimizer"]["options"], strict=True):
            _set_options(group, options)
        engine.load_extra_state(self.facts["extra"])
        if self._pending:
            with torch.no_grad():
                engine.schedule.restore_pending(self._pending, self.facts["extra"]["pending"])
        engine.after_load()


def _put(
    flats: dict[str, Flat], name: str, whole: torch.Tensor, start: int, chunk: torch.Tensor, block: int = 1
) -> None:  # fmt: skip
    if chunk.numel():
        flat = flats.setdefault(name, Flat(-(-whole.numel() // block), chunk.dtype, {}))
        flat.chunks[start // block] = flat_of(chunk)


def sharded_frozen(engine: ShardedEngine) -> Iterator[tuple[str, nn.Parameter, int, torch.Tensor]]:
    """Yields (name, parameter, first element, chunk) of the frozen parameters that the stage shards."""
    names = {p: name for name, p in engine.module.named_parameters()}
    frozen = set(engine.frozen)
    for unit in engine.holders():
        low = unit.start
        for piece, parameter in zip(unit.layout.pieces, engine.parameters_of(unit), strict=True):
            first, last = max(piece.offset, low), min(piece.offset + piece.numel, low + unit.shard_numel)
            if parameter in frozen and first < last:
                chunk = unit.parameter_shard.narrow(0, first - low, last - first)
                yield names[parameter], parameter, first - piece.offset + piece.start, chunk


def whole_frozen(engine: ShardedEngine) -> dict[str, nn.Parameter]:
    """Returns the frozen parameters that every rank holds whole, by name."""
    held = {p for unit in engine.holders() for p in engine.parameters_of(unit)}
    frozen = set(engine.frozen) - held
    return {name: p for name, p in engine.module.named_parameters() if p in frozen}


def _tensor_for(like: torch.Tensor, dtype: torch.dtype, old: Any, block: int) -> torch.Tensor:
    shape = like.shape if block == 1 else (-(-like.numel() // block),)
    if isinstance(old, torch.Tensor) and old.shape == shape and old.dtype == dtype:
        return old
    if block == 1:
        return torch.empty_like(like, dtype=dtype)
    return torch.empty(shape, dtype=dtype, device=like.device)


def _placed(key: str, value: Any, tensor: torch.Tensor, group: Mapping[str, Any]) -> Any:
    """Moves a scalar state to the device that torch expects: `step` on the CPU, unless capturable or fused."""
    if not isinstance(value, torch.Tensor) or value.dim():
        return value
    if key != "step":
        return value.to(tensor.device)
    if group.get("capturable") or group.get("fused"):
        return value.to(tensor.device, torch.float32)
    return value


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, encoded in options.items():
        value = decode(encoded)
        if key in IMPLEMENTATION:
            continue
        if isinstance(group.get(key), torch.Tensor):  # a tensor learning rate: in place, other references see it
            group[key].fill_(value)
        else:
            group[key] = value
