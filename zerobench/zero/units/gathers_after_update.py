"""Gathers of updated parameters that may still travel while the next forward runs (stages 1 and 2).

    launched   `unit.full_parameters` is being filled; with overlap its parameters are hidden (parameters/absent.py)
    waited     they are the new ones

Without overlap all are waited for at the end of `step`. With it a module waits for the units of its own
parameters when it is about to run, and any other read of one, in a forward or between steps, waits for that one;
what the engine itself does with parameters waits for all.
An evaluation waits for all: there torch's own layers have shorter ways, which read their children's weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..comm.streams import Handle
from ..modules.wrapping import Hook
from ..parameters.absent import Hiding, placeholder
from .unit import Unit

if TYPE_CHECKING:
    from ..strategy import Strategy


def read_by(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that `module`'s own forward reads: its own, and those of children that are not called."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if isinstance(module, nn.MultiheadAttention) or isinstance(child, nn.ParameterList | nn.ParameterDict):
            yield from child.parameters()


class OverlappedParamGathers:
    """The gathers in flight, by unit, oldest first."""

    def __init__(self, engine: Strategy, overlap: bool) -> None:
        self._engine = engine
        self._handles: dict[Unit, Handle] = {}
        self._units: dict[nn.Parameter, list[Unit]] = {}  # a large one is cut into several
        for unit in engine.units:
            for parameter in engine.parameters_of(unit):
                self._units.setdefault(parameter, []).append(unit)
        self._hiding = Hiding(self.bring)
        self._hidden: dict[nn.Parameter, torch.Tensor] = {}  # what a parameter is a view of while it is a NaN
        self._overlap = overlap
        if self._overlap:
            for module in engine.module.modules():
                mine = {unit: None for p in read_by(module) for unit in self._units.get(p, [])}
                if mine or module is engine.module:
                    module.register_forward_pre_hook(Hook(partial(self._before_module, list(mine))), prepend=True)

    def launch(self, unit: Unit) -> None:
        """Starts sending the own slice of the unit's parameters to everyone."""
        self.wait(unit)
        self._handles[unit] = self._engine.comm.all_gather(unit.full_parameters, unit.name)
        if self._overlap and self._engine.comm.size > 1:
            for parameter in self._engine.parameters_of(unit):
                # reads other than by its own module's forward must wait, too: a NaN in its place is seen to be read
                if parameter not in self._hidden:
                    self._hidden[parameter] = parameter.data
                    self._hiding.hide(parameter, placeholder(parameter))

    def wait(self, unit: Unit) -> None:
        """The unit's parameters are the new ones afterwards."""
        handle = self._handles.pop(unit, None)
        if handle is None:
            return
        handle.wait()
        for parameter in self._engine.parameters_of(unit) if self._hidden else []:
            # a parameter that is cut into several units is shown when the last of its gathers is done
            if not any(other in self._handles for other in self._units[parameter]):
                self._hiding.show(parameter, self._hidden.pop(parameter))

    def wait_all(self) -> None:
        """All parameters are."""
        for unit in list(self._handles):
            self.wait(unit)

    def bring(self, parameter: nn.Parameter) -> None:
        """`parameter`, hidden, is about to be read, by others than the module that it is of, or between steps."""
        for unit in self._units[parameter]:
            self.wait(unit)

    def _before_module(self, units: list[Unit], *_: Any) -> None:
        for unit in units:
            self.wait(unit)
