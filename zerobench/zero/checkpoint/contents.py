"""The tensors of a checkpoint: what saving reads from an engine, and what loading fills.

[Note: the tensors of a checkpoint]
    master.<parameter>              what the optimizer updates; each rank's segments are its chunks
    optimizer.<parameter>.<state>   states of the parameter's size, in the same chunks
    frozen.<parameter>              parameters that are not trained: the stage's shards, else whole from one rank
    pending.<parameter>             gradients of a delayed update (optim/delayed_update.py), in the same chunks
    buffer.<name>                   the module's persistent buffers, from rank 0

All are flat. A parameter's elements are in the order of its memory (see facts.py), and a chunk is identified by its
first element in the whole parameter, so it does not depend on stage, N or bucket size. Tied parameters are saved once,
under their first name. If the loading engine has a parameter in another memory order, each rank reads all of it and
picks its elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import labels
from ..engine import ShardedEngine
from ..layout import MemoryOrder
from ..low_bit import block_of
from ..optim.segments import OptimizerSegment
from ..precision import flat_of
from .consensus import ranks_of
from .facts import IMPLEMENTATION, buffers_of, decode, is_blocks, is_elements, states_of
from .safetensors import DTYPES, row_major
from .storage import Checkpoint, Chunks


def tensors_of(engine: ShardedEngine, copy: bool, exclude_frozen: bool = False) -> Chunks:
    """Returns this rank's part of the state: the live tensors, or with `copy` CPU copies, so that training can go on.
    `exclude_frozen`: without frozen parameters.

    Only the first of several replicas has a part; the others return an empty dict.
    """
    flats: Chunks = {}
    if engine.comm.replica > 0:
        return flats

    def add(name: str, start: int, chunk: torch.Tensor) -> None:
        if chunk.numel():
            flats.setdefault(name, {})[start] = flat_of(chunk).to("cpu", copy=True) if copy else flat_of(chunk)

    saved_by = {f"frozen.{name}": number % engine.comm.size for number, name in enumerate(whole_frozen(engine))}
    for part in parts_of(engine):
        if exclude_frozen and part.name.startswith("frozen."):
            continue
        if saved_by.get(part.name, engine.comm.rank) == engine.comm.rank:
            add(part.name, part.start, part.tensor)
    for segment in engine.segments:
        name, start = engine.names[segment.segment.parameter], segment.segment.start
        for key, value in engine.optimizer.state.get(segment.tensor, {}).items():
            block = block_of(engine.optimizer, key)
            if isinstance(value, torch.Tensor) and (block > 1 or value.shape == segment.tensor.shape):
                add(f"optimizer.{name}.{key}", start // block, value)
    for segment, gradient in engine.schedule.pending_gradients():
        add(f"pending.{engine.names[segment.segment.parameter]}", segment.segment.start, gradient)
    if engine.comm.rank == 0:
        for name, buffer in buffers_of(engine.module).items():
            add(f"buffer.{name}", 0, buffer.reshape(-1).contiguous())
    return flats


class Part(NamedTuple):
    """This rank's part of a parameter: the elements from `start` on are in `tensor`, (numel,).

    `name`: of the flat tensor, as in the note
    """

    name: str
    parameter: nn.Parameter
    start: int
    tensor: torch.Tensor


def parts_of(engine: ShardedEngine) -> Iterator[Part]:
    """Yields this rank's parts of all parameters: masters, frozen ones that the stage shards, frozen whole ones."""
    for segment in engine.segments:
        number = segment.segment.parameter
        name, master = f"master.{engine.names[number]}", flat_of(segment.tensor)
        yield Part(name, engine.trainable[number], segment.segment.start, master)
    names = {p: name for name, p in engine.module.named_parameters()}
    frozen = set(engine.frozen)
    for unit in engine.holders():
        low = unit.start
        for piece, parameter in zip(unit.layout.pieces, engine.parameters_of(unit), strict=True):
            first, last = max(piece.offset, low), min(piece.offset + piece.numel, low + unit.shard_numel)
            if parameter in frozen and first < last:
                shard = unit.parameter_shard.narrow(0, first - low, last - first).view(parameter.dtype)
                start = (first - piece.offset) * unit.dtypes.parameters.itemsize // parameter.element_size()  # of bytes
                yield Part(f"frozen.{names[parameter]}", parameter, start, shard)
    for name, parameter in whole_frozen(engine).items():
        yield Part(f"frozen.{name}", parameter, 0, engine.orders[parameter].flatten(parameter))


def whole_state(engine: ShardedEngine, number: int) -> dict[str, Any]:
    """Returns the optimizer's whole state of a parameter, equal on all ranks; collective."""
    name, parameter, optimizer = engine.names[number], engine.trainable[number], engine.optimizer
    segments = [one for one in engine.segments if one.segment.parameter == number]
    engine.comm.meet(f"full_optimizer_state, {name}")
    with labels.collective("control"):
        facts = ranks_of(engine).each(lambda: [states_of(name, one, optimizer) for one in segments[:1]])
    state = {key: fact for rank in facts for one in rank for key, fact in one.items()}
    for key, fact in state.items():
        if not is_elements(fact):
            state[key] = decode(fact)
            continue
        block = fact.get("block", 1)
        flat = torch.zeros(-(-parameter.numel() // block), dtype=DTYPES[fact["elements"]], device=parameter.device)
        for one in segments:
            part, start = flat_of(optimizer.state[one.tensor][key]), one.segment.start // block
            flat[start : start + part.numel()].copy_(part)
        engine.comm.sum(flat.view(torch.uint8))  # all other ranks' bytes are zero
        state[key] = flat if block > 1 else engine.orders[parameter].view(flat)
    return state


def tensors_in(module: nn.Module) -> int:
    """Returns the number of tensors of a module's state."""
    return sum(1 for _ in module.parameters()) + sum(1 for _ in module.buffers())


def whole_frozen(engine: ShardedEngine) -> dict[str, nn.Parameter]:
    """Returns the frozen parameters that every rank holds whole, by name."""
    held = {p for unit in engine.holders() for p in engine.parameters_of(unit)}
    frozen = set(engine.frozen) - held
    return {name: p for name, p in engine.module.named_parameters() if p in frozen}


def before_load(engine: ShardedEngine, steps: int = 0) -> None:
    """Drops pending updates and waits for transfers, before masters are overwritten. `steps`: taken so far."""
    engine.schedule.restart(steps)
    engine.placement.wait()


def put(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copies `values` to `target`. A buffer that was made in inference mode can be written to only there."""
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        target.copy_(values)


class CheckpointLoad:
    """The load of a checkpoint into an engine: this rank's tensors, which are read, and then everything else."""

    def __init__(self, engine: ShardedEngine, saved: Checkpoint) -> None:
        """Allocates the tensors that the engine does not have yet."""
        self._engine, self._saved, self.files = engine, saved, saved.files
        known = saved.facts["parameters"]  # others keep their values and states
        self._segments = [one for one in engine.segments if engine.names[one.segment.parameter] in known]
        self._pending: dict[OptimizerSegment, torch.Tensor] = {}
        self._states = [self._new_state(segment) for segment in self._segments]
        self._options = [
            {key: decode(value) for key, value in options.items() if key not in IMPLEMENTATION}
            for options in saved.facts["optimizer"]["options"]
        ]

    def _new_state(self, segment: OptimizerSegment) -> dict[str, Any]:
        name = self._engine.names[segment.segment.parameter]
        old = self._engine.optimizer.state.get(segment.tensor, {})
        new: dict[str, Any] = {}
        for key, value in self._saved.facts["optimizer"]["states"].get(name, {}).items():
            if not is_elements(value):
                new[key] = decode(value)
                continue
            new[key], dtype = old.get(key), DTYPES[value["elements"]]
            block = value.get("block", 1)
            shape = segment.tensor.shape if block == 1 else (-(-segment.tensor.numel() // block),)
            if not isinstance(new[key], torch.Tensor) or new[key].shape != shape or new[key].dtype != dtype:
                like = segment.tensor
                new[key] = torch.empty_like(like, dtype=dtype) if block == 1 else like.new_empty(shape, dtype=dtype)
            labels.label(new[key], labels.OPTIMIZER, f"{name} {key}", tier=segment.tier)
        if f"pending.{name}" in self._saved.tensors:
            dtype = self._saved.tensors[f"pending.{name}"].dtype
            gradient = torch.empty(segment.segment.numel, dtype=dtype, device=segment.tensor.device)
            self._pending[segment] = labels.label(gradient, labels.GRADIENTS, f"{name} pending", tier=segment.tier)
        return new

    def read(self) -> None:
        """Reads this rank's tensors."""
        engine = self._engine
        for part in parts_of(engine):
            self._read(part.name, engine.orders[part.parameter], part.start, part.tensor)
        for segment, state in zip(self._segments, self._states, strict=True):
            number, start = segment.segment.parameter, segment.segment.start
            name, order = engine.names[number], engine.orders[engine.trainable[number]]
            for key, value in state.items():
                saved = self._saved.facts["optimizer"]["states"][name][key]
                if is_blocks(saved):
                    whole = row_major([-(-prod(order.shape) // saved["block"])])
                    self._read(f"optimizer.{name}.{key}", whole, start // saved["block"], value)
                elif is_elements(saved):
                    self._read(f"optimizer.{name}.{key}", order, start, flat_of(value))
            if segment in self._pending:
                self._read(f"pending.{name}", order, start, self._pending[segment])
        for name, buffer in buffers_of(engine.module).items():
            self._read(f"buffer.{name}", row_major(buffer.shape), 0, buffer.detach())

    def _read(self, key: str, order: MemoryOrder, start: int, target: torch.Tensor) -> None:
        """Fills `target` with elements of the tensor `key` from `start` on, counted in `order`."""
        if target.numel() and key in self._saved.tensors:
            put(target, self._saved.tensors[key].part(order, start, start + target.numel()).view(target.shape))

    def finish(self) -> dict[str, Any]:
        """Restores the rest of the state once the tensors are filled, then refreshes parameters from the masters.

        Returns the user's state.
        """
        engine, optimizer, facts = self._engine, self._engine.optimizer, self._saved.facts
        group_of = {id(tensor): group for group in optimizer.param_groups for tensor in group["params"]}
        for segment, state in zip(self._segments, self._states, strict=True):
            group = group_of.get(id(segment.tensor), {})
            optimizer.state.pop(segment.tensor, None)
            if state:
                optimizer.state[segment.tensor] = {
                    key: _placed(key, value, segment.tensor, group) for key, value in state.items()
                }
        for group, options in zip(optimizer.param_groups, self._options, strict=True):
            for key, value in options.items():
                if isinstance(
                    group.get(key), torch.Tensor
                ):  # a tensor learning rate: in place, other references see it
                    group[key].fill_(value)
                else:
                    group[key] = value
        engine.load_extra_state(facts["extra"])
        if self._pending:
            with torch.no_grad():
                engine.schedule.restore_pending(self._pending, facts["extra"]["pending"])
        engine.after_load()
        user: dict[str, Any] = facts["user"]
        return user


def _placed(key: str, value: Any, tensor: torch.Tensor, group: Mapping[str, Any]) -> Any:
    """Moves a scalar state to the device that torch expects: `step` on the CPU, unless capturable or fused."""
    if not isinstance(value, torch.Tensor) or value.dim():
        return value
    if key != "step":
        return value.to(tensor.device)
    if group.get("capturable") or group.get("fused"):
        return value.to(tensor.device, torch.float32)
    return value
