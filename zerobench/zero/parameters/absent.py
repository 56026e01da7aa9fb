"""Hidden parameters, whose values are absent: not yet gathered (stages 1 and 2), or sharded (stage 3).

A hidden parameter is a NaN of its shape, and of a subclass of its class, which intercepts every operation on it: the
engine then gathers the values, or raises an error. Operations that do not read values (shapes, flags, hooks,
gradients) pass through. A shown parameter has its own class again, without interception, so that choices that torch
makes by the type of its inputs (its layers' fast paths) are the same as without an engine.

C++ code that reads memory directly is not intercepted, and reads the NaN.
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
"""A context without interception, for the engine itself."""

_NO_VALUES = frozenset((
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "get_device", "is_floating_point", "is_complex",
    "is_inference", "requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook",
))  # fmt: skip
_VALUES = ("data", "T", "mT", "H", "mH", "real", "imag")
"""Properties that return the values, or views of them."""

_PLACES = frozenset((
    "data_ptr", "untyped_storage", "storage_offset", "stride", "is_contiguous", "__len__", "__repr__",
))  # fmt: skip
"""Methods that describe the memory, and neither compute nor return a tensor."""

_DETACHED = frozenset(("data", "detach"))
"""The ways to get the values without a gradient."""

_nan: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


class Hiding:
    """Hides parameters for one engine. `asked`: the engine's method, called before an operation reads or writes a
    hidden parameter.

    `lets_write`: addresses, a new `.data`, and writes to a parameter that has memory (writes.py) pass
    through; `asked` is then called for a write to one without memory. `lets_detach`: reads without a gradient pass too.
    `answered`: the engine's method that gets the parameters and the result of each read, and returns the result.
    """

    def __init__(
        self, asked: Callable[..., None], lets_write: bool = False, lets_detach: bool = False,
        answered: Callable[[list[Any], Any], Any] | None = None,
    ) -> None:  # fmt: skip
        self._asked = weakref.WeakMethod(asked)
        self._answered: Any = weakref.WeakMethod(answered) if answered else lambda: None
        self.lets_write, self.lets_detach = lets_write, lets_detach
        self._classes: dict[type, type] = {}

    def hide(self, parameter: nn.Parameter, hole: torch.Tensor) -> None:
        """Hides `parameter`. `hole`: its placeholder."""
        parameter.data = hole
        self.listen(parameter)

    def listen(self, parameter: nn.Parameter) -> None:
        """Intercepts operations on `parameter` although it has its values."""
        kind = type(parameter)
        if kind not in self._classes:
            self._classes[kind] = type(
                kind.__name__, (_Hidden, kind), {"kind": kind, "hiding": self, "__module__": kind.__module__}
            )
        parameter.__class__ = self._classes[kind]

    def show(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """Makes `parameter` a view of `values` again."""
        self.bare(parameter)
        parameter.data = values

    def bare(self, parameter: nn.Parameter) -> None:
        """Removes the interception from `parameter`, which keeps its data: its placeholder or its values."""
        if isinstance(parameter, _Hidden):
            parameter.__class__ = parameter.kind

    def bare_all(self, parameters: list[nn.Parameter], *_: Any) -> None:
        """Removes the interception from several parameters."""
        for parameter in parameters:
            self.bare(parameter)

    def ask(self, parameter: nn.Parameter, writes: bool = False) -> None:
        """Asks the engine that hides `parameter` to show it, for an operation that reads it or, with `writes`, writes
        to it. Raises the engine's error if it refuses, and RuntimeError if the engine no longer exists.
        """
        asked = self._asked()
        if asked is None:
            raise RuntimeError(
                "a parameter of a module under an engine is read, and the engine is gone, with its values"
            )
        asked(parameter, writes) if writes else asked(parameter)

    def answer(self, read: list[Any], result: Any) -> Any:
        """Returns the result of a read of the parameters `read`."""
        answered = self._answered()
        return result if answered is None else answered(read, result)

    def is_asked(self, operation: Any) -> bool:
        """Returns True if a torch function, or a property, reads or writes values."""
        name: str = operation.__name__
        if name == "__set__" and self.lets_write:
            return False
        if name in ("__get__", "__set__", "__delete__"):
            name = getattr(operation.__self__, "__name__", "data")
            if name not in _VALUES:
                return False
        if name in _NO_VALUES or name.startswith("new_") or name.endswith("_like"):
            return False
        passes = self.lets_write and (is_write(operation) or name in _PLACES)
        return not (passes or (self.lets_detach and name in _DETACHED))


def is_write(operation: Any) -> bool:
    """Returns True for a torch function that writes in place, judged by its name."""
    name: str = operation.__name__
    return name.endswith("_") and not name.endswith("__") and name not in _NO_VALUES


def let_look(model: nn.Module, hiding: Hiding) -> None:
    """Lets torch's TransformerEncoder, to choose its path, read its first layer's parameters before the layer runs."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and len(module.layers):
            module.register_forward_pre_hook(Hook(partial(hiding.bare_all, list(module.layers[0].parameters()))))


class _Hidden:
    """The interception of a hidden parameter, added to its own class, `kind`."""

    kind: type
    hiding: Hiding

    @classmethod
    def __torch_function__(cls, operation: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read: list[Any] = []
        if cls.hiding.is_asked(operation):
            read = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
            for leaf in read:
                cls.hiding.ask(leaf)
            if not any(isinstance(leaf, cls) for leaf in read):
                return operation(*args, **(kwargs or {}))
        elif is_write(operation):
            written = {id(leaf) for leaf in pytree.tree_leaves(args[:1] or kwargs)}  # nn.init names all its arguments
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, cls) and is_placeholder(leaf):  # type: ignore[arg-type]
                    cls.hiding.ask(leaf, writes=id(leaf) in written)  # type: ignore[arg-type]
        with as_they_are():
            result = operation(*args, **(kwargs or {}))
            return cls.hiding.answer(read, result) if read else result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copies the values as a parameter of its own class, or raises; never copies the NaN."""
        kind: Any = self.kind
        self.hiding.ask(self)  # type: ignore[arg-type]
        with as_they_are():
            copied = kind.__deepcopy__(self, memo)
        copied.__class__ = kind
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Gathers the values for pickle, as in torch.save of a module, or raises; never pickles the NaN."""
        kind = self.kind
        self.hiding.ask(self)  # type: ignore[arg-type]
        with as_they_are():
            return kind.__reduce_ex__(self, protocol)  # type: ignore[call-arg, arg-type]


def absent_value(dtype: torch.dtype) -> float:
    """Returns NaN, or an integer dtype's largest value."""
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def placeholder(parameter: nn.Parameter) -> torch.Tensor:
    """Returns a NaN of the parameter's shape, without memory. Reads of absent values yield NaN."""
    key = (parameter.dtype, parameter.device)
    if key not in _nan:
        _nan[key] = torch.full((), absent_value(key[0]), dtype=key[0], device=key[1])
    return _nan[key].expand(parameter.shape)


def restore_placeholders() -> None:
    """Makes all placeholders NaN again after one was filled, which torch permits."""
    for nan in _nan.values():
        nan.fill_(absent_value(nan.dtype))


def is_placeholder(parameter: nn.Parameter) -> bool:
    """Returns True if the parameter is currently such a NaN."""
    with as_they_are():
        nan = _nan.get((parameter.dtype, parameter.device))
        return nan is not None and parameter.data_ptr() == nan.data_ptr()
