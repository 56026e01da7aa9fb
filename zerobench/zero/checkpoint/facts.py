"""A checkpoint's facts, the JSON next to its tensors: how they are made, checked and compared with an engine.

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
a load, `problems_of_step` takes a step of the optimizer on tensors of one element, with the checkpoint's options and
states: whether it would raise.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from ..engine import ShardedEngine
from ..layout import MemoryOrder
from ..low_bit import block_numel, block_of
from ..optim.segments import ELEMENTWISE, OptimizerSegment
from ..optim.step_by_tiles import raw_step, stand_in
from .safetensors import DTYPES, FLOATS, MOST_USER_BYTES, StoredTensor, row_major

IMPLEMENTATION = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Options that choose an implementation of the update and do not change its result: each engine keeps its own."""


def facts_of(engine: ShardedEngine, user: Mapping[str, Any], exclude_frozen: bool = False) -> dict[str, Any]:
    """Returns this rank's facts. Raises ValueError for a value that JSON cannot hold."""
    number_of = {id(p): number for number, group in enumerate(engine.optimizer.param_groups) for p in group["params"]}
    groups: dict[str, int] = {}
    states: dict[str, Any] = {}
    for segment in engine.segments:
        name = engine.names[segment.segment.parameter]
        _add(groups, name, number_of.get(id(segment.tensor)), "its group")
        _add(states, name, states_of(name, segment, engine.optimizer), "its state")
    trainable = set(engine.trainable)
    return {
        "stage": engine.stage,
        "world_size": engine.comm.size,
        "torch": torch.__version__,
        "parameters": {
            name: {**_kind(p), **_dims(engine.orders[p]), "trainable": p in trainable}
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
        "user": _user_state(user),
    }


def _user_state(user: Mapping[str, Any]) -> Any:
    """Returns a copy: the caller may change its lists and dicts while a thread writes them."""
    text = json.dumps(check_json(dict(user), "user_state"))
    if len(text) > MOST_USER_BYTES:
        words = f"it has {len(text):,} bytes as JSON; an index holds at most {MOST_USER_BYTES:,}"
        raise ValueError(f"user_state: {words}; write it into a file of its own")
    return json.loads(text)


def flats_of(facts: Mapping[str, Any]) -> dict[str, tuple[MemoryOrder, torch.dtype]]:
    """Returns the flat tensors that the facts allow (contents.py): their order, and the dtype of their owner."""
    flats = {}
    for name, entry in facts["buffers"].items():
        flats[f"buffer.{name}"] = row_major(entry["shape"]), DTYPES[entry["dtype"]]
    for name, entry in facts["parameters"].items():
        order, dtype = saved_order(facts, name), DTYPES[entry["dtype"]]
        kinds = ("master", "pending") if entry["trainable"] else ("frozen",)
        flats |= {f"{kind}.{name}": (order, dtype) for kind in kinds}
        for key, state in facts["optimizer"]["states"].get(name, {}).items():
            if is_elements(state):
                blocks = row_major([-(-prod(order.shape) // state.get("block", 1))])
                flats[f"optimizer.{name}.{key}"] = blocks if is_blocks(state) else order, DTYPES[state["elements"]]
    return flats


def merge(everyones: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns rank 0's facts with the groups and states of all ranks. Raises ValueError if they disagree."""
    whole = everyones[0]
    for facts in everyones[1:]:
        for key, words in (("groups", "its group"), ("states", "its state")):
            for name, value in facts["optimizer"][key].items():
                _add(whole["optimizer"][key], name, value, words)
    return whole


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
            return torch.tensor(value["tensor"], dtype=DTYPES[value["dtype"]]).reshape(())
        except (RuntimeError, ValueError) as error:  # torch's words for what is no number, or a too large one
            raise TypeError(str(error)) from None
    return value


def is_elements(value: Any) -> bool:
    """Returns True if a state in the facts denotes a tensor of elements, per parameter element or per block."""
    return isinstance(value, dict) and "elements" in value


def is_blocks(value: Any) -> bool:
    """Returns True if the state has one element for each "block" of the parameter's elements."""
    return is_elements(value) and "block" in value


def dtype_name(dtype: torch.dtype) -> str:
    """Returns a dtype's short name: `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def states_of(name: str, segment: OptimizerSegment, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the states of a segment as facts, by key. Raises ValueError for one that a checkpoint cannot hold."""

    def fact(key: str, value: Any) -> Any:
        if (block := block_of(optimizer, key)) > 1:
            return {"elements": dtype_name(value.dtype), "block": block}
        if isinstance(value, torch.Tensor) and value.shape == segment.tensor.shape:
            return {"elements": dtype_name(value.dtype)}
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            raise ValueError(f"optimizer: its state {key} of {name} is neither a scalar nor of the parameter's shape")
        return encode(value, f"optimizer: its state {key} of {name}")

    return {key: fact(key, value) for key, value in optimizer.state.get(segment.tensor, {}).items()}


def _kind(tensor: torch.Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype)}


def _dims(order: MemoryOrder) -> dict[str, Any]:
    return {} if order.is_row_major else {"order": list(order.dims)}


def saved_order(facts: Mapping[str, Any], name: str) -> MemoryOrder:
    """Returns the memory order of a parameter's flat tensors in a checkpoint with these facts."""
    shape = facts["parameters"][name]["shape"]
    dims = facts["parameters"][name].get("order")
    if dims is None:
        return row_major(shape)
    if sorted(dims) != list(range(len(shape))):
        raise ValueError(f"{name}: its order is {dims!r:.60} in the checkpoint, which is none of its dimensions")
    return MemoryOrder.from_dims(shape, dims)


def _add(known: dict[str, Any], name: str, value: Any, words: str) -> None:
    if known.setdefault(name, value) != value:
        raise ValueError(f"optimizer: {words} for {name} is {known[name]} in one place and {value} in another")


def differences(engine: ShardedEngine, facts: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> Iterable[str]:
    """Yields the reasons why `engine` cannot load what it has in common with a checkpoint of these facts, the most
    specific first.
    """
    current = facts_of(engine, {})
    for kind in ("parameters", "buffers"):
        yield from _of_names(facts[kind], current[kind])
    saved, own = facts["optimizer"], current["optimizer"]
    if saved["class"] != own["class"]:
        yield f"optimizer: {saved['class']} in the checkpoint, {own['class']} here"
    yield from _of_options("optimizer", saved["options"], own["options"])
    yield from _of_extra(facts["extra"], current["extra"])
    if any(name.startswith("pending.") for name in tensors):
        pending = facts["extra"]["pending"]
        if not _is_like(pending["coefficient"], 1.0):
            yield f"extra: the coefficient of its pending update is {pending['coefficient']!r:.60} in the checkpoint"
        yield from _of_options("pending update", pending["options"], own["options"])
    common = facts["parameters"].keys() & current["parameters"].keys()
    for name, number in own["groups"].items():
        if name in common and saved["groups"].get(name) != number:
            yield f"optimizer: {name} is in group {saved['groups'].get(name)} in the checkpoint, in group {number} here"
    for segment in engine.segments:
        name = engine.names[segment.segment.parameter]
        if name not in common:
            continue
        agrees = engine.orders[engine.trainable[segment.segment.parameter]].agrees(saved_order(facts, name))
        for key, state in filter(lambda item: is_blocks(item[1]), saved["states"].get(name, {}).items()):
            blocks, block = f"{name}: its state {key} has blocks of", block_numel(engine.optimizer)
            if state["block"] != block:
                yield f"{blocks} {state['block']} elements in the checkpoint, of {block} here"
            if not agrees:
                yield f"{blocks} elements in the parameter's memory order, which is another one here"
        master = tensors.get(f"master.{name}")
        if master and master.dtype != segment.tensor.dtype:
            there, here = dtype_name(master.dtype), dtype_name(segment.tensor.dtype)
            yield f"{name}: the optimizer updates it in {there} in the checkpoint, in {here} here"


def _of_options(of: str, saved: Sequence[Any], own: Sequence[Any]) -> Iterable[str]:
    if len(saved) != len(own):
        yield f"{of}: {len(saved)} parameter groups in the checkpoint, {len(own)} here"
    for number, (theirs, ours) in enumerate(zip(saved, own, strict=False)):
        for key in sorted(ours.keys() & theirs.keys()):
            there, here = (
                v.item() if isinstance(v, torch.Tensor) else v for v in map(decode, (theirs[key], ours[key]))
            )
            if there is None is not here or not _is_like(there, here):
                yield f"{of}: {key} of group {number} is {there!r:.60} in the checkpoint and {here!r:.60} here"


def _of_extra(saved: Any, own: Any) -> Iterable[str]:
    if not _is_like(saved, own):
        yield f"extra: {saved!r:.60} in the checkpoint cannot stand for {own!r:.60}"
    scaler = own.get("loss_scaler", {}) if "loss_scaler" in saved else {}
    numbers = {"steps": saved.get("steps", 0), **{key: saved["loss_scaler"][key] for key in scaler}}
    for key, number in numbers.items():
        if type(number) not in (int, float):
            yield f"extra: {key} is {number!r:.60} in the checkpoint"


def _is_like(saved: Any, own: Any) -> bool:
    """Returns True if a saved value can replace this engine's `own`; missing and additional keys are allowed."""
    if isinstance(own, dict):
        return isinstance(saved, dict) and all(_is_like(saved[key], own[key]) for key in own.keys() & saved.keys())
    if own is None or saved is None:
        return True
    if isinstance(own, list | tuple):
        return isinstance(saved, list | tuple) and all(map(_is_like, saved, own))  # JSON has lists alone
    if isinstance(own, bool) or isinstance(saved, bool):
        return isinstance(own, bool) and isinstance(saved, bool)
    return isinstance(saved, int | float if isinstance(own, float) else type(own))


def names_of_one(engine: ShardedEngine, facts: Mapping[str, Any]) -> Iterable[str]:
    """Yields the parameters and buffers that only the model or only the checkpoint has."""
    current = facts_of(engine, {})
    for kind in ("parameters", "buffers"):
        for name in (name for name in current[kind] if name not in facts[kind]):
            yield f"{name}: the model has this {kind[:-1]}, the checkpoint has not; strict=False keeps its values"
        for name in (name for name in facts[kind] if name not in current[kind]):
            yield f"{name}: the checkpoint has this {kind[:-1]}, the model has not; strict=False leaves it out"


def _of_names(saved: Mapping[str, Any], own: Mapping[str, Any]) -> Iterable[str]:
    for name, entry in ((name, saved[name]) for name in saved if name in own):
        if entry["shape"] != own[name]["shape"]:
            yield f"{name}: its shape is {entry['shape']} in the checkpoint, {own[name]['shape']} here"
        elif entry.get("trainable") != own[name].get("trainable"):
            words = ("frozen", "trainable")
            yield f"{name}: it is {words[entry['trainable']]} in the checkpoint, {words[own[name]['trainable']]} here"
        elif len(dtypes := {DTYPES[kinds[name]["dtype"]] for kinds in (saved, own)}) > 1 and not dtypes <= FLOATS:
            yield f"{name}: its dtype is {entry['dtype']} in the checkpoint, {own[name]['dtype']} here"


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
