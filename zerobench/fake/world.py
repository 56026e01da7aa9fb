"""A rank's tensors: real, or fake (torch's FakeTensorMode), without values and memory.

    operators    run only their shape functions
    storages     have sizes, lifetimes and owners as in a run, so that the ledger records each, but no memory
    addresses    are made up, and unique while a storage lives, since code compares them
    collectives  are launched on torch's fake process group, complete at once and change nothing
    values       that the host branches on: operators.py
    files        have sizes, but are not created: substitutes.py
    threads      of the engine's updates: substitutes.py

FakeTensorMode is private to torch: only this package imports it, and a test fails if it moves.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ..zero.activations import offload as offloaded_activations
from ..zero.parameters import access
from .observers import noting_shape_functions
from .operators import HostValues, modes_called_directly
from .substitutes import as_with_values, grouped_products_of_any_dtype, no_files, threads_done_at_start

ADDRESS_BITS = 48
"""Low bits of an address for the offset into a storage; the high bits are unique to the storage."""


DRAWS = ("normal_", "uniform_", "bernoulli_", "random_", "exponential_", "geometric_", "log_normal_", "cauchy_")
"""torch's in-place random operators."""


class Undrawn(TorchFunctionMode):
    """Skips in-place random operators. A meta tensor has no values to draw, but torch would load its compiler to find
    out, which takes a second of CPU time.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls `func`, or returns the tensor that it would fill."""
        named = kwargs or {}
        if getattr(func, "__name__", "") not in DRAWS:
            return func(*args, **named)
        tensor: torch.Tensor = args[0] if args else named["tensor"]  # torch.nn.init's functions pass it by name
        tensor.detach()  # a parameter without memory gets it, as from the operator itself (zero/parameters/access.py)
        torch.autograd.graph.increment_version(tensor)  # versions tell what was drawn
        return tensor


class RealWorld:
    """Real tensors. Also the interface of every world."""

    is_fake = False

    def building(self) -> AbstractContextManager[Any]:
        """Context in which model, engine and data are built."""
        return nullcontext()

    def model_runs(self) -> AbstractContextManager[Any]:
        """Context in which a model's own forward or backward runs."""
        return nullcontext()

    def take(self, batch: Any) -> Any:
        """Returns a batch as the model gets it."""
        return batch


class FakeWorld(RealWorld):
    """Tensors without values."""

    is_fake = True

    def __init__(self, fake: FakeTensorMode, values: HostValues) -> None:
        self._fake, self._values = fake, values

    def building(self) -> AbstractContextManager[Any]:
        return Undrawn()

    @contextmanager
    def model_runs(self) -> Iterator[None]:
        self._values.of_model = True
        with as_with_values():
            yield
        self._values.of_model = False

    def take(self, batch: Any) -> Any:
        return tree_map_only(
            torch.Tensor, lambda t: t if isinstance(t, FakeTensor) else self._fake.from_tensor(t), batch
        )


@contextmanager
def world_of_tensors(fake: bool) -> Iterator[RealWorld]:
    """Within the context, every new tensor is fake if `fake` is true."""
    if not fake:
        yield RealWorld()
        return
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with (
        warnings.catch_warnings(),
        mock.patch.object(dist, "_verify_params_across_processes", return_value=None),  # it would send their shapes
        mock.patch.object(nn.Module, "_apply", _convert_in_place),
        mock.patch.object(torch.utils, "weakref", _Unwatched),
        mock.patch.object(offloaded_activations, "PLAIN", {*offloaded_activations.PLAIN, FakeTensor}),
        no_files(),
        grouped_products_of_any_dtype(),
        mock.patch.object(FakeTensor, "data_ptr", _address_of, create=True),
        mock.patch.object(torch.UntypedStorage, "data_ptr", _begin_of),
        mock.patch.dict(access._nan, clear=True),  # one per dtype in a process: those of another world are not its own
        noting_shape_functions(),
        modes_called_directly(),
        mode,
        HostValues(mode) as values,
        threads_done_at_start(mode, values),
    ):
        yield FakeWorld(mode, values)


class _Unwatched:
    """Replaces the module weakref in torch.utils, whose `swap_tensors` rejects tensors with weak references.
    FakeTensorMode has one to every tensor, by object identity, which a swap preserves.
    """

    @staticmethod
    def getweakrefs(_: torch.Tensor) -> tuple[()]:
        return ()


def _convert_in_place(
    module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """Converts parameters and buffers as torch's `_apply` does for real tensors; for fake ones it would swap objects,
    which fails if they have weak references. A parameter from the meta device becomes a new one.
    """
    for child in module.children() if recurse else ():
        _convert_in_place(child, convert)
    with torch.no_grad():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            converted = convert(parameter)
            if converted.device.type == parameter.device.type:
                parameter.data = converted
            else:
                module._parameters[name] = nn.Parameter(converted, parameter.requires_grad)
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer if buffer is None else convert(buffer)
    return module


def _begin_of(storage: torch.UntypedStorage) -> int:
    return storage._cdata << ADDRESS_BITS if storage.nbytes() else 0


def _address_of(tensor: torch.Tensor) -> int:
    begin = _begin_of(tensor.untyped_storage())
    return int(begin and begin + tensor.storage_offset() * tensor.element_size())
