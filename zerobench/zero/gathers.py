"""Gathers of updated parameters that may still travel while the next forward runs (stages 1 and 2).

    launched   `unit.full_parameters` is being filled; nobody may read the unit's parameters
    waited     they are the new ones

Without overlap all are waited for at the end of `step`. With it a module waits for the units of its own
parameters when it is about to run; everything else that reads parameters waits for all, an evaluation too:
there torch's own layers have shorter ways, which read their children's weights without calling them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from .comm import Handle
from .modules import Hook
from .unit import Unit

if TYPE_CHECKING:
    from .strategy import Strategy


def read_by(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that `module`'s own forward reads: its own, and those of children that nobody calls."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if isinstance(module, nn.MultiheadAttention) or isinstance(child, nn.ParameterList | nn.ParameterDict):
            yield from child.parameters()


class LateGathers:
    """The gathers in flight, by unit, oldest first."""

    def __init__(self, engine: Strategy) -> None:
        self._engine = engine
        self._handles: dict[Unit, Handle] = {}
        self._units = {
            p: [unit for unit, _ in places] for p, places in zip(engine.trainable, engine.gradients.places, strict=True)
        }
        if engine.options.overlap_gather:
            for module in engine.module.modules():
                mine = {unit: None for p in read_by(module) for unit in self._units.get(p, [])}
                if mine:
                    module.register_forward_pre_hook(Hook(partial(self._before_module, list(mine))), prepend=True)

    def launch(self, unit: Unit) -> None:
        """Starts sending the own slice of the unit's parameters to everyone."""
        self.wait(unit)
        self._handles[unit] = self._engine.comm.all_gather(unit.full_parameters, unit.name)

    def wait(self, unit: Unit) -> None:
        """The unit's parameters are the new ones afterwards."""
        handle = self._handles.pop(unit, None)
        if handle is not None:
            handle.wait()

    def wait_all(self) -> None:
        """All parameters are."""
        for unit in list(self._handles):
            self.wait(unit)

    def _before_module(self, units: list[Unit], *_: Any) -> None:
        for unit in units:
            self.wait(unit)

    def check(self, parameter: nn.Parameter) -> None:
        """Raises RuntimeError where `parameter` is read while its gather is in flight."""
        if any(unit in self._handles for unit in self._units.get(parameter, [])):
            name = dict(zip(self._engine.trainable, self._engine.names, strict=True))[parameter]
            raise RuntimeError(
                f"{name}: it is read outside of its module's forward while its new values are on their way; use"
                " overlap_gather=False"
            )
