"""The content of a checkpoint: tensors, and facts, the JSON next to them. Saving reads both from an engine; loading
compares the facts with an engine's, and fills its tensors.

[Note: the tensors of a checkpoint]
    master.<parameter>              what the optimizer updates; each rank's segments are its chunks
    optimizer.<parameter>.<state>   states of the parameter's size, in the same chunks
    frozen.<parameter>              parameters that are not trained: the stage's shards, else whole from one rank
    pending.<parameter>             gradients of a delayed update (optim/delayed_update.py), in the same chunks
    buffer.<name>                   the module's persistent buffers, from rank 0

All are flat. A parameter's elements are in the order of its memory (see the facts), and a chunk is identified by its
first element in the whole parameter, so it does not depend on stage, N or bucket size. Tied parameters are saved once,
under their first name. If the loading engine has a parameter in another memory order, each rank reads all of it and
picks its elements.

[Note: the facts]
    stage, world_size, torch    how it was saved; the loading engine may differ in stage and N
    parameters                  {name: {"shape": [2, 3], "dtype": "float32", "trainable": true}}, tied ones once; with
                                "order": [1, 0], the dimensions from the slowest to the fastest, unless row-major: the
                                order of the elements in every flat tensor of the parameter
    buffers                     {name: {"shape": [], "dtype": "int64"}}
    optimizer                   "class"    its name
                                "options"  [{"lr": 0.1, ...}, ...], one per group
                                "groups"   {name: number of the parameter's group, or null}
                                "states"   {name: {state: value}}; {"elements": dtype} denotes a tensor of the
                                           parameter's size, and with "block": 256 one with an element for each
                                           256; parameters that were never updated have none
    extra, user                 further values of the engine and of the caller

A rank knows the groups and states of the parameters of its own segments; `merge` combines those from all ranks. Before
a load, `problems_of_step` tests on tensors of one element whether a step of the optimizer would raise with the
checkpoint's options and states.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn, optim

from .. import labels
from ..engine import ShardedEngine
from ..layout import MemoryOrder
from ..low_bit import block_numel, state_block
from ..optim.segments import ELEMENTWISE, OptimizerSegment
from ..optim.step_by_tiles import optimizer_over, raw_step
from ..precision import dtype_name, flattened
from . import storage


def saved_tensors(engine: ShardedEngine, copy: bool, exclude_frozen: bool = False) -> storage.Chunks:
    """Returns this rank's part of the state: the live tensors, or with `copy` CPU copies, so that training can go on.
    `exclude_frozen`: without frozen parameters. Only the first of several replicas has a part; the others return an
    empty dict.
    """
    flats: storage.Chunks = {}
    if engine.comm.replica > 0:
        return flats

    def add(part: Part) -> None:
        if part.tensor.numel():
            chunk = flattened(part.tensor)
            flats.setdefault(part.name, {})[part.start] = chunk.to("cpu", copy=True) if copy else chunk

    saved_by = {f"frozen.{name}": number % engine.comm.size for number, name in enumerate(whole_frozen(engine))}
    for part in parts_of(engine):
        if exclude_frozen and part.name.startswith("frozen."):
            continue
        if saved_by.get(part.name, engine.comm.rank) == engine.comm.rank:
            add(part)
    for segment in engine.segments:
        for part in _state_parts(engine, segment, engine.optimizer.state.get(segment.tensor, {})):
            add(part)
    for segment, gradient in engine.update.pending_gradients():
        add(_part(engine, segment, "pending", gradient))
    if engine.comm.rank == 0:
        for name, buffer in buffers_of(engine.module).items():
            add(Part(f"buffer.{name}", buffer, storage.row_major(*buffer.shape), 0, buffer.reshape(-1).contiguous()))
    return flats


class Part(NamedTuple):
    """This rank's part of a flat tensor (see the note): elements of a parameter from `start` on, in `order`."""

    name: str
    parameter: torch.Tensor
    order: MemoryOrder
    start: int
    tensor: torch.Tensor


def _part(engine: ShardedEngine, segment: OptimizerSegment, kind: str, tensor: torch.Tensor, key: str = "") -> Part:
    """Returns `tensor`, which has an element for each of a segment's, as a part of the flat tensor of this kind."""
    number, parameter = segment.span.parameter, engine.trainable[segment.span.parameter]
    name = f"{kind}.{engine.names[number]}{key}"
    return Part(name, parameter, engine.orders[parameter], segment.span.start, tensor)


def parts_of(engine: ShardedEngine) -> Iterator[Part]:
    """Yields this rank's parts of all parameters: masters, frozen ones that the stage shards, frozen whole ones."""
    for segment in engine.segments:
        yield _part(engine, segment, "master", flattened(segment.tensor))
    names = {p: name for name, p in engine.module.named_parameters()}
    frozen = set(engine.frozen)
    for unit in engine.gathered_units():
        low = unit.start
        for piece, parameter in zip(unit.layout.pieces, engine.parameters_of(unit), strict=True):
            first, last = max(piece.offset, low), min(piece.offset + piece.numel, low + unit.shard_numel)
            if parameter in frozen and first < last:
                shard = unit.parameter_shard.narrow(0, first - low, last - first).view(parameter.dtype)
                start = (first - piece.offset) * unit.dtypes.parameters.itemsize // parameter.element_size()  # of bytes
                yield Part(f"frozen.{names[parameter]}", parameter, engine.orders[parameter], start, shard)
    for name, parameter in whole_frozen(engine).items():
        order = engine.orders[parameter]
        yield Part(f"frozen.{name}", parameter, order, 0, order.flatten(parameter))


def _state_parts(engine: ShardedEngine, segment: OptimizerSegment, state: Mapping[str, Any]) -> Iterator[Part]:
    """Yields the parts of a segment's states that have an element for each of the parameter, or for each block."""
    for key, value in state.items():
        block = state_block(engine.optimizer, key)
        if block > 1:
            part = _part(engine, segment, "optimizer", value, f".{key}")
            blocks = storage.row_major(-(-prod(part.order.shape) // block))
            yield part._replace(order=blocks, start=part.start // block)
        elif isinstance(value, torch.Tensor) and value.shape == segment.tensor.shape:
            yield _part(engine, segment, "optimizer", flattened(value), f".{key}")


def tensors_in(module: nn.Module) -> int:
    """Returns the number of tensors of a module's state."""
    return sum(1 for _ in module.parameters()) + sum(1 for _ in module.buffers())


def whole_frozen(engine: ShardedEngine) -> dict[str, nn.Parameter]:
    """Returns the frozen parameters that every rank holds whole, by name."""
    held = {p for unit in engine.gathered_units() for p in engine.parameters_of(unit)}
    frozen = set(engine.frozen) - held
    return {name: p for name, p in engine.module.named_parameters() if p in frozen}


def before_load(engine: ShardedEngine, steps: int = 0) -> None:
    """Drops pending updates and waits for transfers, before masters are overwritten. `steps`: taken so far."""
    engine.update.restart(steps)
    engine.placement.wait()


def put(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copies `values` to `target`. A buffer that was made in inference mode can be written to only there."""
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        target.copy_(values)


# -- facts ---------------------------------------------------------------------------------------------------------


IMPLEMENTATION = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Options that choose an implementation of the update and do not change its result: each engine keeps its own."""


def facts_of(engine: ShardedEngine, user: Mapping[str, Any], exclude_frozen: bool = False) -> dict[str, Any]:
    """Returns this rank's facts. Raises ValueError for a value that JSON cannot hold."""
    number_of = {id(p): number for number, group in enumerate(engine.optimizer.param_groups) for p in group["params"]}
    groups: dict[str, int] = {}
    states: dict[str, Any] = {}
    for segment in engine.segments:
        name = engine.names[segment.span.parameter]
        _add(groups, name, number_of.get(id(segment.tensor)), "its group")
        _add(states, name, states_of(name, segment, engine.optimizer), "its state")
    trainable = set(engine.trainable)
    # a copy: the caller may change its lists and dicts while a thread writes them
    text, most = json.dumps(check_json(dict(user), "user_state")), storage.MOST_USER_BYTES
    if len(text) > most:
        raise ValueError(
            f"user_state: it has {len(text):,} bytes as JSON; an index holds at most {most:,}; write it into a file of"
            " its own"
        )
    return {
        "stage": engine.stage,
        "world_size": engine.comm.size,
        "torch": torch.__version__,
        "parameters": {
            name: _kind(p)
            | ({} if engine.orders[p].is_row_major else {"order": list(engine.orders[p].dims)})
            | {"trainable": p in trainable}
            for name, p in engine.module.named_parameters()
            if p in engine.orders and (p in trainable or not exclude_frozen)
        },
        "buffers": {name: _kind(buffer) for name, buffer in buffers_of(engine.module).items()},
        "optimizer": {
            "class": type(engine.optimizer).__name__,
            "options": [
                {
                    key: encode(value, f"optimizer: its option {key}")
                    for key, value in group.items()
                    if key not in IMPLEMENTATION
                }
                for group in engine.optimizer.param_groups
            ],
            "groups": groups,
            "states": states,
        },
        "extra": check_json(engine.extra_state(), "extra state"),
        "user": json.loads(text),
    }


def merge(facts_of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns rank 0's facts with the groups and states of all ranks. Raises ValueError if they disagree."""
    merged = facts_of_ranks[0]
    for facts in facts_of_ranks[1:]:
        for key, what in (("groups", "its group"), ("states", "its state")):
            for name, value in facts["optimizer"][key].items():
                _add(merged["optimizer"][key], name, value, what)
    return merged


def _add(values: dict[str, Any], name: str, value: Any, what: str) -> None:
    if values.setdefault(name, value) != value:
        raise ValueError(f"optimizer: {what} for {name} is {values[name]} in one place and {value} in another")


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the persistent buffers, by name. Raises ValueError for a module's extra state."""
    state = module.state_dict(keep_vars=True)
    for name in state:
        if name.rpartition(".")[2] == "_extra_state":
            raise ValueError(f"{name}: a checkpoint does not hold a module's extra state; keep it in user_state")
    return {name: buffer for name, buffer in module.named_buffers() if name in state}


def check_json(value: Any, where: str) -> Any:
    """Returns `value`. Raises ValueError if JSON would change it (except a tuple, which may become a list)."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where}: its key {key!r} is not a string, the only kind of key in JSON")
            check_json(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            check_json(item, f"{where}[{number}]")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise ValueError(f"{where}: it is a {type(value).__name__}; use JSON's dicts, lists, strings, numbers and None")
    return value


def encode(value: Any, where: str) -> Any:
    """Encodes an option or a scalar state as JSON; `decode` restores its type and bits."""
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return {"tensor": value.item(), "dtype": dtype_name(value.dtype)}
    if isinstance(value, tuple):
        return {"tuple": [encode(item, where) for item in value]}
    if isinstance(value, list):
        return [encode(item, where) for item in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise ValueError(f"{where}: it is a {type(value).__name__}, which a checkpoint does not hold")


def decode(value: Any) -> Any:
    """Restores the argument of `encode`; tensors are on the CPU."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if isinstance(value, dict):
        if "tuple" in value:
            return tuple(decode(item) for item in value["tuple"])
        try:
            return torch.tensor(value["tensor"], dtype=storage.DTYPES[value["dtype"]]).reshape(())
        except (RuntimeError, ValueError) as error:  # torch's words for what is no number, or a too large one
            raise TypeError(str(error)) from None
    return value


def states_of(name: str, segment: OptimizerSegment, optimizer: optim.Optimizer) -> dict[str, Any]:
    """Returns the states of a segment as facts, by key. Raises ValueError for one that a checkpoint cannot hold."""

    def fact(key: str, value: Any) -> Any:
        if (block := state_block(optimizer, key)) > 1:
            return {"elements": dtype_name(value.dtype), "block": block}
        if isinstance(value, torch.Tensor) and value.shape == segment.tensor.shape:
            return {"elements": dtype_name(value.dtype)}
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            raise ValueError(f"optimizer: its state {key} of {name} is neither a scalar nor of the parameter's shape")
        return encode(value, f"optimizer: its state {key} of {name}")

    return {key: fact(key, value) for key, value in optimizer.state.get(segment.tensor, {}).items()}


def _kind(tensor: torch.Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype)}


# -- before a load -------------------------------------------------------------------------------------------------


def differences(
    engine: ShardedEngine, facts: Mapping[str, Any], tensors: Mapping[str, storage.StoredTensor]
) -> Iterator[str]:
    """Yields why `engine` cannot load the tensors and options that it shares with a checkpoint, most specific first."""
    current = facts_of(engine, {})
    # 1 parameters and buffers: shape, training, dtype
    for kind in ("parameters", "buffers"):
        for name, saved in facts[kind].items():
            if (own := current[kind].get(name)) is None:
                continue
            dtypes = {storage.DTYPES[saved["dtype"]], storage.DTYPES[own["dtype"]]}
            if saved["shape"] != own["shape"]:
                yield f"{name}: its shape is {saved['shape']} in the checkpoint, {own['shape']} here"
            elif saved.get("trainable") != own.get("trainable"):
                there, here = ("trainable" if entry["trainable"] else "frozen" for entry in (saved, own))
                yield f"{name}: it is {there} in the checkpoint, {here} here"
            elif len(dtypes) > 1 and not dtypes <= storage.FLOATS:
                yield f"{name}: its dtype is {saved['dtype']} in the checkpoint, {own['dtype']} here"
    # 2 the optimizer: class and options
    saved, own = facts["optimizer"], current["optimizer"]
    if saved["class"] != own["class"]:
        yield f"optimizer: {saved['class']} in the checkpoint, {own['class']} here"
    yield from _of_options("optimizer", saved["options"], own["options"])
    # 3 the engine's further values, and a pending update
    saved_extra, own_extra = facts["extra"], current["extra"]
    if not _can_replace(saved_extra, own_extra):
        yield f"extra: {saved_extra!r:.60} in the checkpoint cannot stand for {own_extra!r:.60}"
    numbers = {"steps": saved_extra.get("steps", 0)}
    if "loss_scaler" in saved_extra:
        numbers |= {key: saved_extra["loss_scaler"][key] for key in own_extra.get("loss_scaler", {})}
    for key, number in numbers.items():
        if type(number) not in (int, float):
            yield f"extra: {key} is {number!r:.60} in the checkpoint"
    if any(name.startswith("pending.") for name in tensors):
        pending = saved_extra["pending"]
        if not _can_replace(pending["coefficient"], 1.0):
            yield f"extra: the coefficient of its pending update is {pending['coefficient']!r:.60} in the checkpoint"
        yield from _of_options("pending update", pending["options"], own["options"])
    # 4 groups of parameters; blocks of states, and dtypes of masters
    common = facts["parameters"].keys() & current["parameters"].keys()
    for name, number in own["groups"].items():
        if name in common and saved["groups"].get(name) != number:
            yield f"optimizer: {name} is in group {saved['groups'].get(name)} in the checkpoint, in group {number} here"
    for segment in engine.segments:
        name = engine.names[segment.span.parameter]
        if name not in common:
            continue
        agrees = engine.orders[engine.trainable[segment.span.parameter]].agrees(storage.saved_order(facts, name))
        for key, state in saved["states"].get(name, {}).items():
            if storage.is_blocks(state) and state["block"] != (block := block_numel(engine.optimizer)):
                blocks = f"{state['block']} elements in the checkpoint, of {block} here"
                yield f"{name}: its state {key} has blocks of {blocks}"
            if storage.is_blocks(state) and not agrees:
                order = "elements in the parameter's memory order, which is another one here"
                yield f"{name}: its state {key} has blocks of {order}"
        master = tensors.get(f"master.{name}")
        if master and master.dtype != segment.tensor.dtype:
            there, here = dtype_name(master.dtype), dtype_name(segment.tensor.dtype)
            yield f"{name}: the optimizer updates it in {there} in the checkpoint, in {here} here"


def _of_options(what: str, saved: Sequence[Any], own: Sequence[Any]) -> Iterator[str]:
    if len(saved) != len(own):
        yield f"{what}: {len(saved)} parameter groups in the checkpoint, {len(own)} here"
    for number, (saved_group, own_group) in enumerate(zip(saved, own, strict=False)):
        for key in sorted(own_group.keys() & saved_group.keys()):
            values = decode(saved_group[key]), decode(own_group[key])
            there, here = (value.item() if isinstance(value, torch.Tensor) else value for value in values)
            is_lost = there is None and here is not None
            if is_lost or not _can_replace(there, here):
                yield f"{what}: {key} of group {number} is {there!r:.60} in the checkpoint and {here!r:.60} here"


def _can_replace(saved: Any, own: Any) -> bool:
    """Returns True if a saved value may replace this engine's `own`; a dict may have other keys."""
    if isinstance(own, dict):
        return isinstance(saved, dict) and all(_can_replace(saved[key], own[key]) for key in own.keys() & saved.keys())
    if own is None or saved is None:
        return True
    if isinstance(own, list | tuple):  # JSON has only lists
        return isinstance(saved, list | tuple) and all(map(_can_replace, saved, own))
    if isinstance(own, bool) or isinstance(saved, bool):  # a bool is an int in Python
        return isinstance(own, bool) and isinstance(saved, bool)
    return isinstance(saved, int | float if isinstance(own, int | float) else type(own))


def names_of_one(engine: ShardedEngine, facts: Mapping[str, Any]) -> Iterator[str]:
    """Yields the parameters and buffers that only the model or only the checkpoint has."""
    current = facts_of(engine, {})
    for kind in ("parameters", "buffers"):
        for name in [name for name in current[kind] if name not in facts[kind]]:
            yield f"{name}: the model has this {kind[:-1]}, the checkpoint has not; strict=False keeps its values"
        for name in [name for name in facts[kind] if name not in current[kind]]:
            yield f"{name}: the checkpoint has this {kind[:-1]}, the model has not; strict=False leaves it out"


def problems_of_step(engine: ShardedEngine, facts: Mapping[str, Any]) -> Iterator[str]:
    """Yields why a step after the load would raise, or would not continue the checkpoint's training: tries one with the
    options of the groups, and one with a pending update's. A user's own optimizer is not tried, for its side effects.
    """
    optimizer, states = engine.optimizer, facts["optimizer"]["states"]
    if type(optimizer) not in ELEMENTWISE:
        return
    group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    pending = facts["extra"].get("pending") or {}
    for options in filter(None, (facts["optimizer"]["options"], pending.get("options"))):
        tried: set[str] = set()
        for segment in engine.segments:
            name, number = engine.names[segment.span.parameter], group_of.get(id(segment.tensor))
            state = states.get(name, {})
            if number is None or (key := json.dumps([number, str(segment.tensor.dtype), state])) in tried:
                continue
            tried.add(key)
            group = optimizer.param_groups[number] | {
                key: decode(value) for key, value in options[number].items() if key not in IMPLEMENTATION
            }
            saved = {
                key: torch.zeros(1, dtype=storage.DTYPES[value["elements"]])
                if storage.is_elements(value)
                else decode(value)
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
                if storage.is_elements(state[key]) and isinstance(here, torch.Tensor) and here.dtype != value.dtype:
                    there = dtype_name(value.dtype)
                    yield f"{name}: its state {key} is {there} in the checkpoint, {dtype_name(here.dtype)} here"


def _step(
    optimizer: optim.Optimizer, group: dict[str, Any], dtype: torch.dtype, state: dict[str, Any]
) -> dict[str, Any]:
    """Takes a step on the CPU, in a copy of the optimizer; returns the states after it."""
    tensor = torch.zeros(1, dtype=dtype)
    tensor.grad = torch.zeros(1, dtype=dtype)
    options = {key: value.cpu().clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
    copy = optimizer_over(optimizer, [options | {"params": [tensor], "capturable": False}])
    copy.state = defaultdict(dict, {tensor: dict(state)} if state else {})
    raw_step(copy)
    return copy.state[tensor]


# -- a load --------------------------------------------------------------------------------------------------------


class CheckpointLoad:
    """The load of a checkpoint into an engine: this rank's tensors, which are read, and then everything else."""

    def __init__(self, engine: ShardedEngine, saved: storage.Checkpoint) -> None:
        """Allocates the tensors that the engine does not have yet."""
        self._engine, self._saved, self.files = engine, saved, saved.files
        listed = saved.facts["parameters"]  # others keep their values and states
        self._segments = [s for s in engine.segments if engine.names[s.span.parameter] in listed]
        self._pending: dict[OptimizerSegment, torch.Tensor] = {}
        self._states = [self._new_state(segment) for segment in self._segments]
        self._options = [
            {key: decode(value) for key, value in options.items() if key not in IMPLEMENTATION}
            for options in saved.facts["optimizer"]["options"]
        ]

    def _new_state(self, segment: OptimizerSegment) -> dict[str, Any]:
        name = self._engine.names[segment.span.parameter]
        old = self._engine.optimizer.state.get(segment.tensor, {})
        new: dict[str, Any] = {}
        for key, value in self._saved.facts["optimizer"]["states"].get(name, {}).items():
            if not storage.is_elements(value):
                new[key] = decode(value)
                continue
            new[key], dtype = old.get(key), storage.DTYPES[value["elements"]]
            block = value.get("block", 1)
            shape = segment.tensor.shape if block == 1 else (-(-segment.tensor.numel() // block),)
            if not isinstance(new[key], torch.Tensor) or new[key].shape != shape or new[key].dtype != dtype:
                like = segment.tensor
                new[key] = torch.empty_like(like, dtype=dtype) if block == 1 else like.new_empty(shape, dtype=dtype)
            labels.label(new[key], labels.OPTIMIZER, f"{name} {key}", tier=segment.tier)
        if f"pending.{name}" in self._saved.tensors:
            dtype = self._saved.tensors[f"pending.{name}"].dtype
            gradient = torch.empty(segment.span.numel, dtype=dtype, device=segment.tensor.device)
            self._pending[segment] = labels.label(gradient, labels.GRADIENTS, f"{name} pending", tier=segment.tier)
        return new

    def read(self) -> None:
        """Reads this rank's tensors."""
        engine = self._engine
        for part in parts_of(engine):
            self._read(part)
        for segment, state in zip(self._segments, self._states, strict=True):
            for part in _state_parts(engine, segment, state):
                self._read(part)
            if segment in self._pending:
                self._read(_part(engine, segment, "pending", self._pending[segment]))
        for name, buffer in buffers_of(engine.module).items():
            self._read(Part(f"buffer.{name}", buffer, storage.row_major(*buffer.shape), 0, buffer.detach()))

    def _read(self, part: Part) -> None:
        target, stored = part.tensor, self._saved.tensors.get(part.name)
        if target.numel() and stored is not None:
            put(target, stored.part(part.order, part.start, part.start + target.numel()).view(target.shape))

    def finish(self) -> dict[str, Any]:
        """Restores the rest of the state, refreshes the parameters from the masters, and returns the user's state."""
        engine, optimizer, facts = self._engine, self._engine.optimizer, self._saved.facts
        group_of = {id(tensor): group for group in optimizer.param_groups for tensor in group["params"]}
        for segment, state in zip(self._segments, self._states, strict=True):
            group = group_of.get(id(segment.tensor), {})
            optimizer.state.pop(segment.tensor, None)
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and not value.dim():
                    if key != "step":
                        state[key] = value.to(segment.tensor.device)
                    elif group.get("capturable") or group.get("fused"):  # else torch has it on the CPU
                        state[key] = value.to(segment.tensor.device, torch.float32)
            if state:
                optimizer.state[segment.tensor] = state
        for group, options in zip(optimizer.param_groups, self._options, strict=True):
            for key, value in options.items():
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(value)  # a learning rate: in place, so that other references see it
                else:
                    group[key] = value
        engine.load_extra_state(facts["extra"])
        if self._pending:
            with torch.no_grad():
                engine.update.restore_pending(self._pending, facts["extra"]["pending"])
        engine.after_load()
        user: dict[str, Any] = facts["user"]
        return user
