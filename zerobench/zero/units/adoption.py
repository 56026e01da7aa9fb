"""The parameters of a module group become units of stage 3: one for each kind of them."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from .. import labels
from ..comm.base import Comm
from ..comm.desync import STAMP_NUMEL, Stamp
from ..gradients.bucket_base import GradientBucket
from ..layout import one_unit
from ..offload.placement import Placement
from ..parameters.absent import Hiding
from ..precision import Dtypes
from ..strides import MemoryOrder
from .gathered_unit import GatheredUnit
from .unit import ALIGN_BYTES, Unit


class DtypeChoice(Protocol):
    """The dtypes that a caller has chosen (options.py)."""

    def dtypes_of(self, parameter: torch.dtype, ranks: int) -> Dtypes:
        """Of a unit of such parameters."""


class AdoptingEngine(Protocol):
    """Stage 3 as the owner of units."""

    comm: Comm
    trainable: list[nn.Parameter]
    orders: dict[nn.Parameter, MemoryOrder]
    placement: Placement
    hiding: Hiding

    @property
    def options(self) -> DtypeChoice:
        """A caller's choices."""

    def share(self, tensor: torch.Tensor, /) -> None:
        """Makes a tensor rank 0's, where its values are there."""

    def stamp(self, unit: Unit) -> Stamp | None:
        """The desync check of a unit's collectives."""

    def new_bucket(self, unit: Unit) -> GradientBucket:
        """The life of a unit's gradients."""


def adopt_group(
    engine: AdoptingEngine, name: str, parameters: list[nn.Parameter], stays: bool = False
) -> list[GatheredUnit]:
    """The units of the group `name`; `stays`: they are whole for good."""
    kinds: dict[tuple[Any, ...], list[nn.Parameter]] = {}
    for p in parameters:
        kinds.setdefault((p.requires_grad, p.dtype, p.device), []).append(p)
    names = [name, *(f"{name} part {number}" for number in range(2, len(kinds) + 1))]
    return [_adopt_unit(engine, *one, stays) for one in zip(names, kinds.values(), strict=False)]


def _adopt_unit(engine: AdoptingEngine, name: str, parameters: list[nn.Parameter], stays: bool) -> GatheredUnit:
    index = {p: i for i, p in enumerate(engine.trainable)}
    numels = [(index.get(p, -1), p.numel()) for p in parameters]
    layout = one_unit(numels, engine.comm.size, ALIGN_BYTES // parameters[0].element_size(), STAMP_NUMEL)
    dtypes = engine.options.dtypes_of(parameters[0].dtype, engine.comm.ranks)
    mine = {p: engine.orders[p] for p in parameters}
    unit = GatheredUnit(
        name, layout, engine.comm, dtypes, engine.placement, mine, stays, engine.share, engine.stamp, engine.hiding
    )
    if unit.trainable:
        unit.gradients = engine.new_bucket(unit)
        labels.label(unit.gradients.shard, labels.GRADIENTS, name)
    return unit
