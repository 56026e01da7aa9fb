"""ZeRO-3, P_os+g+p: parameters are partitioned too (ZeRO, arXiv 1910.02054, section 5.3).

A unit is a module group: a transformer block, and the root that holds the rest. Each rank keeps 1/N of
every unit; the full parameters are there only while someone reads them::

    before forward     unshard (all-gather), the next unit ahead of its use           ψ on the wire
    after forward      reshard
    before backward    unshard, the previous unit ahead of its use                    ψ on the wire
    backward passed    reshard, reduce as in stage 2                                  ψ on the wire
    update             the optimizer sees the shards; nothing to gather

The root unit is in use at both ends of the forward and stays until the backward is over: 3ψ less its size.
In fp32: 16ψ/N for Adam, and in flight two adjacent units, the root and one unit's gradients.

[Note: one storage a unit for life]
Autograd saves some weights as views and some as the leaf itself. Swapping in another storage would free
nothing until the graph dies, and then give wrong gradients. So each unit has one storage for life, resized
to nothing and back. While it is empty the parameters are views of a NaN: same shape, loud misuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from . import labels
from .comm import Handle
from .layout import one_unit
from .modules import (
    ROOT,
    default_units,
    inside_backward,
    named_units,
    tensors_that_require_grad,
    unit_of_parameters,
    warn_of_modules_not_called,
)
from .prefetch import UnitOrder
from .stage2 import Stage2
from .unit import ALIGN_BYTES, Unit


class ModuleUnit(Unit):
    """A unit of stage 3: whole parameters of one module group, one dtype, trainable or frozen."""

    parameters: list[nn.Parameter]
    trainable: bool
    gather: Handle | None = None
    is_whole = False


class Stage3(Stage2):
    """Optimizer states, gradients and parameters partitioned."""

    stage = 3

    # -- adopt: module groups become units --------------------------------------------------------------

    def adopt(self) -> None:
        self._order: UnitOrder[ModuleUnit] = UnitOrder()
        self._done: set[ModuleUnit] = set()  # passed by the present backward
        self._backwards = 0  # how many times parameters were given back; graphs from before are stale
        self._warned = False
        self._recording = False  # the present forward will be followed by a backward
        self._all_units: list[ModuleUnit] = []
        self._nan: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        chosen = self.options.units
        modules = default_units(self.module) if chosen is None else named_units(self.module, chosen)
        unit_of = unit_of_parameters(self.module, modules)
        for name, module in [(ROOT, self.module), *modules]:
            mine = [p for p, unit in unit_of.items() if unit == name and p.numel()]
            units = self._adopt_module(name or "(root)", mine)
            if units or module is self.module:
                self._hook(module, units)
        self.units = [unit for unit in self._all_units if unit.trainable]
        self.label_units()

    def _adopt_module(self, name: str, parameters: list[nn.Parameter]) -> list[ModuleUnit]:
        kinds: dict[tuple[Any, ...], list[nn.Parameter]] = {}
        for p in parameters:
            kinds.setdefault((p.requires_grad, p.dtype, p.device), []).append(p)
        names = [name, *(f"{name} part {number}" for number in range(2, len(kinds) + 1))]
        return [self._adopt_unit(*one) for one in zip(names, kinds.values(), strict=False)]

    def _adopt_unit(self, name: str, parameters: list[nn.Parameter]) -> ModuleUnit:
        index = {p: i for i, p in enumerate(self.trainable)}
        numels = [(index.get(p, -1), p.numel()) for p in parameters]
        layout = one_unit(numels, self.comm.size, ALIGN_BYTES // parameters[0].element_size())
        unit = ModuleUnit(name, layout, self.comm)
        unit.parameters, unit.trainable = parameters, parameters[0].requires_grad
        unit.full_parameters = parameters[0].new_zeros(layout.padded_numel)
        labels.label(unit.full_parameters, labels.PARAMETERS, name)
        for parameter, place in zip(parameters, self._places_in(unit), strict=True):
            self._move_into(place, parameter)
        self.comm.broadcast(unit.full_parameters)
        unit.is_whole = True
        if self.comm.size == 1:
            unit.parameter_shard = unit.full_parameters
        else:
            unit.parameter_shard = unit.own_slice(unit.full_parameters).clone()
            labels.label(unit.parameter_shard, labels.PARAMETERS, name)
            self.reshard(unit)
        if unit.trainable:
            self.place_gradients(unit, None, 0)
        self._all_units.append(unit)
        return unit

    @staticmethod
    def _places_in(unit: ModuleUnit) -> Iterator[torch.Tensor]:
        for piece in unit.layout.pieces:
            yield unit.full_parameters.narrow(0, piece.offset, piece.numel)

    def _hook(self, module: nn.Module, units: list[ModuleUnit]) -> None:
        is_root = module is self.module

        def before(_module: nn.Module, _inputs: Any) -> None:
            if is_root:
                self.before_root_forward()
            self.before_forward(units)

        def after(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if is_root:
                self.after_root_forward(output)
            else:
                self.after_forward(units, output)

        module.register_forward_pre_hook(before, prepend=True)
        module.register_forward_hook(after)

    # -- the two states of a unit's parameters ----------------------------------------------------------

    def launch_unshard(self, unit: ModuleUnit) -> None:
        """sharded -> gathering: fills the own slice and launches the all-gather of the others."""
        if unit.is_whole or unit.gather is not None:
            return
        full = unit.full_parameters
        with torch.inference_mode(False), torch.no_grad():
            full.untyped_storage().resize_(full.numel() * full.element_size())
            unit.own_slice(full).copy_(unit.parameter_shard)
            unit.gather = self.comm.all_gather(full, unit.name)

    def unshard(self, unit: ModuleUnit) -> None:
        """-> unsharded: the parameters are views of the full buffer."""
        self.launch_unshard(unit)
        if unit.gather is None:
            return
        unit.gather.wait()
        unit.gather, unit.is_whole = None, True
        for parameter, place in zip(unit.parameters, self._places_in(unit), strict=True):
            parameter.data = place.view(parameter.shape)

    def reshard(self, unit: ModuleUnit) -> None:
        """unsharded -> sharded: the storage is given back, the parameters read as NaN."""
        if self.comm.size == 1 or not (unit.is_whole or unit.gather):
            return
        self.unshard(unit)  # a gather that was launched ahead and not needed must still be completed
        for parameter in unit.parameters:
            parameter.data = self._placeholder(parameter)
        unit.full_parameters.untyped_storage().resize_(0)
        unit.is_whole = False

    def _placeholder(self, parameter: nn.Parameter) -> torch.Tensor:
        key = (parameter.dtype, parameter.device)
        if key not in self._nan:
            self._nan[key] = torch.full((), float("nan"), dtype=key[0], device=key[1])
        return self._nan[key].expand(parameter.shape)

    def holders(self) -> list[Unit]:
        return list(self._all_units)

    def parameters_of(self, unit: Unit) -> list[nn.Parameter]:
        assert isinstance(unit, ModuleUnit)
        return unit.parameters

    @contextmanager
    def whole(self, unit: Unit) -> Iterator[None]:
        assert isinstance(unit, ModuleUnit)
        was_whole = unit.is_whole
        self.unshard(unit)
        try:
            yield
        finally:
            if not was_whole:
                self.reshard(unit)

    # -- the events -------------------------------------------------------------------------------------

    def before_forward(self, units: list[ModuleUnit]) -> None:
        """The module is about to run, for the first time or again inside backward to recompute."""
        for unit in units:
            self.unshard(unit)
        if self._recording and units and not inside_backward():
            use = max(self._order.record(unit) for unit in units)
            for following in self._order.ahead(use, self.options.prefetch):
                self.launch_unshard(following)

    def after_forward(self, units: list[ModuleUnit], output: Any) -> None:
        """The module has run. Its backward, if there will be one, asks for the parameters again."""
        recomputed = inside_backward()
        if not recomputed:
            for unit in units:
                self.reshard(unit)
        if not torch.is_grad_enabled() or not (recomputed or self._recording):
            return
        use = self._order.only_use(units[0]) if recomputed else len(self._order.uses) - 1
        tensors = list(tensors_that_require_grad(output))
        if not tensors and any(unit.trainable for unit in units):
            raise ValueError(
                f"{units[0].name}: no tensor that requires a gradient was found in its output; a unit of zero3 must"
                " return tensors, or containers or dataclasses of them"
            )
        if tensors and use is not None:
            hook = partial(self.before_backward, units, use, self._backwards)
            register_multi_grad_hook(tensors, hook, mode="any")

    def before_root_forward(self) -> None:
        """The whole model is about to run."""
        if not inside_backward():
            self._recording = torch.is_grad_enabled()
            if self._recording:
                self._order.begin_forward()

    def after_root_forward(self, output: Any) -> None:
        """The whole model has run. The root stays for the backward, if there will be one."""
        if inside_backward():
            return
        if self._recording:
            if not self._warned:
                self._warned = True
                warn_of_modules_not_called([u.name for u in self._all_units if u not in self._order.uses])
            tensors = list(tensors_that_require_grad(output))
            if tensors:
                register_multi_grad_hook(tensors, partial(self._check_age, self._backwards), mode="any")
        self._recording = False
        if not self._order.uses:
            self._reshard_all()

    def before_backward(self, units: list[ModuleUnit], use: int, backwards: int, gradient: torch.Tensor) -> None:
        """Backward has come to this use of these units: it is done with all that it has passed."""
        self._check_age(backwards, gradient)
        self._finish_passed(use)
        for unit in units:
            self.unshard(unit)
        for preceding in self._order.behind(use - len(units) + 1, self.options.prefetch):
            self.launch_unshard(preceding)

    def _check_age(self, backwards: int, _gradient: torch.Tensor) -> None:
        if backwards != self._backwards:
            raise RuntimeError(
                "backward through a forward that came before the last backward or step: zero3 has given its parameters"
                " back; add the losses and call backward once"
            )

    def _finish_passed(self, use: int) -> None:
        for unit in self._order.passed(use):
            if unit not in self._done:
                self._done.add(unit)
                self.reshard(unit)
                if unit.trainable and self._synchronising:
                    self.reduce(unit)

    def gradients_written(self, unit: Unit) -> None:
        """Backward's progress decides when a unit is sent, so that all ranks send in one order."""

    def finish_reductions(self) -> None:
        used = list(dict.fromkeys(reversed(self._order.uses)))
        for unit in used:
            if unit.trainable and unit not in self._done:
                self.reduce(unit)
        for late in self.units:
            if late.filled and late.reduction is None:  # gradients that came late, or from under no_sync
                self.reduce(late)

    def _finish_backward(self) -> None:
        super()._finish_backward()
        self._give_back()

    def _give_back(self) -> None:
        """Nobody reads parameters before the next forward, which gathers the newest."""
        self._reshard_all()
        self._done.clear()
        self._order.end_backward()
        self._backwards += 1

    def _reshard_all(self) -> None:
        for unit in self._all_units:
            self.reshard(unit)

    def after_update(self) -> None:
        self._give_back()
