"""Activations that a model needs by itself, from shapes alone: its forward and backward under fake tensors, which have
no values, observed by the ledger. Without engine or ranks: a run's excess over it is the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ..zero import labels
from .fake_ledger import ShapesOnly


def activation_bytes(model: nn.Module, inputs: Sequence[torch.Tensor]) -> int:
    """Returns the peak bytes of activations in a forward and backward of `model(*inputs)`, a loss.

    `model`: on the meta device; it is unusable afterwards. `inputs`: only shapes and dtypes are used. Passes on the
    error of a model that reads values.
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
    return ledger.sums.extremes["step"].highest[labels.ACTIVATIONS]


def _make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replaces parameters and buffers by fake CPU tensors; tied ones stay tied."""
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
