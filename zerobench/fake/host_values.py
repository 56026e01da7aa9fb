"""Substitutes for values that the host branches on, since fake tensors have none.

flags     small integer tensors and single numbers made outside a model's own code are real, and so is everything
          computed only from real ones: which parameters had gradients, how many steps an optimizer has made
numbers   any other number read there is answered as in healthy training: no overflow, everything finite
values    read by a model's forward or backward do not exist: an error
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._mode_utils import no_dispatch

from .graphs import GraphMode
from .shortcuts import MISSED, SETS, Shortcuts, is_view

MOST_FLAGS = 1 << 22
"""Maximum bytes of a tensor of flags, which has a few per parameter of a model."""

_ATEN = torch.ops.aten

FACTORIES = {_ATEN.zeros.default, _ATEN.ones.default, _ATEN.full.default, _ATEN.empty.memory_format}

NUMBERS = {_ATEN.zeros.default, _ATEN.ones.default}
"""Factories whose single numbers of any dtype count as flags: an optimizer's counters and factors."""

ANY = {_ATEN.any.default, _ATEN.any.dim, _ATEN.any.dims}
"""Operators that test for something unusual; the answer is no."""

DIFFERS = {_ATEN.ne.Tensor, _ATEN.bitwise_or.Tensor}
"""Operators of the checks that nothing was written outside the engine; nothing was."""

INTEGERS = {torch.int32, torch.int64, torch.uint8, torch.bool}

CHANGE_STORAGE = {"aten::resize_", "aten::resize_as_", "aten::set_", "aten::unsafe_set_"}
"""In-place operators that change more than values."""

WITHOUT_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


class ValueNeededError(RuntimeError):
    """A model's forward or backward depends on values, which fake tensors do not have."""


class HostValues(GraphMode):
    """A mode between the probes and `fake`. `of_model`: set while a model's own code runs."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self._shortcuts = Shortcuts(fake)
        self.of_model = False

    def at_once(self, func: Any, args: Any, named: dict[str, Any]) -> Any:
        """Returns the output of an operator whose first argument is a fake tensor, if no other operator runs for it;
        otherwise MISSED. The probes above this mode ask for it, to spare most operators the way through every mode.
        """
        if not args or type(args[0]) is not FakeTensor:
            return MISSED
        if is_view(func, args):
            return self._shortcuts.view_of(func, args, named)
        if func in SETS:
            return self._shortcuts.set_storage(func, args, named)
        if writes_in_place(func):
            return args[0] if func._schema.returns else None
        return MISSED if func in ANY or func in DIFFERS else self._shortcuts.known(func, args, named)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if (out := self.at_once(func, args, named)) is not MISSED:
            return out
        kinds = set(kinds_of_tensors((*args, *named.values())))
        if kinds == {torch.Tensor} or (not kinds and self._makes_flags(func, args, named)):
            with no_dispatch():
                return func(*args, **named)
        if writes_in_place(func):
            return args[0] if func._schema.returns else None
        if func is _ATEN.any.all_out and type(named["out"]) is torch.Tensor:  # a flag stays as it is
            return named["out"]
        if func is _ATEN._local_scalar_dense.default:
            return self._read(args[0])
        if func is _ATEN.equal.default and not self.of_model:  # nothing has been written beside the engine
            return True
        try:
            out = self._shortcuts.run(func, args, named)
            if func in ANY or func in DIFFERS:
                out.is_unusual = True
            return out
        except WITHOUT_VALUES as error:
            raise ValueNeededError(needed(str(func))) from error

    def _makes_flags(self, func: Any, args: Any, named: dict[str, Any]) -> bool:
        dtype = named.get("dtype")
        in_ddp = func is _ATEN.empty.memory_format and dtype == torch.int32  # its reducer's, in the module's forward
        device = named.get("device")
        if func in NUMBERS and not self.of_model and not args[0]:
            return device is None or device.type == "cpu"
        if func not in FACTORIES or dtype not in INTEGERS or (self.of_model and not in_ddp):
            return False
        if func is _ATEN.empty.memory_format and dtype == torch.uint8:
            return False  # memory for tensors of another dtype
        size = prod(args[0]) * named["dtype"].itemsize
        return (device is None or device.type == "cpu") and size <= MOST_FLAGS

    def _read(self, tensor: torch.Tensor) -> Any:
        if isinstance(tensor, FakeTensor) and tensor.constant is not None:
            return tensor.constant.item()
        if self.of_model:
            raise ValueNeededError(needed("Tensor.item"))
        if tensor.dtype.is_floating_point:
            return 0.0
        return tensor.dtype == torch.bool and not hasattr(tensor, "is_unusual")


def has_values(tensor: torch.Tensor) -> bool:
    """Returns False for a fake tensor and for one on the meta device."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def kinds_of_tensors(arguments: Any) -> Iterator[type]:
    """Yields the type of every tensor among an operator's arguments, including tensors in lists."""
    for one in arguments:
        if isinstance(one, torch.Tensor):
            yield type(one)
        elif isinstance(one, list | tuple):
            yield from kinds_of_tensors(one)


@cache
def writes_in_place(func: Any) -> bool:
    """Whether an operator only writes values into its first argument, or into a list of tensors, which changes nothing
    for fake tensors; FSDP2's own write into tensors that it has made large enough.
    """
    schema = func._schema
    if func.namespace == "fsdp":
        return not schema.returns
    if func.namespace != "aten" or torch.Tag.inplace_view in func.tags or schema.name in CHANGE_STORAGE:
        return False
    written = [one.alias_info is not None and one.alias_info.is_write for one in schema.arguments]
    if not written or not written[0]:
        return False
    plain = schema.name.split("::")[1].endswith("_")
    return plain and (not schema.returns or (len(schema.returns) == 1 and sum(written) == 1))


def needed(operator: str) -> str:
    """Returns an error message for an operator that needs values."""
    return (
        f"tensors=fake: the model reads values in its forward or backward ({operator}), and fake tensors have none:"
        " its allocations depend on the data; use tensors=real"
    )
