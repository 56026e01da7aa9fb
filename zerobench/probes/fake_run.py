"""Activations that a model needs by itself, from shapes alone: its forward and backward under fake tensors, which have
no values, seen by the ledger. No engine, no ranks: what a run has beyond it, the engine keeps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ..zero import labels
from .ledger import Ledger


class ShapesOnly(Ledger):
    """Counts storages of fake tensors, which are on the meta device, as what they stand for."""

    def _bytes_of(self, storage: torch.UntypedStorage) -> int:
        return storage.nbytes()


def activation_bytes(model: nn.Module, inputs: Sequence[torch.Tensor]) -> int:
    """The most that is alive of activations in a forward and backward of `model(*inputs)`, a loss.

    `model`: on the meta device; it is spoilt. `inputs`: their shapes and dtypes count. Raises what a model raises that
    looks at values.
    """
    mode = FakeTensorMode()
    _make_fake(model, mode)
    with mode, ShapesOnly("cpu") as ledger:
        for name, parameter in model.named_parameters():
            ledger.on_tensor(parameter, labels.PARAMETERS, name)
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: ledger.on_tensor(gradient, labels.GRADIENTS, ""))
        batch = [torch.zeros(one.shape, dtype=one.dtype) for one in inputs]
        for one in batch:
            ledger.on_tensor(one, labels.INPUTS, "batch")
        ledger.begin()
        ledger.enter_phase("forward")
        loss = model(*batch)
        ledger.enter_phase("backward")
        loss.backward()
        ledger.end("step")
    return ledger.extremes["step"].highest[labels.ACTIVATIONS]


def _make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Puts fake CPU tensors in the places of parameters and buffers; tied ones stay tied."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for places in (module._parameters, module._buffers):
            for name, tensor in places.items():
                if tensor is None:
                    continue
                if tensor not in made:
                    fake: torch.Tensor = FakeTensor(mode, tensor.data, torch.device("cpu"))
                    whole = isinstance(tensor, nn.Parameter)
                    made[tensor] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if whole else fake
                places[name] = made[tensor]  # type: ignore[assignment]
