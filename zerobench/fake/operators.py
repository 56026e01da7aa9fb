"""Operators on fake tensors: shortcuts past work of torch that changes nothing here, and substitutes for values.

guard      torch guards each mode against its compiler; a fake world does not run it, so the guard is skipped
device     C++ asks a fake tensor for its device several times per operator through all modes: the first mode answers
storages   setting a tensor's storage bypasses torch's cache, which would keep the storages alive
views      views bypass it, too: its key covers all properties of the arguments, which takes longer than the view
shapes     of new outputs are recorded, as equal layers ask for them again and again; torch's cache takes three times as
           long for its key and for its tensors

The host branches on values, which fake tensors do not have:

flags      small integer tensors and single numbers made outside a model's own code are real, and so is everything
           computed only from real ones: which parameters had gradients, how many steps an optimizer has made
numbers    any other number read there is answered as in healthy training: no overflow, everything finite
values     read by a model's forward or backward do not exist: an error
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from math import prod
from typing import Any, ClassVar, NamedTuple, cast
from unittest import mock

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from .compiler import GraphMode, kinds_below

_ATEN = torch.ops.aten

_DEVICE, _OTHER_DTYPE = torch.ops.prim.device.default, _ATEN.view.dtype

_WAIT = torch.ops._c10d_functional.wait_tensor.default

VIEWS = {
    _ATEN.alias.default, _ATEN.as_strided.default, _ATEN.detach.default, _ATEN.expand.default, _ATEN.permute.default,
    _ATEN.select.int, _ATEN.slice.Tensor, _ATEN.split.Tensor, _ATEN.split_with_sizes.default, _ATEN.t.default,
    _ATEN.transpose.int, _ATEN.unbind.int, _ATEN.unsqueeze.default, _ATEN.view.default, _ATEN._unsafe_view.default,
}  # fmt: skip
"""Operators that return views of their single tensor and never the tensor itself."""

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
    """All but the values of a tensor that begins at its storage's first element, and fills it."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Shortcuts:
    """Runs operators on fake tensors of `fake` with less work than torch."""

    _layouts: ClassVar[dict[Any, Any]] = {}
    """Operator and arguments -> the layout of its output (a list for a tuple), IN_OUT, or None if they differ. Those of
    all worlds of a process, whose models are similar."""

    def __init__(self, fake: FakeTensorMode) -> None:
        self.fake = fake
        self._in_kernel = InKernel(fake)
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def view_of(self, func: Any, args: Any, named: dict[str, Any]) -> Any:
        """Returns an operator's views of a fake tensor, on its device."""
        device = args[0].fake_device
        with self._in_kernel:
            made = func(*args, **named)
        if isinstance(made, torch.Tensor):
            return self._wrap(made, device)
        return [self._wrap(view, device) for view in made]

    def set_storage(self, func: Any, args: Any, named: dict[str, Any]) -> FakeTensor:
        """Runs an operator of SETS and returns its tensor."""
        with self._in_kernel:
            func(*args, **named)
        tensor: FakeTensor = args[0]
        return tensor

    def recorded(self, func: Any, args: Any, named: dict[str, Any]) -> Any:
        """Returns an operator's output if its layout was recorded, otherwise MISSED."""
        return self._output_of(_key_of(func, args, named), named)

    def _output_of(self, key: Any, named: dict[str, Any]) -> Any:
        layout = self._layouts.get(key) if key is not None else None
        if layout is None:
            return MISSED
        if layout is IN_OUT:
            return named["out"]
        return tuple(map(self._make, layout)) if isinstance(layout, list) else self._make(layout)

    def run(self, func: Any, args: Any, named: dict[str, Any]) -> Any:
        """Returns an operator's output. Its layout is recorded once it has run with equal arguments."""
        if func.namespace in WITHOUT_MODE:
            with self._in_kernel:
                return func(*args, **named)
        if func is _WAIT or (func.namespace == _WAIT.namespace and "out" in named):
            return named.get("out", args[0])  # as the backend does; torch's shape functions return new tensors
        key = _key_of(func, args, named)
        if (out := self._output_of(key, named)) is not MISSED:
            return out
        if key is None or key in self._layouts:
            return func(*args, **named)
        target = named.get("out")
        before = _extent_of(target)
        out = func(*args, **named)
        if out is target:
            self._layouts[key] = IN_OUT if _extent_of(target) == before else None
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


WITHOUT_MODE = ("c10d", "profiler")
"""Namespaces of operators that need no FakeTensorMode: the fake process group returns its tensors; marks have none."""

MISSED = object()
"""Stands for the output of an operator that has to run."""

IN_OUT = "out"
"""Stands for the layout of an operator that writes into its argument `out` and leaves it as large as it was."""


@cache
def _by_layouts(func: Any) -> bool:
    """Whether an operator returns tensors, new ones or its `out`, whose layouts depend on those of its arguments."""
    schema, tags = func._schema, func.tags
    aliases = [argument.name for argument in schema.arguments if argument.alias_info is not None]
    by_values = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(tags)
    numbers_and_tensors = all(str(value.type) in ("Tensor", "int", "SymInt") for value in schema.returns)
    return func.namespace == "aten" and numbers_and_tensors and aliases in ([], ["out"]) and not by_values


def _key_of(func: Any, args: Any, named: dict[str, Any]) -> Any:
    """Returns a key of the arguments' layouts; None if the operator's output depends on more than these."""
    if not _by_layouts(func):
        return None
    key: list[Any] = [func, torch.get_default_dtype() if not args or type(args[0]) is not FakeTensor else None]
    if not all(_add_to(key, argument) for argument in args):
        return None
    for name, argument in named.items():
        key.append(name)
        if not _add_to(key, argument):
            return None
    return tuple(key)


def _add_to(key: list[Any], argument: Any) -> bool:
    """Adds an argument to a key; returns False if the key cannot distinguish it from others."""
    kind = type(argument)
    if kind is FakeTensor:
        key += (argument.shape, argument.stride(), argument.dtype, argument.fake_device)
        is_lazy = argument.is_conj() or argument.is_neg()
        return argument.constant is None and argument.layout is torch.strided and not is_lazy
    if kind in (list, tuple):
        key.append(len(argument))
        return all(_add_to(key, part) for part in argument)
    key += (kind, argument)  # the kind too: 1, 1.0 and True are equal
    return argument is None or kind in PLAIN


PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
"""Types of arguments that are keys themselves."""


def _extent_of(out: Any) -> Any:
    """Returns the properties of `out` that an operator could change, apart from values."""
    return None if out is None else (out.shape, out.stride(), out.storage_offset(), out.untyped_storage().nbytes())


def _layout_of(out: Any, args: Any) -> TensorLayout | None:
    """Returns the layout of an operator's output; None if it is a part of its storage, or in the storage of an
    argument, as the output of _unsafe_view is in spite of its schema.
    """
    if type(out) is not FakeTensor or out.constant is not None or out.storage_offset():
        return None
    storage = out.untyped_storage()
    if any(type(arg) is FakeTensor and arg.untyped_storage()._cdata == storage._cdata for arg in args):
        return None
    last = sum((n - 1) * step for n, step in zip(out.shape, out.stride(), strict=True))
    if storage.nbytes() != (last + 1 if out.numel() else 0) * out.element_size():
        return None
    return TensorLayout(out.shape, out.stride(), out.dtype, out.fake_device)


def _layouts_of(out: tuple[Any, ...], args: Any) -> list[Any] | None:
    """Returns the layouts of an operator's outputs, numbers as they are; None if a layout does not tell all of one."""
    tensors = [part for part in out if isinstance(part, torch.Tensor)]
    layouts = [_layout_of(tensor, args) for tensor in tensors]
    shared = len({tensor.untyped_storage()._cdata for tensor in tensors}) < len(tensors)
    if shared or None in layouts or not all(part is None or type(part) in (FakeTensor, int) for part in out):
        return None
    made = iter(layouts)
    return [next(made) if isinstance(part, torch.Tensor) else part for part in out]


def _direct(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(dispatch)
    def answer(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return args[0].device
        return dispatch(mode, func, types, args, kwargs)

    return answer


# -- values ----------------------------------------------------------------------------------------


MOST_FLAGS = 1 << 22
"""Maximum bytes of a tensor of flags, which has a few per parameter of a model."""

FACTORIES = {_ATEN.zeros.default, _ATEN.ones.default, _ATEN.full.default, _ATEN.empty.memory_format}

NUMBERS = {_ATEN.zeros.default, _ATEN.ones.default}
"""Factories whose single numbers of any dtype count as flags: an optimizer's counters and factors."""

ANY = {_ATEN.any.default, _ATEN.any.dim, _ATEN.any.dims}
"""Operators that test for an anomaly, such as an overflow; on fake tensors they find none."""

DIFFERS = {_ATEN.ne.Tensor, _ATEN.bitwise_or.Tensor}
"""Operators that check for writes outside the engine; on fake tensors they find none."""

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
        if func in VIEWS or (func is _OTHER_DTYPE and args[1] is not args[0].dtype):  # else it is the tensor itself
            return self._shortcuts.view_of(func, args, named)
        if func in SETS:
            return self._shortcuts.set_storage(func, args, named)
        if writes_in_place(func):
            return args[0] if func._schema.returns else None
        return MISSED if func in ANY or func in DIFFERS else self._shortcuts.recorded(func, args, named)

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
        if func is _ATEN.equal.default and not self.of_model:  # nothing has been written outside the engine
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
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield type(argument)
        elif isinstance(argument, list | tuple):
            yield from kinds_of_tensors(argument)


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
    aliases = [argument.alias_info for argument in schema.arguments]
    written = [alias is not None and alias.is_write for alias in aliases]
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
