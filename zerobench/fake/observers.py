"""Observers of fake-tensor allocations, beside the ledger, and two facts that the ledger of a fake world asks for.

observers  hear of each allocation in order
shapes     DTensor asks each operator's shape function once, with tensors of the global shape. In a run these are fake
           tensors in a mode of torch's own, and take no memory. Inside a fake world they are in the world's mode, like
           the tensors of the rank, which a ledger could not tell apart: it counts none while one is asked
copies     that a backend makes of the tensors which a collective is given, and that the fake process group does not:
           gloo's reduce-scatter sums in a copy of its input, which lives until the sum has been written to the output.
           Our engines launch sends and receives instead, and NCCL copies nothing
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol
from unittest import mock

import torch
import torch.distributed  # registers the operators of c10d

if TYPE_CHECKING:
    from torch.distributed.tensor._sharding_prop import ShardingPropagator


class StoredBytes(Protocol):
    """A storage as a ledger knows it: its `bytes`, and the `tier` that they are in, which a label may still change."""

    bytes: int
    tier: str


class AllocationObserver(Protocol):
    """An object that a ledger of fake tensors tells what it hears."""

    def on_growth(self, stored: StoredBytes, grown: int) -> None:
        """`stored` grew by so many bytes, or shrank where `grown` is below 0."""

    def on_phase(self, name: str) -> None:
        """A phase begins."""

    def on_begin(self) -> None:
        """An interval begins: a step."""

    def on_end(self, whole: str) -> None:
        """An interval ends: "init", or a measured "step"."""


_waiting: list[AllocationObserver] = []


@contextmanager
def listening(listener: AllocationObserver) -> Iterator[None]:
    """Tells `listener` of all that the next ledger hears: the rank's own, which is made first."""
    _waiting.append(listener)
    try:
        yield
    finally:
        _waiting.clear()


def take_listeners() -> tuple[AllocationObserver, ...]:
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
    """Notes when DTensor asks. Its method is private to torch; a test fails where it moves.

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


COPIED: dict[str, dict[Any, int]] = {"cpu": {torch.ops.c10d._reduce_scatter_base_.default: 1}}
"""Type of device -> operator -> the place of the argument that its backend copies."""


def copied_by_backend(func: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
    """Returns a new tensor in place of the copy that the backend makes for an operator, None where it makes none."""
    place = COPIED["cpu"].get(func)
    return None if place is None else torch.empty_like(args[place])
