"""Observers of fake-tensor allocations besides the ledger, and two facts that the ledger of a fake world needs.

observers  hear of each allocation in order
shapes     DTensor asks each operator's shape function once, with tensors of the global shape. In a run these are fake
           tensors in a mode of torch's own, and take no memory. Inside a fake world they are in the world's mode, like
           the tensors of the rank, which a ledger could not tell apart: it counts none while one is asked
copies     that a backend makes of the tensors which a collective is given, and that the fake process group does not:
           gloo's reduce-scatter sums in a copy of its input, which lives until the sum has been written to the output.
           Our engines launch sends and receives instead, and NCCL copies nothing
"""

from __future__ import annotations

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
    """A storage as a ledger knows it: the `tier` that its bytes are in, which a label may still change."""

    tier: str


@dataclass(frozen=True)
class Growth:
    """`stored` grew by so many bytes, or shrank where `grown` is below 0."""

    stored: StoredBytes
    grown: int


@dataclass(frozen=True)
class IntervalMark:
    """`what` happens between changes: a "phase" of that name begins, an interval has a "begin", or an "end": "init", or
    a measured "step".
    """

    what: str
    name: str = ""


Observer = Callable[[Growth | IntervalMark], None]

_waiting: list[Observer] = []


@contextmanager
def listening(observer: Observer) -> Iterator[None]:
    """Tells `observer` of all that the next ledger hears: the rank's own, which is made first."""
    _waiting.append(observer)
    try:
        yield
    finally:
        _waiting.clear()


def take_observers() -> tuple[Observer, ...]:
    """Returns those that wait for a ledger; they wait no longer."""
    taken = tuple(_waiting)
    _waiting.clear()
    return taken


_asked = [False]


def shapes_asked() -> bool:
    """Returns True while a question is answered: tensors that are made then belong to no rank."""
    return _asked[0]


@contextmanager
def shapes_asked_apart() -> Iterator[None]:
    """Notes when DTensor asks. Its method is private to torch; a test fails if it moves.

    Imported here: it takes most of a second, which a command that fakes nothing would spend, too.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    answer = ShardingPropagator._propagate_tensor_meta_non_cached

    def noted(propagator: ShardingPropagator, schema: Any) -> Any:
        _asked[0] = True
        try:
            return answer(propagator, schema)
        finally:
            _asked[0] = False

    with mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", noted):
        yield


COPIED = {torch.ops.c10d._reduce_scatter_base_.default: 1}
"""Operator -> the place of the argument that gloo copies."""


def copied_by_backend(func: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
    """Returns a new tensor in place of the copy that the backend makes for an operator, None if it makes none."""
    place = COPIED.get(func)
    return None if place is None else torch.empty_like(args[place])
