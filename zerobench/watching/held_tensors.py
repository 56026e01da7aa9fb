"""A loop's tensors: those that it has before it is watched, and the parts of parameters that one rank updates.

Model, strategy and optimizer are identified, and their tensors named:

strategy      class of the model or of the optimizer -> its name in tables; plain if none is known
engine        an object that labels its tensors itself (`label_held`), such as ours
masters       tensors that an optimizer updates and that are not parameters of the model
states        an optimizer's tensors, by parameter
the rest      every other live tensor: "made before the watch", so that no byte is missed

In a process that has done other work, figures would depend on that work: the tensors that are alive at the beginning of
`leave_out` are counted only if the loop uses them, as parameters, states, inputs or results of an operator.

A rank's part of a parameter is a named tensor and the same part of a whole tensor, whatever the engine:

plain, DDP    the whole parameter
FSDP2         this rank's shard of a DTensor
ours          a segment of the flat master: elements [start, stop) of a parameter
masters       tensors of the loop's own, next to the model: matched to the parameters by their order and shapes
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from ..probes.labeling import label_parts, parts_of
from ..probes.ledger import Ledger
from ..probes.source_lines import living_tensors
from ..zero import labels
from ..zero.layout import MemoryOrder

WRAPPERS = {"DistributedDataParallel": "ddp", "FullyShardedDataParallel": "fsdp1", "DeepSpeedEngine": "deepspeed"}
"""Class of a wrapped model -> name of its strategy."""

BEFORE = "made before the watch"

not_of_loop = WeakTensorKeyDictionary()
"""Tensors of certificates, which no watch counts."""


def uncompiled(model: Any) -> Any:
    """Returns the module inside of torch.compile's, which forwards attributes to it in both directions."""
    return model._orig_mod if type(model).__name__ == "OptimizedModule" else model


def inner_model(model: Any) -> nn.Module:
    """Returns the user's module inside wrappers that store it as `module`. Raises ValueError if there is no model."""
    while type(uncompiled(model)).__name__ in WRAPPERS or not isinstance(model, nn.Module):
        inside = getattr(model, "module", None)
        if not isinstance(inside, nn.Module):
            raise ValueError(f"watch: model is {type(model).__name__}; give the torch.nn.Module that the loop calls")
        model = inside
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError("watch: model is a ScriptModule, which has no hooks; give the module that was scripted")
    if lazy := next((name for name, p in model.named_parameters() if torch.nn.parameter.is_lazy(p)), ""):
        raise ValueError(
            f"watch: parameter {lazy} of a lazy module has no shape yet; call the model once before the watch"
        )
    return model


def called_model(model: Any) -> nn.Module:
    """Returns the module that the loop calls: the model's wrapper, if any, which trainers do not pass to callbacks."""
    called = model if isinstance(model, nn.Module) else inner_model(model)
    if not dist.is_initialized() or type(uncompiled(called)).__name__ in WRAPPERS:
        return called
    wrappers = (wrapper for wrapper in gc.get_objects() if type(wrapper).__name__ in WRAPPERS)
    return next(
        (wrapper for wrapper in wrappers if isinstance(wrapper, nn.Module) and wrapper.module is called), called
    )


def strategy_name(model: Any, optimizers: list[Any]) -> str:
    """Names the strategy that the objects of a loop belong to, as in the table of strategies if it is there."""
    objects = (uncompiled(model), *optimizers)
    names = {type(held).__name__ for held in objects}
    if "ZeroRedundancyOptimizer" in names:
        return "zero_redundancy"
    for held in objects:
        if type(held).__module__.startswith("zerobench.") and isinstance(getattr(held, "name", None), str):
            return str(held.name)
    modules = model.modules() if isinstance(model, nn.Module) else ()
    if any(kind.__name__ == "FSDPModule" for module in modules for kind in type(module).__mro__):
        return "fsdp2"
    return next((name for kind, name in WRAPPERS.items() if kind in names), "plain")


def torch_optimizers(optimizers: list[Any]) -> list[torch.optim.Optimizer]:
    """Returns torch's optimizers inside of the loop's, which may wrap them as `optimizer` or `optim`."""
    inner: list[torch.optim.Optimizer] = []
    for optimizer in optimizers:
        for _ in range(4):
            inside = getattr(optimizer, "optimizer", None) or getattr(optimizer, "optim", None)
            if inside is None or inside is optimizer:
                break
            optimizer = inside
        if isinstance(optimizer, torch.optim.Optimizer):
            inner.append(optimizer)
    return inner


class HeldTensors:
    """Labels the tensors of a loop's objects, except those of engines, which label theirs themselves."""

    def __init__(self, ledger: Ledger, outer: Any, model: nn.Module, optimizers: list[Any]) -> None:
        self._ledger, self._model = ledger, model
        self._engines = [held for held in dict.fromkeys((outer, *optimizers)) if hasattr(held, "label_held")]
        self._optimizers = torch_optimizers(optimizers)

    def label_all(self) -> None:
        """Labels the current parameters, buffers, gradients, masters and states, then all other live tensors."""
        gc.collect()  # garbage must not be freed in the midst of a step
        self._ledger.lines.silent = True
        if not self._engines:
            for name, parameter in self._model.named_parameters():
                label_parts(parameter, labels.PARAMETERS, name)
                if parameter.grad is not None:
                    label_parts(parameter.grad, labels.GRADIENTS, name)
        for name, buffer in self._model.named_buffers():
            label_parts(buffer, labels.INPUTS, name)
        for engine in self._engines:
            engine.label_held()
        self.label_updated()
        # the other live tensors, but no dataset mapped from a file or borrowed from NumPy: torch cannot resize those
        for tensor in living_tensors():
            for part in () if tensor in not_of_loop else parts_of(tensor):
                if part.layout == torch.strided and not self._ledger.knows(part):
                    storage = part.untyped_storage()
                    if storage._cdata not in _excluded and storage.resizable():
                        self._ledger.meet(part, BEFORE)
        self._ledger.lines.silent = False

    def label_updated(self) -> None:
        """Labels what optimizers update and keep: masters that are not parameters, gradients, states."""
        of_model = set(self._model.parameters())
        for optimizer in self._optimizers:
            for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                if parameter in of_model:
                    continue
                records = map(self._ledger.record_of, parts_of(parameter.data))
                if not all(record is not None and record.labeled for record in records):
                    label_parts(parameter.data, labels.MASTER, f"master {number}")
                if not self._engines and parameter.grad is not None:
                    label_parts(parameter.grad, labels.GRADIENTS, f"gradient {number}")
            self._ledger.label_states(optimizer)


_excluded: dict[int, StorageWeakRef] = {}
"""Address of a storage -> a weak reference to it, without which the address could be reused."""


@contextmanager
def leave_out() -> Iterator[None]:
    """Excludes tensors that are alive at the beginning of this block from the watches in it."""
    gc.collect()  # tensors that only cycles refer to are not alive
    _excluded.clear()
    for tensor in living_tensors():
        for part in parts_of(tensor):
            if part.layout == torch.strided:
                storage = part.untyped_storage()
                _excluded.setdefault(storage._cdata, StorageWeakRef(storage))
    try:
        yield
    finally:
        _excluded.clear()


WRAPPED = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""Parts of a parameter's name that wrappers of a module add."""

OUTER = "module."
"""What nn.DataParallel and DDP put before every name; anywhere else it is a name of the user's own."""

Cut = Callable[[torch.Tensor], torch.Tensor | None]
"""Returns a rank's part of a whole tensor; None if the part is unknown."""


@dataclass(frozen=True)
class UpdatedPart:
    """This rank's part of the parameter `name`."""

    name: str
    tensor: torch.Tensor
    """The plain tensor that the optimizer updates."""
    key: torch.Tensor
    """The tensor in the optimizer's groups."""
    in_model: torch.dtype
    """The dtype of the parameter in the model."""
    cut: Cut


def names_in(model: nn.Module) -> dict[nn.Parameter, str]:
    """Returns the parameters with their names in the plain model."""
    names = {p: plain_name(name) for name, p in model.named_parameters()}
    while names and all(name.startswith(OUTER) for name in names.values()):
        names = {p: name.removeprefix(OUTER) for p, name in names.items()}
    return names


def plain_name(name: str) -> str:
    """Returns a parameter's name without the additions of wrappers."""
    for part in WRAPPED:
        name = name.replace(part, "")
    return name


def full_numel(parameter: nn.Parameter) -> int:
    """Returns the elements of the whole parameter; DeepSpeed keeps an empty one and its size."""
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def is_ours(engine: Any) -> bool:
    """Returns True for an engine of zerobench.zero, which has its tensors in segments."""
    return hasattr(engine, "label_held") and hasattr(engine, "reduced_gradients")


def parts_of_engine(engine: Any) -> Iterator[UpdatedPart]:
    """Yields the segments that one of our engines updates on this rank and has in memory."""
    for updated in (segment for tile in engine.update.tiles for segment in tile):
        segment, parameter = updated.span, engine.trainable[updated.span.parameter]
        if updated.tensor.untyped_storage().nbytes():
            cut = partial(_segment, engine.orders[parameter], segment.start, segment.stop)
            name = plain_name(engine.names[segment.parameter])
            yield UpdatedPart(name, updated.tensor, updated.tensor, parameter.dtype, cut)


def _segment(order: MemoryOrder, start: int, stop: int, whole: torch.Tensor) -> torch.Tensor:
    return order.flatten(whole)[start:stop]


def held_by(optimizer: optim.Optimizer) -> list[torch.Tensor]:
    """Returns the tensors in an optimizer's parameter groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def parts_of_optimizer(optimizer: optim.Optimizer, names: dict[nn.Parameter, str]) -> Iterator[UpdatedPart]:
    """Yields the parts that an optimizer of torch updates, without frozen parameters. `names`: of the model's."""
    held = [p for p in held_by(optimizer) if p.requires_grad or p not in names]
    # Masters are matched in order, each to the next trainable parameter of the same shape that the optimizer does not
    # hold. If one master has no match, none is matched.
    own = set(held)
    others = iter([p for p in names if p.requires_grad and p not in own])
    masters = {
        master: next((p for p in others if p.shape == master.shape), None) for master in held if master not in names
    }
    originals: dict[torch.Tensor, Any] = {} if None in masters.values() else masters
    for number, parameter in enumerate(held):
        original = originals.get(parameter, parameter)
        name = names.get(original, f"master {number}")
        yield UpdatedPart(
            name, next(parts_of(parameter.detach())), parameter, original.dtype, partial(_shard, parameter)
        )


def _shard(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor | None:
    """Cuts this rank's part from a whole tensor: for a DTensor, by its placements."""
    placements, mesh = getattr(parameter, "placements", ()), getattr(parameter, "device_mesh", None)
    if any(type(placement).__name__ not in ("Shard", "Replicate") for placement in placements):
        return None  # strided shards, of several axes
    for axis, placement in enumerate(placements):
        if mesh is not None and placement.is_shard():
            pieces, rank = whole.chunk(mesh.size(axis), placement.dim), mesh.get_local_rank(axis)
            whole = pieces[rank] if rank < len(pieces) else whole.narrow(placement.dim, 0, 0)
    return whole if whole.shape == next(parts_of(parameter)).shape else None
