"""The parameters of a module group become units of stage 3: one for each kind of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from .. import labels
from ..comm.desync import STAMP_NUMEL
from ..layout import one_unit
from .module_unit import ModuleUnit
from .unit import ALIGN_BYTES

if TYPE_CHECKING:
    from ..stage3 import Stage3


def adopt_group(engine: Stage3, name: str, parameters: list[nn.Parameter], stays: bool = False) -> list[ModuleUnit]:
    """The units of the group `name`; `stays`: they are whole for good."""
    kinds: dict[tuple[Any, ...], list[nn.Parameter]] = {}
    for p in parameters:
        kinds.setdefault((p.requires_grad, p.dtype, p.device), []).append(p)
    names = [name, *(f"{name} part {number}" for number in range(2, len(kinds) + 1))]
    return [_adopt_unit(engine, *one, stays) for one in zip(names, kinds.values(), strict=False)]


def _adopt_unit(engine: Stage3, name: str, parameters: list[nn.Parameter], stays: bool) -> ModuleUnit:
    index = {p: i for i, p in enumerate(engine.trainable)}
    numels = [(index.get(p, -1), p.numel()) for p in parameters]
    layout = one_unit(numels, engine.comm.size, ALIGN_BYTES // parameters[0].element_size(), STAMP_NUMEL)
    dtypes = engine.options.dtypes_of(parameters[0].dtype, engine.comm.ranks)
    mine = {p: engine.orders[p] for p in parameters}
    unit = ModuleUnit(
        name, layout, engine.comm, dtypes, engine.placement, mine, stays, engine.share, engine.stamp, engine.hiding
    )
    if unit.trainable:
        unit.gradients = engine.new_bucket(unit)
        labels.label(unit.gradients.shard, labels.GRADIENTS, name)
    return unit
