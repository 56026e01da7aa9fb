"""Shortcuts past work that torch does per operator of a fake tensor, and that changes nothing here.

guard      around each mode, against torch's compiler, which no fake world runs
device     C++ asks a fake tensor for its device several times per operator, through all modes: the first one answers
storages   that a tensor is set to: torch's cache would keep them
views      of one tensor: torch keys its cache by everything that it knows of the arguments, which takes longer than
           the view itself
outputs    are cached by the shapes of the inputs. torch's own mode caches as well, under keys that hold all that a
           program may do to a tensor, and takes longer over a key than over the output. Here an operator is cached if
           it aliases nothing, its outputs have storages of their own, and all that it is given is a plain fake tensor,
           a number, or a word of torch's; any other runs as ever
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten

_DEVICE = torch.ops.prim.device.default

VIEWS = {
    _ATEN.alias.default, _ATEN.as_strided.default, _ATEN.detach.default, _ATEN.expand.default, _ATEN.permute.default,
    _ATEN.select.int, _ATEN.slice.Tensor, _ATEN.split.Tensor, _ATEN.t.default, _ATEN.transpose.int,
    _ATEN.unsqueeze.default, _ATEN.view.default,
}  # fmt: skip
"""Operators that return views of their one tensor and never the tensor itself."""


_OTHER_DTYPE = _ATEN.view.dtype


def is_view(func: Any, args: Any) -> bool:
    """Returns True for an operator of VIEWS, or one that reads the bytes as another dtype: of its own it returns the
    tensor itself.
    """
    return func in VIEWS or (func is _OTHER_DTYPE and args[1] is not args[0].dtype)


SETS = {_ATEN.set_.source_Storage, _ATEN.set_.source_Storage_storage_offset}
"""Operators that give a tensor another storage."""


@contextmanager
def modes_called_directly() -> Iterator[None]:
    """Calls every mode that is defined by now without torch's guard, and answers what a device is."""
    with ExitStack() as stack:
        for kind in _modes(TorchDispatchMode):
            guarded: Any = vars(kind).get("__torch_dispatch__")
            if hasattr(guarded, "__wrapped__"):
                stack.enter_context(mock.patch.object(kind, "__torch_dispatch__", _direct(guarded.__wrapped__)))
        yield


def view_of(fake: FakeTensorMode, func: Any, args: Any, named: dict[str, Any]) -> Any:
    """Returns the views that an operator of VIEWS makes of a fake tensor, on its device."""
    device = args[0].fake_device
    with in_kernel_invocation_manager(fake):
        made = func(*args, **named)
    if isinstance(made, torch.Tensor):
        return FakeTensor(fake, made, device)
    return [FakeTensor(fake, one, device) for one in made]


def set_storage(fake: FakeTensorMode, func: Any, args: Any, named: dict[str, Any]) -> FakeTensor:
    """Carries out an operator of SETS and returns its tensor."""
    with in_kernel_invocation_manager(fake):
        func(*args, **named)
    tensor: FakeTensor = args[0]
    return tensor


def _modes(kind: type) -> Iterator[type]:
    below: type
    for below in kind.__subclasses__():
        yield below
        yield from _modes(below)


def _direct(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(dispatch)
    def answer(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return args[0].device
        return dispatch(mode, func, types, args, kwargs)

    return answer


# -- outputs ---------------------------------------------------------------------------------------


WORDS = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of arguments that a key holds as they are."""

MOST_KEYS = 100_000
"""Keys beyond which all are forgotten: an argument may be a number that changes at each step."""

Made = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
"""A tensor of its own storage: shape, strides, dtype, device."""


class Unkeyed(Exception):
    """An argument that no key can hold."""


class Remembered:
    """The outputs of operators under one mode, by operator and arguments. None: it has to run."""

    def __init__(self, fake: FakeTensorMode) -> None:
        self._fake = fake
        self._known: dict[Any, tuple[type, list[Made | None]] | None] = {}

    def call(self, func: Any, args: Any, named: dict[str, Any]) -> Any:
        """Returns what the operator returns."""
        if not is_functional(func):
            return func(*args, **named)
        try:
            key = (func, torch.get_default_dtype(), _key_of(args), _key_of(list(named.items())))
        except Unkeyed:
            return func(*args, **named)
        if key in self._known:
            recipe = self._known[key]
            return func(*args, **named) if recipe is None else self._make(*recipe)
        found = func(*args, **named)
        if len(self._known) >= MOST_KEYS:
            self._known.clear()
        self._known[key] = _recipe_of(found, args)
        return found

    def _make(self, kind: type, outputs: list[Made | None]) -> Any:
        made = [None if one is None else self._tensor(*one) for one in outputs]
        return made[0] if kind is FakeTensor else kind(made)

    def _tensor(self, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
        with in_kernel_invocation_manager(self._fake):
            meta = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        return FakeTensor(self._fake, meta, device)


@cache
def is_functional(func: Any) -> bool:
    """Returns True for an operator of torch's own that aliases nothing and whose outputs' shapes no values decide."""
    schema = func._schema
    decided_by_values = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    return (
        func.namespace == "aten"
        and not decided_by_values & set(func.tags)
        and all(one.alias_info is None for one in (*schema.arguments, *schema.returns))
    )


def _key_of(one: Any) -> Any:
    if type(one) is FakeTensor:
        if one.constant is not None:
            raise Unkeyed
        return tuple(one.shape), one.stride(), one.dtype, one.fake_device
    if isinstance(one, tuple | list):
        return tuple(map(_key_of, one))
    if isinstance(one, WORDS):
        return type(one), one
    raise Unkeyed


def _recipe_of(found: Any, args: Any) -> tuple[type, list[Made | None]] | None:
    """Returns how to make an output again; None for one that is not made of tensors with storages of their own: some
    operators return what they were given, whatever their schema says.
    """
    outputs = [found] if isinstance(found, FakeTensor) else found
    if type(found) not in (FakeTensor, tuple, list):
        return None
    storages = list(_storages(outputs))
    if len(set(storages)) < len(storages) or set(storages) & set(_storages(args)):
        return None
    recipes = [_made(one) for one in outputs]
    return None if any(one is False for one in recipes) else (type(found), recipes)


def _storages(some: Any) -> Iterator[int]:
    for one in some:
        if isinstance(one, torch.Tensor):
            yield one.untyped_storage()._cdata
        elif isinstance(one, tuple | list):
            yield from _storages(one)


def _made(one: Any) -> Any:
    if one is None:
        return None
    if type(one) is not FakeTensor or one.constant is not None or one.layout != torch.strided:
        return False
    needed = torch._prims_common.compute_required_storage_length(one.shape, one.stride(), 0) * one.element_size()
    if one.storage_offset() or one.untyped_storage().nbytes() != needed or one.is_conj() or one.is_neg():
        return False
    return one.shape, one.stride(), one.dtype, one.fake_device
