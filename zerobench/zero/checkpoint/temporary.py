"""Temporary weights, such as averages for an evaluation: afterwards parameters, masters and buffers are as before.

    put aside   shards that no separate master can restore, frozen parameters that are replaced, and buffers: this
                rank's part, in host memory
    swapped in  the given values, each rank its own part; masters do not follow
    put back    shards from these copies or by rounding their masters, and sent to all ranks as after a load

So a device never holds a second copy of the masters. Between the two the engine only evaluates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from .. import labels
from ..engine import ShardedEngine
from ..modules.wrapping import in_normal_mode
from ..precision import TRAINED
from .contents import put, whole_frozen


class TemporaryWeights:
    """`weights` for the module of `engine`, by name. Raises ValueError for weights that do not fit it."""

    def __init__(self, engine: ShardedEngine, weights: Mapping[str, Any]) -> None:
        if not isinstance(weights, Mapping):
            kind = type(weights).__name__
            raise ValueError(f"weights: it is a {kind}; give tensors by name, as module.state_dict() returns them")
        self._engine = engine
        parameters = dict(engine.module.named_parameters(remove_duplicate=False))
        buffers = dict(engine.module.named_buffers(remove_duplicate=False))
        tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
        for name, value in tensors.items():
            _check(name, value, parameters.get(name, buffers.get(name)))
        ours = {name: p for name, p in parameters.items() if p in engine.orders}
        buffers |= {name: p for name, p in parameters.items() if name not in ours}  # that initialize() was to ignore
        self._parameters = {ours[name]: value for name, value in tensors.items() if name in ours}
        self._buffers = [(buffers[name], value) for name, value in tensors.items() if name in buffers]
        self._put_back: list[Callable[[], object]] = []
        self._put_sources_back: Callable[[], object] = lambda: None

    @in_normal_mode
    def put_in(self) -> None:
        """Puts the module's own values aside, and the given ones in their place."""
        engine = self._engine
        engine.placement.wait()
        engine.close_forwards()
        for unit in engine.holders() or engine.units:
            if unit in engine.placement.ranges or self._parameters.keys() & {*engine.parameters_of(unit)}:
                self._put_back.append(unit.put_aside())
        sites = [(module._buffers, dict(module._buffers)) for module in engine.module.modules()]
        self._put_back += [partial(own.update, before) for own, before in sites]
        tensors = [p for p in whole_frozen(engine).values() if p in self._parameters]
        tensors += [p for p, _ in self._buffers if isinstance(p, nn.Parameter)]
        for tensor in [*tensors, *engine.module.buffers()]:
            category = labels.PARAMETERS if isinstance(tensor, nn.Parameter) else labels.BUFFERS
            copy = labels.label(tensor.detach().to("cpu", copy=True), category, tier=labels.HOST)
            self._put_back.append(partial(put, tensor, copy))
        self._put_sources_back = engine.comm.put_aside()
        engine.placement.masters_follow = False
        with torch.no_grad():
            for parameter, value in self._parameters.items():
                engine.store(parameter, value)
        for buffer, value in self._buffers:
            put(buffer, value)
        engine.send_parameters()

    @in_normal_mode
    def put_back(self) -> None:
        """Restores the module's own values on all ranks; collective."""
        engine = self._engine
        engine.settle()
        engine.placement.wait()
        with torch.no_grad():
            for restore in self._put_back:
                restore()
        engine.placement.masters_follow = True
        engine.after_load()
        self._put_sources_back()


def _check(name: str, value: torch.Tensor, own: nn.Parameter | torch.Tensor | None) -> None:
    if own is None:
        raise ValueError(
            f"{name}: the module has no parameter or buffer of this name; the names are those of its state_dict (for"
            " torch's AveragedModel give `averaged.module.state_dict()`)"
        )
    if value.shape != own.shape or value.is_meta or value.layout is not torch.strided:
        what = f"{tuple(value.shape)}, {value.layout}, on {value.device}"
        raise ValueError(f"{name}: it is of shape {what}; give a dense tensor of shape {tuple(own.shape)} with values")
    if isinstance(own, nn.Parameter) and not (
        value.is_floating_point() if own.dtype in TRAINED else value.dtype == own.dtype
    ):
        wanted = "a floating dtype" if own.dtype in TRAINED else f"its own, {own.dtype}"
        raise ValueError(f"{name}: its dtype is {value.dtype}; give values of {wanted}")
