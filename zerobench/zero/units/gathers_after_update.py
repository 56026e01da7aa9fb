"""Gathers of updated parameters that may still run during the next forward (stages 1 and 2).

    launched   `unit.full_parameters` is being filled; with overlap its parameters are hidden (parameters/absent.py)
    waited     the parameters have the new values

Without overlap all gathers are waited for at the end of `step`. With overlap, a block (modules/wrapping.py) waits for
the units of its parameters before it runs, and a module outside of blocks for the units of its own. Any other read of a
parameter, in a forward or between steps, waits for that parameter; the engine's own accesses wait for all. An
evaluation waits for all: torch's own layers then use fast paths that read their children's weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ..comm.base import Comm, Handle
from ..modules.wrapping import Hook, blocks
from ..parameters.absent import Hiding, placeholder
from .unit import Unit


def read_by(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters that `module`'s own forward reads: its own, and those of children that are not called."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if isinstance(module, nn.MultiheadAttention) or isinstance(child, nn.ParameterList | nn.ParameterDict):
            yield from child.parameters()


def waiting_modules(root: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Yields the modules that wait before their forward, with the parameters that they wait for: the root, each block
    for all parameters inside it, and each module outside of blocks that reads parameters itself.
    """
    whole = {block for _, block in blocks(root)}
    inside = {module for block in whole for module in block.modules()}
    for module in root.modules():
        if module in whole:
            yield module, list(module.parameters())
        elif module not in inside:
            read = list(read_by(module))
            if read or module is root:
                yield module, read


class OverlappedParamGathers:
    """The gathers in flight, by unit, oldest first."""

    def __init__(
        self, root: nn.Module, comm: Comm, units: Iterable[tuple[Unit, list[nn.Parameter]]], overlap: bool
    ) -> None:  # fmt: skip
        self._comm = comm
        self._overlap = overlap
        self._handles: dict[Unit, Handle] = {}
        self._parameters: dict[Unit, list[nn.Parameter]] = {}
        self._units: dict[nn.Parameter, list[Unit]] = {}  # a large one is cut into several
        self._hiding = Hiding(self.bring)
        self._hidden: dict[nn.Parameter, torch.Tensor] = {}  # what a parameter is a view of while it is a NaN
        self._holes: dict[nn.Parameter, torch.Tensor] = {}
        self.add(root, units)

    def add(self, root: nn.Module, units: Iterable[tuple[Unit, list[nn.Parameter]]]) -> None:
        """Adds units, with their parameters, for which the modules of `root` wait from now on."""
        new = dict(units)
        self._parameters |= new
        for unit, parameters in new.items():
            for parameter in parameters:
                self._units.setdefault(parameter, []).append(unit)
        if self._overlap and self._comm.size > 1:
            # here, not at the first launch: a watch would count the NaN of an earlier engine, and not its own
            with torch.inference_mode(False):  # an engine may be made in that mode, and trained outside of it
                self._holes |= {p: placeholder(p) for parameters in new.values() for p in parameters}
        for module, read in waiting_modules(root) if self._overlap else ():
            mine = {unit: None for p in read for unit in self._units.get(p, []) if unit in new}
            if mine:
                module.register_forward_pre_hook(Hook(partial(self._before_module, list(mine))), prepend=True)

    def launch(self, unit: Unit) -> None:
        """Starts sending this rank's slice of the unit's parameters to all ranks."""
        self.wait(unit)
        self._comm.launches.add("gather", unit.name)
        self._handles[unit] = self._comm.all_gather(unit.full_parameters, unit.name, unit.layout.sizes)
        for parameter in self._parameters[unit] if self._holes else []:
            # other reads than by its own module's forward must wait, too: reads of the NaN in its place are noticed
            if parameter not in self._hidden:
                self._hidden[parameter] = parameter.data
                self._hiding.hide(parameter, self._holes[parameter])

    def wait(self, unit: Unit) -> None:
        """Waits until the unit's parameters have the new values."""
        handle = self._handles.pop(unit, None)
        if handle is None:
            return
        handle.wait()
        for parameter in self._parameters[unit] if self._hidden else []:
            # a parameter that is cut into several units is shown when the last of its gathers is done
            if not any(other in self._handles for other in self._units[parameter]):
                self._hiding.show(parameter, self._hidden.pop(parameter))

    def wait_all(self) -> None:
        """Waits until all parameters have the new values."""
        for unit in list(self._handles):
            self.wait(unit)

    def bring(self, parameter: nn.Parameter) -> None:
        """Waits for a hidden parameter that is about to be read outside of its own module, or between steps."""
        for unit in self._units[parameter]:
            self.wait(unit)

    def _before_module(self, units: list[Unit], *_: Any) -> None:
        for unit in units:
            self.wait(unit)
