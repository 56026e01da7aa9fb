"""Parameters whose values are away: gathered late (stages 1 and 2), or held in parts (stage 3).

A hidden parameter is a NaN of its shape, and of a subclass of its class, which hears of every operation on it: the
engine, asked, brings the values, or refuses in a sentence. What is no value (shapes, flags, hooks, gradients) passes.
Once shown it is as it was, and nothing looks on: what torch decides by the kind of its inputs (its layers' fast paths)
is decided as without an engine.

What reads memory by itself, in C++, passes by this, and finds the NaN.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..modules.wrapping import Hook

as_they_are = torch._C.DisableTorchFunctionSubclass
"""Inside, nobody is asked: for the engine itself."""

_NO_VALUES = frozenset((
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "get_device", "is_floating_point", "is_complex",
    "requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook",
))  # fmt: skip
_VALUES = ("data", "T", "mT", "H", "mH", "real", "imag")
"""Properties that are the values, or views of them."""

_PLACES = frozenset((
    "data", "detach", "data_ptr", "untyped_storage", "storage_offset", "stride", "is_contiguous", "__len__", "__repr__",
))  # fmt: skip
"""What tells of the memory, or hands it over, and does not compute."""

_nan: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


class Hiding:
    """Hides parameters for one engine. `asked`: its method, called before an operation reads or writes a hidden one.

    With `lets_detach` what does not compute passes, too: views without a gradient, addresses, writes, copies.
    """

    def __init__(self, asked: Callable[[nn.Parameter], None], lets_detach: bool = False) -> None:
        self._asked = weakref.WeakMethod(asked)
        self.lets_detach = lets_detach
        self._classes: dict[type, type] = {}

    def hide(self, parameter: nn.Parameter, hole: torch.Tensor) -> None:
        """`hole`: its placeholder."""
        parameter.data = hole
        self.listen(parameter)

    def listen(self, parameter: nn.Parameter) -> None:
        """It has its values, and `asked` hears all the same."""
        kind = type(parameter)
        if kind not in self._classes:
            self._classes[kind] = _subclass(kind, self)
        parameter.__class__ = self._classes[kind]

    def show(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """It is a view of `values` again."""
        self.bare(parameter)
        parameter.data = values

    def bare(self, parameter: nn.Parameter) -> None:
        """It stays a NaN, and nobody hears of what is done to it."""
        if isinstance(parameter, _Hidden):
            parameter.__class__ = parameter.kind

    def bare_all(self, parameters: list[nn.Parameter], *_: Any) -> None:
        """The same of several."""
        for parameter in parameters:
            self.bare(parameter)

    def ask(self, parameter: nn.Parameter) -> None:
        """Whoever hides it shows it, or raises."""
        asked = self._asked()
        if asked is None:
            raise RuntimeError(
                "a parameter of a module under an engine is read, and the engine is gone, with its values"
            )
        asked(parameter)

    def is_asked(self, operation: Any) -> bool:
        """Whether a torch function, or an access to a property, is about the values."""
        name: str = operation.__name__
        if name in ("__get__", "__set__", "__delete__"):
            name = getattr(operation.__self__, "__name__", "data")
            return name in _VALUES and not (self.lets_detach and name in _PLACES)
        if name in _NO_VALUES or name.startswith("new_") or name.endswith("_like"):
            return False
        is_write = name.endswith("_") and not name.endswith("__")
        return not (self.lets_detach and (is_write or name in _PLACES))


def let_look(model: nn.Module, hiding: Hiding) -> None:
    """torch's TransformerEncoder looks at its first layer's parameters before that runs, to choose a way."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and len(module.layers):
            module.register_forward_pre_hook(Hook(partial(hiding.bare_all, list(module.layers[0].parameters()))))


class _Hidden:
    """What a hidden parameter is beside its own class, `kind`."""

    kind: type
    hiding: Hiding

    @classmethod
    def __torch_function__(cls, operation: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if cls.hiding.is_asked(operation):
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, cls):
                    cls.hiding.ask(leaf)  # type: ignore[arg-type]
            if not any(isinstance(leaf, cls) for leaf in pytree.tree_leaves((args, kwargs))):
                return operation(*args, **(kwargs or {}))
        with as_they_are():
            return operation(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if not self.hiding.lets_detach:
            self.hiding.ask(self)  # type: ignore[arg-type]
            return type(self).__deepcopy__(self, memo)  # it is of its own class again
        with as_they_are():
            copied = self.kind.__deepcopy__(self, memo)  # type: ignore[attr-defined]
        copied.__class__ = self.kind
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For pickle, and torch.save of a module: values that are brought, or refused; never the NaN."""
        kind = self.kind
        self.hiding.ask(self)  # type: ignore[arg-type]
        with as_they_are():
            return kind.__reduce_ex__(self, protocol)  # type: ignore[call-arg, arg-type]


def _subclass(kind: type, hiding: Hiding) -> type:
    return type(kind.__name__, (_Hidden, kind), {"kind": kind, "hiding": hiding, "__module__": kind.__module__})


def placeholder(parameter: nn.Parameter) -> torch.Tensor:
    """A NaN of the parameter's shape, without memory: whatever reads it shows that it did."""
    key = (parameter.dtype, parameter.device)
    if key not in _nan:
        _nan[key] = torch.full((), float("nan"), dtype=key[0], device=key[1])
    return _nan[key].expand(parameter.shape)


def restore_placeholders() -> None:
    """One of them was filled, which torch lets through: all are NaN again."""
    for nan in _nan.values():
        nan.fill_(float("nan"))


def is_placeholder(parameter: nn.Parameter) -> bool:
    """Whether it reads as such a NaN now."""
    with as_they_are():
        nan = _nan.get((parameter.dtype, parameter.device))
        return nan is not None and parameter.data_ptr() == nan.data_ptr()
