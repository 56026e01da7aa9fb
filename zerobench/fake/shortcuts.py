"""Shortcuts past per-operator work of torch on fake tensors that changes nothing here.

guard      against torch's compiler around each mode; a fake world does not run it
device     C++ asks a fake tensor for its device several times per operator through all modes: the first one answers
storages   that a tensor is set to; torch's cache would keep them alive
views      of one tensor; torch's cache key covers all properties of the arguments, which takes longer than the view
shapes     of an operator's new outputs, which equal layers ask for again and again; torch's cache takes three times as
           long for its key and for its tensors
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from typing import Any, NamedTuple, cast
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from .graphs import kinds_below

_ATEN = torch.ops.aten

_DEVICE = torch.ops.prim.device.default

_WAIT = torch.ops._c10d_functional.wait_tensor.default

VIEWS = {
    _ATEN.alias.default, _ATEN.as_strided.default, _ATEN.detach.default, _ATEN.expand.default, _ATEN.permute.default,
    _ATEN.select.int, _ATEN.slice.Tensor, _ATEN.split.Tensor, _ATEN.split_with_sizes.default, _ATEN.t.default,
    _ATEN.transpose.int, _ATEN.unbind.int, _ATEN.unsqueeze.default, _ATEN.view.default, _ATEN._unsafe_view.default,
}  # fmt: skip
"""Operators that return views of their single tensor and never the tensor itself."""


_OTHER_DTYPE = _ATEN.view.dtype


def is_view(func: Any, args: Any) -> bool:
    """Whether the operator is in VIEWS, or views the bytes as another dtype; for its own dtype it would return the
    tensor itself.
    """
    return func in VIEWS or (func is _OTHER_DTYPE and args[1] is not args[0].dtype)


SETS = {_ATEN.set_.source_Storage, _ATEN.set_.source_Storage_storage_offset}
"""Operators that give a tensor another storage."""


@contextmanager
def modes_called_directly() -> Iterator[None]:
    """Calls every mode defined so far without torch's guard, and answers device queries directly."""
    with ExitStack() as stack:
        for kind in kinds_below(TorchDispatchMode):
            guarded: Any = vars(kind).get("__torch_dispatch__")
            if hasattr(guarded, "__wrapped__"):
                stack.enter_context(mock.patch.object(kind, "__torch_dispatch__", _direct(guarded.__wrapped__)))
        yield


def represented_device(tensor: torch.Tensor) -> torch.device:
    """Returns the device that a fake tensor stands for; of another tensor its own."""
    return tensor.fake_device if type(tensor) is FakeTensor else tensor.device


class InKernel:
    """Runs operators on the meta tensors below fake ones. torch's in_kernel_invocation_manager does the same, but as a
    generator, which takes longer than most operators here.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        self._fake = fake
        self._guards: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        guards = torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard()
        for guard in guards:
            guard.__enter__()
        self._guards.append(guards)
        self._fake.in_kernel_invocation = True
        torch._C._set_meta_in_tls_dispatch_include(True)

    def __exit__(self, *error: object) -> None:
        self._fake.in_kernel_invocation = False
        for guard in reversed(self._guards.pop()):
            guard.__exit__(*error)


class TensorLayout(NamedTuple):
    """What a tensor that begins at its storage's first element, and fills it, has beside its values."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Shortcuts:
    """Runs operators on fake tensors of `fake` with less work than torch."""

    def __init__(self, fake: FakeTensorMode) -> None:
        self.fake = fake
        self._in_kernel = InKernel(fake)
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        self._layouts: dict[Any, Any] = {}
        """Operator and arguments -> the layout of its output (a list for a tuple), IN_OUT, or None if they differ."""

    def view_of(self, func: Any, args: Any, named: dict[str, Any]) -> Any:
        """Returns an operator's views of a fake tensor, on its device."""
        device = args[0].fake_device
        with self._in_kernel:
            made = func(*args, **named)
        if isinstance(made, torch.Tensor):
            return self._wrap(made, device)
        return [self._wrap(one, device) for one in made]

    def set_storage(self, func: Any, args: Any, named: dict[str, Any]) -> FakeTensor:
        """Runs an operator of SETS and returns its tensor."""
        with self._in_kernel:
            func(*args, **named)
        tensor: FakeTensor = args[0]
        return tensor

    def known(self, func: Any, args: Any, named: dict[str, Any]) -> Any:
        """Returns an operator's output if its layout is known, otherwise MISSED."""
        return self._output_of(_key_of(func, args, named), named)

    def _output_of(self, key: Any, named: dict[str, Any]) -> Any:
        known = self._layouts.get(key) if key is not None else None
        if known is None:
            return MISSED
        if known is IN_OUT:
            return named["out"]
        return tuple(map(self._make, known)) if isinstance(known, list) else self._make(known)

    def run(self, func: Any, args: Any, named: dict[str, Any]) -> Any:
        """Returns an operator's output. Its layout is known if the operator has run with equal arguments."""
        if func.namespace in BESIDE_TENSORS:
            with self._in_kernel:
                return func(*args, **named)
        if func is _WAIT or (func.namespace == _WAIT.namespace and "out" in named):
            return named.get("out", args[0])  # as the backend does; torch's shape functions return new tensors
        key = _key_of(func, args, named)
        if (out := self._output_of(key, named)) is not MISSED:
            return out
        if key is None or key in self._layouts:
            return func(*args, **named)
        given = named.get("out")
        before = _extent_of(given)
        out = func(*args, **named)
        if out is given:
            self._layouts[key] = IN_OUT if _extent_of(given) == before else None
        elif type(out) is tuple:
            self._layouts[key] = _layouts_of(out, args)
        else:
            self._layouts[key] = _layout_of(out, args)
        return out

    def _make(self, part: Any) -> Any:
        """Returns a new tensor of a layout; a number as it is."""
        if type(part) is not TensorLayout:
            return part
        with self._in_kernel:
            made = torch.empty_strided(part.shape, part.strides, dtype=part.dtype, device="meta")
        return self._wrap(made, part.device)

    def _wrap(self, made: torch.Tensor, device: torch.device) -> FakeTensor:
        """Returns FakeTensor(fake, made, device): its class, with the attributes that the first one on `device` got."""
        if device not in self._attributes:
            self._attributes[device] = vars(FakeTensor(self.fake, torch.empty(0, device="meta"), device)).copy()
        tensor: Any = torch.Tensor._make_subclass(
            FakeTensor, made, made.requires_grad, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(tensor)
        vars(tensor).update(self._attributes[device])
        return cast(FakeTensor, tensor)


BESIDE_TENSORS = ("c10d", "profiler")
"""Namespaces of operators that need no FakeTensorMode: the fake process group returns its tensors; marks have none."""

MISSED = object()
"""Stands for the output of an operator that has to run."""

IN_OUT = "out"
"""Stands for the layout of an operator that writes into its argument `out` and leaves it as large as it was."""


@cache
def _by_layouts(func: Any) -> bool:
    """Whether an operator returns tensors, new ones or its `out`, whose layouts depend on those of its arguments."""
    schema, tags = func._schema, func.tags
    aliases = [one.name for one in schema.arguments if one.alias_info is not None]
    by_values = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(tags)
    numbers_and_tensors = all(str(one.type) in ("Tensor", "int", "SymInt") for one in schema.returns)
    return func.namespace == "aten" and numbers_and_tensors and aliases in ([], ["out"]) and not by_values


def _key_of(func: Any, args: Any, named: dict[str, Any]) -> Any:
    """Returns what an operator's output depends on; None if that is more than the layouts of its arguments."""
    if not _by_layouts(func):
        return None
    key: list[Any] = [func, torch.get_default_dtype() if not args or type(args[0]) is not FakeTensor else None]
    if not all(_add_to(key, one) for one in args):
        return None
    for name, one in named.items():
        key.append(name)
        if not _add_to(key, one):
            return None
    return tuple(key)


def _add_to(key: list[Any], argument: Any) -> bool:
    """Adds an argument to a key; returns False if the key cannot tell it from others."""
    kind = type(argument)
    if kind is FakeTensor:
        key += (argument.shape, argument.stride(), argument.dtype, argument.fake_device)
        is_lazy = argument.is_conj() or argument.is_neg()
        return argument.constant is None and argument.layout is torch.strided and not is_lazy
    if kind in (list, tuple):
        key.append(len(argument))
        return all(_add_to(key, one) for one in argument)
    key += (kind, argument)  # the kind too: 1, 1.0 and True are equal
    return argument is None or kind in PLAIN


PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
"""Types of arguments that are keys themselves."""


def _extent_of(out: Any) -> Any:
    """Returns what an operator with `out` could change of it other than values."""
    return None if out is None else (out.shape, out.stride(), out.storage_offset(), out.untyped_storage().nbytes())


def _layout_of(out: Any, args: Any) -> TensorLayout | None:
    """Returns the layout of an operator's output; None if it is a part of its storage, or in the storage of an
    argument, as the output of _unsafe_view is in spite of its schema.
    """
    if type(out) is not FakeTensor or out.constant is not None or out.storage_offset():
        return None
    storage = out.untyped_storage()
    if any(type(one) is FakeTensor and one.untyped_storage()._cdata == storage._cdata for one in args):
        return None
    last = sum((n - 1) * step for n, step in zip(out.shape, out.stride(), strict=True))
    if storage.nbytes() != (last + 1 if out.numel() else 0) * out.element_size():
        return None
    return TensorLayout(out.shape, out.stride(), out.dtype, out.fake_device)


def _layouts_of(out: tuple[Any, ...], args: Any) -> list[Any] | None:
    """Returns the layouts of an operator's outputs, numbers as they are; None if a layout does not tell all of one."""
    tensors = [one for one in out if isinstance(one, torch.Tensor)]
    layouts = [_layout_of(one, args) for one in tensors]
    shared = len({one.untyped_storage()._cdata for one in tensors}) < len(tensors)
    if shared or None in layouts or not all(one is None or type(one) in (FakeTensor, int) for one in out):
        return None
    made = iter(layouts)
    return [next(made) if isinstance(one, torch.Tensor) else one for one in out]


def _direct(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(dispatch)
    def answer(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return args[0].device
        return dispatch(mode, func, types, args, kwargs)

    return answer
