"""Holdings of a loop before it is watched: model, strategy and optimizer are found, and their tensors named.

strategy      class of the model or of the optimizer -> the name in tables; plain where none is known
masters       tensors that an optimizer updates and that are no parameters of the model
states        an optimizer's tensors, by parameter
the rest      every other tensor that lives already: "made before the watch", so that no byte is missed
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..probes.dtensor import parts_of
from ..probes.labeling import label_parts
from ..probes.ledger import Ledger
from ..zero import labels
from .apart import is_apart

WRAPPERS = {
    "DistributedDataParallel": "ddp",
    "FullyShardedDataParallel": "fsdp1",
    "DeepSpeedEngine": "deepspeed",
}
"""Class of a wrapped model -> name of its strategy."""

BEFORE = "made before the watch"


def inner_model(model: Any) -> nn.Module:
    """Returns the user's module inside of wrappers that hold it as `module`. Raises ValueError for no model."""
    while type(model).__name__ in WRAPPERS or not isinstance(model, nn.Module):
        inside = getattr(model, "module", None)
        if not isinstance(inside, nn.Module):
            raise ValueError(f"watch: model is {type(model).__name__}; give the torch.nn.Module that the loop calls")
        model = inside
    return model


def called_model(model: Any) -> nn.Module:
    """Returns the module whose call is the forward: the wrapper where it is a module itself."""
    return model if isinstance(model, nn.Module) else inner_model(model)


def strategy_of(model: Any, optimizers: list[Any]) -> str:
    """Names the strategy that the objects of a loop belong to, as in the table of strategies where it is one of it."""
    names = {type(one).__name__ for one in (model, *optimizers)}
    if "ZeroRedundancyOptimizer" in names:
        return "zero_redundancy"
    for one in (model, *optimizers):
        if type(one).__module__.startswith("zerobench.") and isinstance(getattr(one, "name", None), str):
            return str(one.name)
    if any(kind.__name__ == "FSDPModule" for module in _modules_of(model) for kind in type(module).__mro__):
        return "fsdp2"
    return next((name for kind, name in WRAPPERS.items() if kind in names), "plain")


def _modules_of(model: Any) -> Iterator[nn.Module]:
    if isinstance(model, nn.Module):
        yield from model.modules()


def torch_optimizers(optimizers: list[Any]) -> list[torch.optim.Optimizer]:
    """Returns torch's optimizers inside of the loop's, which may wrap them as `optimizer` or `optim`."""
    found: list[torch.optim.Optimizer] = []
    for one in optimizers:
        for _ in range(4):
            inside = getattr(one, "optimizer", None) or getattr(one, "optim", None)
            if inside is None or inside is one:
                break
            one = inside
        if isinstance(one, torch.optim.Optimizer):
            found.append(one)
    return found


def label_held(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Labels parameters, gradients, masters and states as they are now."""
    for name, parameter in model.named_parameters():
        label_parts(parameter.data, labels.PARAMETERS, name)
        if parameter.grad is not None:
            label_parts(parameter.grad, labels.GRADIENTS, name)
    for name, buffer in model.named_buffers():
        label_parts(buffer, labels.INPUTS, name)
    label_updated(model, optimizers)


def label_updated(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Labels what optimizers update and keep: masters, which are no parameters, their gradients, and states."""
    names = set(model.parameters())
    of_model = {_storage(part) for p in names for part in parts_of(p.data)}
    for optimizer in optimizers:
        for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            if parameter in names:
                continue
            if any(_storage(part) not in of_model for part in parts_of(parameter.data)):
                label_parts(parameter.data, labels.MASTER, f"master {number}")
            if parameter.grad is not None:
                label_parts(parameter.grad, labels.GRADIENTS, f"gradient {number}")
        for state in optimizer.state.values():
            for name, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    label_parts(value, labels.OPTIMIZER, str(name))


def meet_all_others(ledger: Ledger) -> None:
    """Shows the ledger every other tensor that lives, found by the garbage collector."""
    gc.collect()  # what only circles hold would die in some step, or in none
    for one in _living_tensors():
        for part in parts_of(one):
            if part.layout == torch.strided and not is_apart(part) and not ledger.knows(part):
                ledger.meet(part, BEFORE)


def _living_tensors() -> Iterator[torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn when their class is asked for
        for one in gc.get_objects():
            kind = type(one)
            if issubclass(kind, torch.Tensor) and not kind.__name__.startswith("Fake"):
                yield one


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
