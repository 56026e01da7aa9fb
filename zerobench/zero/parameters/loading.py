"""torch's `module.load_state_dict`, of the whole module or of a part, on a module that is under an engine.

before    waits for gathers in flight; a sharded parameter gets memory for all of its elements
copied    torch compares names and shapes, and copies
after     keeps this rank's part and frees the memory; masters follow at the next forward or step (writes.py)

`module.state_dict()` of sharded parameters is refused, since it would hold NaN.

There is no collective: every rank loads equal values. `assign=True` copies too, since the parameters' memory is fixed.
Optimizer states are unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..modules.wrapping import Hook
from .absent import as_they_are, is_placeholder, placeholder

if TYPE_CHECKING:
    from ..strategy import Strategy
    from ..units.unit import Unit


def take_loads(engine: Strategy) -> None:
    """Registers the hooks on the modules that have parameters of their own."""
    unit_of = engine.unit_of_parts()
    for module in engine.module.modules():
        if any(True for _ in module.parameters(recurse=False)):
            load = Load(engine, unit_of)
            module.register_load_state_dict_pre_hook(Hook(load.before))
            module.register_load_state_dict_post_hook(Hook(load.after))
            if unit_of:
                module.register_state_dict_pre_hook(Hook(partial(_check_whole, unit_of)))


def _check_whole(held: Collection[nn.Parameter], module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Raises RuntimeError where `module.state_dict()` would be of NaN, which a checkpoint would keep."""
    for name, parameter in module.named_parameters(recurse=False):
        if not keep_vars and parameter in held and is_placeholder(parameter):
            raise RuntimeError(
                f"state_dict: {prefix}{name} is in parts, one on each rank; use engine.full_state_dict(), or call it"
                " inside `with engine.full_parameters()` on every rank"
            )


class Load:
    """The state of a load into one module's own parameters.

    `_versions`  their versions before it, by which the written ones are found
    `_lent`      parameters with memory for the load only
    """

    def __init__(self, engine: Strategy, unit_of: dict[nn.Parameter, Unit]) -> None:
        self._engine = engine
        self._unit_of = unit_of
        self._versions: dict[nn.Parameter, int] = {}
        self._lent: set[nn.Parameter] = set()

    def before(self, module: nn.Module, _state: Any, _prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        """Makes every parameter of the module writable."""
        self._engine.settle()
        metadata["assign_to_params_buffers"] = False
        for parameter in module.parameters(recurse=False):
            self._versions[parameter] = parameter._version
            if parameter in self._unit_of and is_placeholder(parameter):
                parameter.data = torch.full(parameter.shape, math.nan, dtype=parameter.dtype, device=parameter.device)
                self._lent.add(parameter)

    def after(self, _module: nn.Module, *_: Any) -> None:
        """Keeps the values that were copied."""
        versions, lent = self._versions, self._lent
        self._versions, self._lent = {}, set()
        for parameter, version in versions.items():
            with as_they_are():
                values = parameter.data
                if parameter in lent:
                    parameter.data = placeholder(parameter)
            if parameter._version != version:
                self._engine.writes.loaded(parameter)
                if parameter in lent:
                    self._engine.writes.store(self._unit_of[parameter], parameter, values)
