"""Accesses to parameters by others than the engine: reads of absent values are intercepted, and writes are found.

[Note: hidden parameters]
A *hidden* parameter, whose values are absent, not yet gathered (stages 1 and 2) or sharded (stage 3), is a NaN of its
shape, and of a subclass of its class, which intercepts every operation on it: the engine then gathers the values, or
raises an error. Operations that do not read values (shapes, flags, hooks, gradients) pass through. A shown parameter
has its own class again, without interception, so that choices that torch makes by the type of its inputs (its layers'
fast paths) are the same as without an engine. C++ code that reads memory directly is not intercepted, and reads the
NaN.

[Note: how writes are found]
Autograd's version counters: every in-place operation increments them. A detached tensor shares the counter of its
source, a tensor from `.data` has its own. (`_version` is torch-private; tested.)

Fingerprints, for writes inside full_parameters() that counters do not see (`.data`, NumPy's views, other libraries'
kernels), and for values that differ between ranks: a number that changes when a tensor's values change. It depends on
the bits and the position of every element; two different tensors have equal ones with a probability of about 2^-64.

Flags, on a GPU, where the host must not wait for a comparison: the kernel that updates the masters (optim/one_pass.py)
reads each parameter that it is about to replace, and sets the segment's flag if the parameter is not the rounded
master. The write is then lost. The next step raises an error, or the one after it if the flags have not arrived yet; if
no such step follows, a message is printed to stderr at the engine's end.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
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
    "backward", "grad",  # torch.autograd's, which get parameters as inputs
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
    """Hides parameters for one engine. `on_access`: the engine's method, called before an operation reads or writes a
    hidden parameter; None: every parameter has its values.

    `lets_write`: lets pass data_ptr() and the like, assignments to `.data`, and writes to a parameter that has memory
    (writes.py); a write to one without memory still calls `on_access`. `lets_detach`: lets reads without gradient pass.
    `on_read`: the engine's method that gets the parameters and the result of each read, and returns the result.
    """

    def __init__(
        self, on_access: Callable[..., None] | None, lets_write: bool = False, lets_detach: bool = False,
        on_read: Callable[[list[Any], Any], Any] | None = None,
    ) -> None:  # fmt: skip
        self._on_access = None if on_access is None else weakref.WeakMethod(on_access)
        self.on_read: Any = weakref.WeakMethod(on_read) if on_read else lambda: None
        self.lets_write, self.lets_detach = lets_write, lets_detach
        self._classes: dict[type, type] = {}

    def hide(self, parameter: nn.Parameter, hole: torch.Tensor) -> None:
        """Hides `parameter`. `hole`: its placeholder."""
        parameter.data = hole
        self.intercept(parameter)

    def intercept(self, parameter: nn.Parameter) -> None:
        """Intercepts operations on `parameter` although it has its values."""
        self.stop_intercepting([parameter])  # also another's, such as of a forward that an exception has ended
        kind = type(parameter)
        if kind not in self._classes:
            self._classes[kind] = type(
                kind.__name__, (_Hidden, kind), {"kind": kind, "hiding": self, "__module__": kind.__module__}
            )
        parameter.__class__ = self._classes[kind]

    def show(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """Makes `parameter` a view of `values` again."""
        self.stop_intercepting([parameter])
        parameter.data = values

    def stop_intercepting(self, parameters: Iterable[nn.Parameter], *_: Any) -> None:
        """Removes the interception; the parameters keep their data: placeholders or values."""
        for parameter in parameters:
            if isinstance(parameter, _Hidden):
                parameter.__class__ = parameter.kind

    def request(self, parameter: nn.Parameter, writes: bool = False) -> None:
        """Asks the engine to show `parameter`, to be read or written. Raises its error, or that it is gone."""
        if self._on_access is None:
            return
        on_access = self._on_access()
        if on_access is None:
            raise RuntimeError(
                "a parameter of a module under an engine is read, and the engine is gone, with its values"
            )
        on_access(parameter, writes) if writes else on_access(parameter)

    def accesses_values(self, operation: Any) -> bool:
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


def allow_fast_path_checks(model: nn.Module, hiding: Hiding) -> None:
    """Lets torch's TransformerEncoder, to choose its path, read its first layer's parameters before the layer runs."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and len(module.layers):
            module.register_forward_pre_hook(Hook(partial(hiding.stop_intercepting, [*module.layers[0].parameters()])))


class _Hidden:
    """The interception of a hidden parameter, added to its own class, `kind`."""

    kind: type
    hiding: Hiding

    @classmethod
    def __torch_function__(cls, operation: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read: list[Any] = []
        if cls.hiding.accesses_values(operation):
            read = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
            for leaf in read:
                cls.hiding.request(leaf)
            if not any(isinstance(leaf, cls) for leaf in read):
                return operation(*args, **(kwargs or {}))
        elif is_write(operation):
            written = {id(leaf) for leaf in pytree.tree_leaves(args[:1] or kwargs)}  # nn.init names all its arguments
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, cls) and is_placeholder(leaf):  # type: ignore[arg-type]
                    cls.hiding.request(leaf, writes=id(leaf) in written)  # type: ignore[arg-type]
        with as_they_are():
            result = operation(*args, **(kwargs or {}))
            on_read = cls.hiding.on_read() if read else None
            return result if on_read is None else on_read(read, result)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copies the values as a parameter of its own class, or raises; never copies the NaN."""
        kind: Any = self.kind
        self.hiding.request(self)  # type: ignore[arg-type]
        with as_they_are():
            copied = kind.__deepcopy__(self, memo)
        copied.__class__ = kind
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Gathers the values for pickle, as in torch.save of a module, or raises; never pickles the NaN."""
        kind = self.kind
        self.hiding.request(self)  # type: ignore[arg-type]
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


class Versions:
    """The versions of `parameters` at the last call of `note`."""

    def __init__(self, parameters: Sequence[nn.Parameter] = ()) -> None:
        self.parameters = parameters
        self.note()

    def note(self) -> None:
        """Records the current versions."""
        self._noted = self._now()

    @property
    def have_moved(self) -> bool:
        """True after a write to any parameter, until the next `note` or `written`."""
        return self._now() != self._noted

    def _now(self) -> list[int]:
        with as_they_are():
            return [parameter._version for parameter in self.parameters]

    def written(self) -> list[nn.Parameter]:
        """Returns the parameters that have been written to since the last `note`."""
        now = self._now()
        if now == self._noted:
            return []
        before, self._noted = self._noted, now
        return [p for p, old, new in zip(self.parameters, before, now, strict=True) if old != new]


CHUNKS = {"cpu": 2**12}
"""Device type -> 64-bit numbers that are mixed at a time, so that a fingerprint needs 64 KiB of extra memory."""

LARGE_CHUNK = 2**20
"""The same on other devices, whose kernels take long to launch: 16 MiB of extra memory."""

_MULTIPLIER = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: odd, with no pattern in its bits


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the fingerprint of a contiguous (numel,) tensor of whole 64-bit words: int64, 0-dim, on its device."""
    whole = tensor.view(torch.int64)
    chunk = max(1, min(CHUNKS.get(tensor.device.type, LARGE_CHUNK), whole.numel()))
    weights = _weights(chunk, tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in whole.split(chunk):
        mixed = part >> 29  # so that the highest bits, signs for example, reach the lower ones
        mixed.bitwise_xor_(part).mul_(weights[: part.numel()])
        total.mul_(_MULTIPLIER).add_(mixed.sum())
    return total


def _weights(chunk: int, device: torch.device) -> torch.Tensor:
    numbers = torch.arange(1, chunk + 1, dtype=torch.int64, device=device).mul_(_MULTIPLIER)
    return numbers.bitwise_xor_(numbers >> 31).mul_(_MULTIPLIER).bitwise_or_(1)


OVERWRITTEN = (
    "it was written to between steps or in a forward by .data, or in another way that autograd does not count; on a GPU"
    " that is found after the values were replaced: they are lost; write in place under torch.no_grad() (`p.clamp_()`),"
    " or inside `with engine.full_parameters()`"
)


class UnseenWrites:
    """The flags of segments. `numbers`: of the segments' parameters; `names`: of parameters, by number.

    `flags`  (segments,) int32 on the device, set for all steps since the last error
    """

    def __init__(self, numbers: Sequence[int], names: Sequence[str], device: torch.device) -> None:
        self._numbers = numbers
        self.flags = torch.zeros(len(numbers), dtype=torch.int32, device=device)
        self._host = torch.zeros(len(numbers), dtype=torch.int32, pin_memory=self.flags.is_cuda)
        self._seen = self._host.numpy()  # reads of it are no operators, which might wait
        weakref.finalize(self, _report, self._seen, [names[number] for number in numbers])

    def send(self) -> None:
        """Sends the flags to the host when the update has been launched."""
        self._host.copy_(self.flags, non_blocking=True)

    def find(self, waits: bool) -> int | None:
        """Returns the number of a parameter that was written to. `waits`: for all flags; otherwise for none."""
        if waits:
            self._host.copy_(self.flags)
        return max((self._numbers[int(segment)] for segment in self._seen.nonzero()[0]), default=None)

    def forget(self) -> None:
        """Forgets all writes."""
        self._host.copy_(self.flags.zero_())  # waits, so that no earlier copy arrives later


def _report(seen: Any, names: list[str]) -> None:
    """Prints the writes that no step has raised an error for, at the end of the engine or of the program."""
    written = dict.fromkeys(names[segment] for segment in seen.nonzero()[0])
    sys.stderr.writelines(f"{name}: {OVERWRITTEN}\n" for name in written)
