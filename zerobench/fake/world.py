"""The tensors of a rank: as torch makes them, or fake (torch's FakeTensorMode), without values and without memory.

    operators    run their shape functions, and nothing else
    storages     have sizes, lives and owners as in a run, so that the ledger hears of each, and no bytes behind them
    addresses    are made up, unique while a storage lives: code compares them to tell memory apart
    collectives  are launched on torch's fake process group, complete at once and change nothing
    values       that the host decides by: host_values.py
    files        have sizes, and are not made: substitutes.py
    threads      of the engine's updates: substitutes.py

FakeTensorMode is private to torch: this package alone imports it, and a test fails if it moves.
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
from ..zero.parameters import absent
from .host_values import HostValues
from .observers import shapes_asked_apart
from .shortcuts import modes_called_directly
from .substitutes import as_with_values, no_files, threads_done_at_start

ADDRESS_BITS = 48
"""Bits of an offset into a storage, which is below its number: no two storages' addresses are alike."""


DRAWS = ("normal_", "uniform_", "bernoulli_", "random_", "exponential_", "geometric_", "log_normal_", "cauchy_")
"""torch's in-place draws."""


class Undrawn(TorchFunctionMode):
    """Skips every in-place draw. A meta tensor has no values to draw, but torch would load its compiler to find that
    out, which takes a second of CPU.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls `func`, or returns the tensor that it would fill."""
        named = kwargs or {}
        if getattr(func, "__name__", "") not in DRAWS:
            return func(*args, **named)
        tensor: torch.Tensor = args[0] if args else named["tensor"]  # torch.nn.init's functions pass it by name
        torch.autograd.graph.increment_version(tensor)  # versions tell what was drawn
        return tensor


class RealWorld:
    """Tensors as torch makes them. Also what a rank asks of a world, whichever it is."""

    is_fake = False

    def building(self) -> AbstractContextManager[Any]:
        """A block that builds model, engine and data."""
        return nullcontext()

    def model_runs(self) -> AbstractContextManager[Any]:
        """A block that runs a model's own forward or backward."""
        return nullcontext()

    def take(self, batch: Any) -> Any:
        """A batch as the model gets it."""
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
        return tree_map_only(torch.Tensor, self._faked, batch)

    def _faked(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._fake.from_tensor(tensor)


@contextmanager
def world_of_tensors(fake: bool) -> Iterator[RealWorld]:
    """Makes every tensor that is created inside a fake one, where `fake` is true."""
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
        mock.patch.object(FakeTensor, "data_ptr", _address_of, create=True),
        mock.patch.object(torch.UntypedStorage, "data_ptr", _begin_of),
        mock.patch.dict(absent._nan, clear=True),  # one per dtype in a process: those of another world are not its own
        shapes_asked_apart(),
        modes_called_directly(),
        mode,
        HostValues(mode) as values,
        threads_done_at_start(mode, values),
    ):
        yield FakeWorld(mode, values)


class _Unwatched:
    """Stands for the module weakref in torch.utils, whose `swap_tensors` refuses what anything watches: FakeTensorMode
    watches every tensor, by the identity of its object, which a swap keeps.
    """

    @staticmethod
    def getweakrefs(_: torch.Tensor) -> tuple[()]:
        return ()


def _convert_in_place(
    module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """Converts parameters and buffers as torch's `_apply` does for real tensors: for fake ones it would swap objects,
    which it cannot where anything watches them. A parameter that comes from the meta device is a new one.
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
