"""torch's `module.load_state_dict`, of the whole module or a part of it, on a module that is under an engine.

before    gathers in flight are waited for; a parameter of which this rank holds a part gets memory for all of it
copied    torch compares names and shapes, and copies
after     this rank's part is kept, the memory goes; the masters follow at the next forward or step (writes.py)

`module.state_dict()` of parameters in parts is refused, for it would be of NaN.

There is no collective: every rank loads the same. `assign=True` copies, too: the parameters must stay where they are.
Optimizer states stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..modules.wrapping import Hook
from .absent import is_placeholder, placeholder

if TYPE_CHECKING:
    from ..strategy import Strategy
    from ..units.unit import Unit


def take_loads(engine: Strategy) -> None:
    """Hooks the modules that have parameters of their own."""
    unit_of = {p: unit for unit in engine.holders() for p in engine.parameters_of(unit)}
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
    """What a load does to one module's own parameters.

    `_versions`  theirs before it, by which those that torch has copied to are known
    `_lent`      those with memory for the load alone
    """

    def __init__(self, engine: Strategy, unit_of: dict[nn.Parameter, Unit]) -> None:
        self._engine = engine
        self._unit_of = unit_of
        self._versions: dict[nn.Parameter, int] = {}
        self._lent: set[nn.Parameter] = set()

    def before(self, module: nn.Module, _state: Any, _prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        """Every parameter of the module can be copied to."""
        self._engine.settle()
        metadata["assign_to_params_buffers"] = False
        for parameter in module.parameters(recurse=False):
            self._versions[parameter] = parameter._version
            if parameter in self._unit_of and is_placeholder(parameter):
                parameter.data = torch.full(parameter.shape, math.nan, dtype=parameter.dtype, device=parameter.device)
                self._lent.add(parameter)

    def after(self, _module: nn.Module, *_: Any) -> None:
        """What was copied is kept."""
        versions, lent = self._versions, self._lent
        self._versions, self._lent = {}, set()
        for parameter, version in versions.items():
            values = parameter.data
            if parameter in lent:
                parameter.data = placeholder(parameter)
            if parameter._version != version:
                self._engine.writes.loaded(parameter)
                if parameter in lent:
                    self._engine.writes.store(self._unit_of[parameter], parameter, values)
