"""Queries on modules for stage 3: which are units, which tensors they return, when they are recomputed; hooks, and the
mode in which an engine runs.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

ROOT = ""
"""The path of the root unit, which holds the parameters of no other unit: the model's own path."""


P = ParamSpec("P")
R = TypeVar("R")


def in_normal_mode(run: Callable[P, R]) -> Callable[P, R]:
    """Makes `run` leave the caller's torch.inference_mode(), whose tensors nobody may change or train with later."""

    def outside(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():
            return run(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return run(*args, **kwargs)

    outside.__code__ = outside.__code__.replace(co_name=run.__name__)  # tracebacks and out_of_step.py name the method
    return wraps(run)(outside)


class Hook:
    """A hook of the engine on a module. In a copy of the module, it does nothing.

    torch.compile leaves hooks out of its graphs: they replace the memory of parameters and start collectives. The class
    requests this when a hook is first traced; doing it at import would load torch's compiler, which takes seconds.
    """

    def __init__(self, run: Callable[..., None] | None = None) -> None:
        self._run = run

    def __call__(self, *arguments: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            Hook.__call__ = torch.compiler.disable(Hook._call)  # type: ignore[method-assign]
            Hook.__call__(self, *arguments)
        else:
            self._call(*arguments)

    @in_normal_mode
    def _call(self, *arguments: Any) -> None:
        if self._run is not None:
            self._run(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, ()


def blocks(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the elements of every outermost nn.ModuleList, by convention a transformer's blocks; in a model without
    one, the elements of every outermost nn.Sequential. A list inside a list is not a block: its elements are.
    """
    return _elements_of(root, nn.ModuleList) or _elements_of(root, nn.Sequential)


def default_units(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the blocks, and all modules with a true attribute `is_unit`, such as a tile of a Linear, in the order of
    the model's modules.
    """
    names = {module: name for name, module in blocks(root)}
    names |= {module: name for name, module in root.named_modules() if getattr(module, "is_unit", False)}
    return [(names[module], module) for module in root.modules() if module in names]


def _elements_of(root: nn.Module, container: type[nn.Module]) -> list[tuple[str, nn.Module]]:
    inside: set[nn.Module] = set()  # everything below an element that was found
    found: list[tuple[str, nn.Module]] = []
    for path, module in root.named_modules():
        if isinstance(module, container) and module not in inside:
            for name, child in module.named_children():
                if not isinstance(child, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict):
                    found.append((f"{path}.{name}" if path else name, child))
                    inside.update(child.modules())
    return found


def named_units(root: nn.Module, chosen: tuple[nn.Module, ...]) -> list[tuple[str, nn.Module]]:
    """Returns the chosen modules with their names. Raises ValueError for one that is not part of the model."""
    names = {module: name for name, module in root.named_modules()}
    for module in chosen:
        if module not in names or module is root:
            raise ValueError(f"units: {type(module).__name__} is not a submodule of the model")
    return [(name, module) for module, name in names.items() if module in set(chosen)]


def unit_of_parameters(root: nn.Module, units: list[tuple[str, nn.Module]]) -> dict[nn.Parameter, str]:
    """Maps each unique parameter to its innermost unit, or to ROOT if it is in none or in several."""
    names = {module: name for name, module in units}
    found: dict[nn.Parameter, set[str]] = {parameter: set() for parameter in root.parameters()}

    pending = [(root, ROOT)]  # no recursive closure, whose circle would keep the parameters until the next collection
    while pending:
        module, outer = pending.pop()
        unit = names.get(module, outer)
        for parameter in module.parameters(recurse=False):
            found[parameter].add(unit)
        pending += [(child, unit) for child in module.children()]
    return {parameter: around.pop() if len(around) == 1 else ROOT for parameter, around in found.items()}


def tensors_that_require_grad(output: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in a module's output that backward will pass through; searches containers and dataclasses."""
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad:
                yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for one in dataclasses.fields(leaf):
                yield from tensors_that_require_grad(getattr(leaf, one.name))


def tensors_left_in(modules: list[nn.Module]) -> list[torch.Tensor]:
    """Returns computed tensors in the modules' attributes, such as auxiliary losses that the model collects later."""
    values = (value for module in modules for value in vars(module).values())
    return [value for value in values if isinstance(value, torch.Tensor) and value.grad_fn is not None]


def check_visible(name: str, output: Any) -> None:
    """Raises ValueError for the output of unit `name` if it may hide tensors that require a gradient.

    This is the case if it contains no tensors, or objects of unknown types. Tensors without a gradient are accepted.
    """
    leaves = pytree.tree_leaves(output)
    plain = (torch.Tensor, type(None), str, bytes, int, float, complex, torch.dtype, torch.device)
    strange = [leaf for leaf in leaves if not isinstance(leaf, plain) and not dataclasses.is_dataclass(leaf)]
    if strange or not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise ValueError(
            f"{name}: no tensor that requires a gradient was found in its output; a unit of zero3 must return tensors,"
            " or containers or dataclasses of them"
        )


def warn_of_modules_not_called(names: list[str]) -> None:
    """Warns once about units that forward did not call: a unit that runs through another method would read NaN."""
    if names:
        warnings.warn(
            f"zero3: the first forward did not call {', '.join(names)}; parameters that are read in another way than by"
            " calling their module are NaN: name other modules in units=",
            stacklevel=4,
        )


NO_TASK = -1


def graph_task() -> int:
    """Returns the number of the backward that runs now, NO_TASK outside of one. (torch-private, tested.)"""
    number: int = torch._C._current_graph_task_id()
    return number


def inside_backward() -> bool:
    """Returns True inside a backward: a module that runs then is being recomputed."""
    return graph_task() != NO_TASK


def saved_by_others() -> bool:
    """Returns True if other saved-tensor hooks receive the tensors that autograd saves now.
    (torch-private, tested.)
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
