"""Observers of fake-tensor allocations in addition to the ledger, and two facts that a fake world's ledger needs.

observers  are notified of each allocation in order
shapes     DTensor calls each operator's shape function once, with tensors of the global shape. In a real run these are
           fake tensors in a mode of torch's own, and take no memory. In a fake world they are in the world's mode, like
           the rank's tensors, and a ledger could not distinguish them, so it counts no tensors during such a call
copies     that a backend makes of a collective's input, but the fake process group does not: gloo's reduce-scatter
           sums in a copy of its input, which lives until the sum has been written to the output. Our engines launch
           sends and receives instead, and NCCL makes no copies
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from unittest import mock

import torch
import torch.distributed  # registers the operators of c10d

if TYPE_CHECKING:
    from torch.distributed.tensor._sharding_prop import ShardingPropagator


class StoredBytes(Protocol):
    """A ledger's view of a storage: the `tier` of its bytes, which a label may still change."""

    tier: str


@dataclass(frozen=True)
class Growth:
    """`stored` grew by `grown` bytes, or shrank if negative."""

    stored: StoredBytes
    grown: int


@dataclass(frozen=True)
class IntervalMark:
    """A mark between changes. `what`: "phase", if the phase `name` begins; "begin" and "end" of an interval, the end
    with `name` "init", or "step" if it is measured; "matmul", if a matrix product has its result.
    """

    what: str
    name: str = ""


MATMULS = {
    getattr(getattr(torch.ops.aten, name), overload)
    for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv")
    for overload in ("default", "out")
}
"""Operators that use a cuBLAS handle, whose workspace is allocated after the memory of their result."""


Observer = Callable[[Growth | IntervalMark], None]

_waiting: list[Observer] = []


@contextmanager
def listening(observer: Observer) -> Iterator[None]:
    """Notifies `observer` of all events of the next ledger created: the rank's own, which is created first."""
    _waiting.append(observer)
    try:
        yield
    finally:
        _waiting.clear()


def take_observers() -> tuple[Observer, ...]:
    """Returns the observers that wait for a ledger, and clears the list."""
    taken = tuple(_waiting)
    _waiting.clear()
    return taken


_asked = [False]


def shapes_asked() -> bool:
    """Whether DTensor is calling a shape function; tensors made then belong to no rank."""
    return _asked[0]


IN_PLACE = re.compile(r"aten::_(foreach|fused)_\w+_$")
"""Names of in-place operators on lists of tensors, which act on each element by itself."""


def _shares_placements(specs: tuple[Any, ...]) -> bool:
    """Returns True if DTensors that an operator combines element by element are sharded alike; step counts may differ,
    and numbers have no placements.
    """
    sharded = [spec for spec in specs if hasattr(spec, "placements") and spec.shape]
    kinds = {(spec.mesh, spec.placements) for spec in sharded}
    return len(kinds) == 1 and not any(placement.is_partial() for placement in sharded[0].placements)


@contextmanager
def noting_shape_functions() -> Iterator[None]:
    """Tracks when DTensor calls shape functions, and shortens its analysis of updates, which would take a fifth of a
    simulation: in-place operators on lists of equally sharded tensors need no communication and return nothing, and
    strided shards are looked for once per operator. All names are private to torch; a test fails if they move.

    DTensor is imported here because that takes most of a second, which commands without fake tensors should not spend.
    """
    from torch.distributed.tensor import _sharding_prop
    from torch.distributed.tensor._op_schema import OutputSharding
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.distributed.tensor.placement_types import _StridedShard

    flag = "_propagate_use_strided_shard_flag"
    propagate_flag, looked = getattr(_sharding_prop, flag, None), list[Any]([None, False])  # None: an older torch

    def propagate_if_strided(strategy: Any, schema: Any) -> None:
        if looked[0] is not schema:
            kinds = (type(placement) for spec in schema.args_spec for placement in spec.placements)
            looked[:] = schema, _StridedShard in kinds
        if looked[1] and propagate_flag is not None:
            propagate_flag(strategy, schema)

    propagate_sharding = ShardingPropagator.propagate_op_sharding_non_cached

    def propagate_of_update(propagator: ShardingPropagator, schema: Any) -> Any:
        lists = [argument for argument in schema.args_schema if isinstance(argument, list) and argument]
        if IN_PLACE.match(schema.op._schema.name) and all(map(_shares_placements, zip(*lists, strict=True))):
            return OutputSharding(None)
        return propagate_sharding(propagator, schema)

    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def noted(propagator: ShardingPropagator, schema: Any) -> Any:
        _asked[0] = True
        try:
            return propagate(propagator, schema)
        finally:
            _asked[0] = False

    with (
        mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", noted),
        mock.patch.object(ShardingPropagator, "propagate_op_sharding_non_cached", propagate_of_update),
        mock.patch.object(_sharding_prop, flag, propagate_if_strided, create=True),
    ):
        yield


COPIED = {torch.ops.c10d._reduce_scatter_base_.default: 1}
"""Operator -> index of the argument that gloo copies."""


def copied_by_backend(func: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
    """Returns a new tensor representing the backend's copy for an operator, None if it makes none."""
    index = COPIED.get(func)
    return None if index is None else torch.empty_like(args[index])
