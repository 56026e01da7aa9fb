"""Shortcuts past per-operator work of torch on fake tensors that changes nothing here.

guard      against torch's compiler around each mode; a fake world does not run it
device     C++ asks a fake tensor for its device several times per operator through all modes: the first one answers
storages   that a tensor is set to; torch's cache would keep them alive
views      of one tensor; torch's cache key covers all properties of the arguments, which takes longer than the view
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
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
        for kind in _modes(TorchDispatchMode):
            guarded: Any = vars(kind).get("__torch_dispatch__")
            if hasattr(guarded, "__wrapped__"):
                stack.enter_context(mock.patch.object(kind, "__torch_dispatch__", _direct(guarded.__wrapped__)))
        yield


def view_of(fake: FakeTensorMode, func: Any, args: Any, named: dict[str, Any]) -> Any:
    """Returns an operator's views of a fake tensor, on its device."""
    device = args[0].fake_device
    with in_kernel_invocation_manager(fake):
        made = func(*args, **named)
    if isinstance(made, torch.Tensor):
        return FakeTensor(fake, made, device)
    return [FakeTensor(fake, one, device) for one in made]


def set_storage(fake: FakeTensorMode, func: Any, args: Any, named: dict[str, Any]) -> FakeTensor:
    """Runs an operator of SETS and returns its tensor."""
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
