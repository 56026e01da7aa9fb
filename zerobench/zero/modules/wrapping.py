"""Modules as units of stage 3: which are units, which tensors they return, when they are recomputed, and in which order
they run; hooks, and the mode in which an engine runs.

[Note: the order of units]
The order is recorded in one forward and used for prefetch in the next. A *use* is one run of a unit's module; its
number is its index in the list. Backward traverses the uses in reverse. Every rank must run its units in the same
order, so that all ranks launch gathers and reductions in the same order.

[Note: tied parameters]
Autograd sums the gradients of one leaf before it delivers them: for a head tied to its embedding it keeps the head's
gradient through the whole backward, and at the end holds three tensors of that size. Here each use in a module is an
*alias*: a tensor over the parameter's memory, made by a Function whose backward passes the use's gradient to the
engine and none to the parameter. The sum is computed, in the same order, where gradients are accumulated anyway; when
autograd reaches the parameter itself, all its uses have been handled.

An alias replaces the parameter in its module only while that module runs, is a Parameter of the same class, and has the
parameter's own attributes. If the parameter itself needs the summed gradient, autograd sums as usual: for
torch.autograd.grad, for another engine's backward, and for hooks on the parameter, which may be registered at any time.

Inside of a forward `first.weight is second.weight` is False, and an alias is not a leaf; outside both are as usual.
"""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils import _pytree as pytree

ROOT = ""
"""The path of the root unit, which holds the parameters of no other unit: the model's own path."""


P = ParamSpec("P")
R = TypeVar("R")
U = TypeVar("U")


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
    return _elements(root, nn.ModuleList) or _elements(root, nn.Sequential)


def default_units(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the blocks, and the modules with a true `is_unit`, such as a tile of a Linear, in order."""
    names = {module: name for name, module in blocks(root)}
    names |= {module: name for name, module in root.named_modules() if getattr(module, "is_unit", False)}
    return [(names[module], module) for module in root.modules() if module in names]


def _elements(root: nn.Module, container: type[nn.Module]) -> list[tuple[str, nn.Module]]:
    inside: set[nn.Module] = set()  # everything below an element
    elements: list[tuple[str, nn.Module]] = []
    for path, module in root.named_modules():
        if isinstance(module, container) and module not in inside and not isinstance(module, ParametrizationList):
            for name, child in module.named_children():
                if not isinstance(child, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict):
                    elements.append((f"{path}.{name}" if path else name, child))
                    inside.update(child.modules())
    return elements


def named_units(root: nn.Module, chosen: tuple[nn.Module, ...]) -> list[tuple[str, nn.Module]]:
    """Returns the chosen modules with their names. Raises ValueError for one that is not part of the model."""
    names = {module: name for name, module in root.named_modules()}
    for module in chosen:
        if module not in names or module is root:
            raise ValueError(f"units: {type(module).__name__} is not a submodule of the model")
    return [(name, module) for module, name in names.items() if module in set(chosen)]


def unit_of_parameters(root: nn.Module, units: list[tuple[str, nn.Module]]) -> dict[nn.Parameter, str]:
    """Maps each unique parameter to its innermost unit, or to ROOT if it is in none or in several."""
    unit_names = {module: name for name, module in units}
    units_of: dict[nn.Parameter, set[str]] = {parameter: set() for parameter in root.parameters()}
    pending = [(root, ROOT)]  # no recursive closure, whose cycle would keep the parameters until the next gc
    while pending:
        module, outer = pending.pop()
        unit = unit_names.get(module, outer)
        for parameter in module.parameters(recurse=False):
            units_of[parameter].add(unit)
        pending += [(child, unit) for child in module.children()]
    return {parameter: names.pop() if len(names) == 1 else ROOT for parameter, names in units_of.items()}


def tensors_that_require_grad(output: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in a module's output that backward will pass through; searches containers and dataclasses."""
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad:
                yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from tensors_that_require_grad(getattr(leaf, field.name))


def tensors_left_in(modules: list[nn.Module]) -> list[torch.Tensor]:
    """Returns computed tensors in the modules' attributes, such as auxiliary losses that the model collects later."""
    values = (value for module in modules for value in vars(module).values())
    return [value for value in values if isinstance(value, torch.Tensor) and value.grad_fn is not None]


def check_visible(name: str, output: Any) -> None:
    """Raises ValueError for the output of unit `name` if it may hide tensors that require a gradient. This is the case
    if it contains no tensors, or objects of unknown types. Tensors without a gradient are accepted.
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
    """Returns True if other saved-tensor hooks are active. (torch-private, tested.)"""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class Forward:
    """One forward, which the hooks of its backward keep alive: when its graph is gone, so is it."""


class UnitOrder(Generic[U]):
    """Uses in the *open* forwards, and in the last complete forward, which predicts the next one for prefetch.

    A forward stays open until a backward that has reached it ends, the parameters change, or its graph is freed, since
    the forward failed or no backward follows. Several forwards may be open at the same time, for one backward through a
    sum of their losses or for one backward each. `forward` is the current one.
    """

    def __init__(self) -> None:
        self.forward = Forward()
        self._uses: list[U | None] = []  # None: of a forward that is closed
        self._forwards: list[weakref.ref[Forward]] = []  # of each use
        self._open: weakref.WeakSet[Forward] = weakref.WeakSet()
        self._reached: set[Forward] = set()  # reached by the current backward
        self._previous: list[U] = []
        self._not_returning: set[int] = set()  # uses that backward will not reach
        self._start = 0  # index of the current forward's first use

    @property
    def uses(self) -> list[U]:
        """Uses of open forwards, in order."""
        return [unit for unit in self._uses if unit is not None]

    @property
    def end(self) -> int:
        """The number of the next use."""
        return len(self._uses)

    def begin_forward(self) -> None:
        """Starts a forward; several may precede one backward."""
        self.forward = Forward()
        self.end_backward(closes_all=False)  # of forwards whose graphs are gone
        self._open.add(self.forward)
        self._start = len(self._uses)

    def record(self, unit: U) -> int:
        """Records a use of `unit` and returns its number."""
        self._uses.append(unit)
        self._forwards.append(weakref.ref(self.forward))
        return len(self._uses) - 1

    def forward_of(self, use: int) -> Forward | None:
        """Returns a use's forward, None if it is gone."""
        return self._forwards[use]()

    def reach(self, forward: Forward | None) -> bool:
        """Records that backward has reached a forward; returns True if it is open."""
        self._reached.update([forward] if forward else [])
        return forward in self._open

    @property
    def is_reached(self) -> bool:
        """True if the current backward has reached a forward."""
        return bool(self._reached)

    def end_backward(self, closes_all: bool) -> None:
        """Ends the backward: closes the forwards that it reached, or all; the last one predicts the next."""
        latest = [unit for unit in self._uses[self._start :] if unit is not None]
        self._previous = latest or self._previous
        self._open -= self._open if closes_all else self._reached
        self._reached.clear()
        if not self._open:
            self._uses, self._forwards, self._start = [], [], 0
            self._not_returning.clear()
        self._uses = [u if f() in self._open else None for u, f in zip(self._uses, self._forwards, strict=True)]

    def restart(self) -> None:
        """Closes all forwards, and predicts none: there are other units now."""
        self.end_backward(closes_all=True)
        self._previous = []

    def end_before(self, use: int, count: int) -> None:
        """Records that no unit up to this use is trained: backward will not reach the last `count` uses up to it."""
        self._not_returning.update(range(use - count + 1, use + 1))

    def ahead(self, use: int, depth: int) -> list[U]:
        """Returns up to `depth` units that followed this use in the last forward, if both forwards agree so far."""
        index = use - self._start
        if self._previous[index : index + 1] != self._uses[use : use + 1]:
            return []
        return self._previous[index + 1 : index + 1 + depth]

    def behind(self, use: int, depth: int) -> list[U]:
        """Returns up to `depth` units that backward reaches after this use, nearest first."""
        window = range(max(0, use - depth), use)
        back = (self._uses[number] for number in reversed(window) if number not in self._not_returning)
        return [unit for unit in back if unit is not None]

    def passed(self, use: int) -> list[U]:
        """Returns units whose uses all come after this one, last first: backward has finished with them."""
        still_to_come = {None, *self._uses[: use + 1]}
        later = dict.fromkeys(reversed(self._uses[use + 1 :]))
        return [unit for unit in later if unit is not None and unit not in still_to_come]

    def only_use(self, unit: U) -> int | None:
        """Returns the number of the unit's use if it has exactly one, otherwise None."""
        uses = [number for number, used in enumerate(self._uses) if used is unit]
        return uses[0] if len(uses) == 1 else None


# -- tied parameters (see the note) ----------------------------------------------------------------------------


Take = Callable[[torch.Tensor], torch.Tensor | None]
"""Takes the gradient of one use and returns the part that is passed on to the parameter."""


class TiedName:
    """One of several names, `module.name`, of a tied `parameter`; `take` receives the gradient of each use."""

    def __init__(self, parameter: nn.Parameter, module: nn.Module, name: str, take: Take) -> None:
        self._parameter = parameter
        self._module = module
        self._name = name
        self._take = take
        self._alias: nn.Parameter | None = None
        module.register_forward_pre_hook(Hook(self._put_alias))
        module.register_forward_hook(Hook(self._take_back), always_call=True)

    def _put_alias(self, *_: Any) -> None:
        parameters = self._module._parameters
        is_present = parameters.get(self._name) is self._parameter  # False if functional_call has replaced it
        if is_present and self._parameter.requires_grad and torch.is_grad_enabled():
            alias: nn.Parameter = _Use.apply(self._parameter, self._take)
            alias.__class__ = type(self._parameter)
            alias.__dict__ = self._parameter.__dict__
            parameters[self._name] = self._alias = alias

    def _take_back(self, *_: Any) -> None:
        alias, self._alias = self._alias, None
        if alias is not None and self._module._parameters.get(self._name) is alias:
            self._module._parameters[self._name] = self._parameter


class _Use(torch.autograd.Function):
    """The identity, whose backward passes the gradient to `take`; an undefined gradient stays undefined."""

    generate_vmap_rule = True

    @staticmethod
    def forward(parameter: torch.Tensor, _take: Take) -> torch.Tensor:
        return parameter.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, Take], output: torch.Tensor) -> None:
        ctx.take = inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return (None if gradient is None else ctx.take(gradient)), None


def names_of_tied(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Returns trainable parameter -> (module, name) of all its names, for parameters with more than one."""
    names: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                names.setdefault(parameter, []).append((module, name))
    return {parameter: several for parameter, several in names.items() if len(several) > 1}
