"""Gradients of units between autograd and the shards, event by event: the sizes of what gradients/flow.py moves::

filling    the unit's full gradients: from the first write; in stage 1 until the update, under Megatron permanently
sent       the send and receive buffers, in the wire's dtype; one unit at a time
landed     only this rank's slice, until the update

A step's first reduce-scatter, if in the gradients' dtype, writes the slice in place; otherwise it is allocated later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..groups import GroupShape
from ..layout import FlatBuffer
from ..shapes import ParameterShape, PrecisionShape, casts, gradient_bytes, wire_bytes
from ..tiers import NOWHERE, TierShape
from .live_bytes import Replay

SENT = (("communication", "full"), ("gradients", "full"), ("communication", "wire"))
"""The allocations of a unit that is sent: at most one of them is alive."""


@dataclass(frozen=True)
class UnitGradients:
    """A unit's gradients: `numel` elements, padding included, of `gradient_bytes` each as summed and `wire_bytes` as
    sent; `own`: elements of the rank's shard.
    """

    name: Any
    numel: int
    gradient_bytes: int
    wire_bytes: int
    casts: bool
    align: int
    own: int
    is_owned: bool

    @staticmethod
    def of(name: Any, numel: int, shape: ParameterShape, precision: PrecisionShape, own: int) -> UnitGradients:
        """Returns the gradients of a unit of `numel` elements that holds a parameter of `shape`."""
        sizes = gradient_bytes(shape, precision), wire_bytes(shape, precision)
        is_owned = shape.matrix is not None
        return UnitGradients(name, numel, *sizes, casts(shape, precision), shape.align, own, is_owned)


def whole_bytes(buffer: FlatBuffer, shapes: tuple[ParameterShape, ...], precision: PrecisionShape) -> int:
    """Returns the bytes of the whole gradients of a buffer."""
    return buffer.padded_numel * gradient_bytes(shapes[buffer.spans[0].parameter], precision)


class Reductions:
    """The reductions of one step on a rank. `keeps_whole`: full gradients stay until the update, as in stage 1;
    `for_good`: they exist from the beginning.
    """

    def __init__(
        self, replay: Replay, groups: GroupShape, keeps_whole: bool, reduce_with: str, tiers: TierShape = NOWHERE,
        for_good: bool = False,
    ) -> None:  # fmt: skip
        self.replay, self.groups, self.n, self.keeps_whole = replay, groups, groups.shard_ranks, keeps_whole
        self.tiers, self.for_good = tiers, for_good
        self.is_alone = self.n == 1 and not tiers.gradients
        self.receives = reduce_with == "reduce_scatter"
        self.synchronizing = True
        self._opened: dict[Any, bool] = {}  # units that are filling -> in the wire's dtype?
        self._reduced: set[Any] = set()
        self.sent: UnitGradients | None = None
        """The unit whose reduction has not completed."""

    def write(self, unit: UnitGradients) -> None:
        """Adds a gradient to the unit. Sums kept under no_sync are in the gradients' dtype, and are cast when sent."""
        if self.keeps_whole and not self.for_good:
            self.replay.hold("gradients", ("whole", unit.name), unit.numel * unit.gradient_bytes)
        if self.is_alone and not self.keeps_whole:
            self._hold_shard(unit)
        if self.is_alone or unit.name in self._opened:
            return
        self._opened[unit.name] = self.synchronizing and not self.keeps_whole
        if not self.keeps_whole:
            category = "communication" if self.synchronizing else "gradients"
            size = unit.wire_bytes if self.synchronizing else unit.gradient_bytes
            self.replay.hold(category, ("full", unit.name), unit.numel * size)
        elif unit.name in self._reduced:  # the sum so far steps aside
            self.replay.hold("gradients", ("carried", unit.name), unit.own * unit.gradient_bytes)

    def send(self, unit: UnitGradients) -> None:
        """Sends a complete unit: the reduction before it completes first, then the unit is cast, freed and sent."""
        if self.is_alone:
            return
        self.write(unit)
        self.land()
        size = unit.numel * unit.wire_bytes
        if unit.casts and not self._opened[unit.name]:
            self.replay.hold("communication", ("wire", unit.name), size)
            for category in ("communication", "gradients"):
                self.replay.drop(category, ("full", unit.name))
        if self.receives:
            if not unit.casts and not self.tiers.gradients:
                self._hold_shard(unit)
            self._hold_beside(unit, slice(1))
        self.sent = unit

    def land(self) -> None:
        """Completes the reduction that was sent last."""
        unit, self.sent = self.sent, None
        if unit is None:
            return
        name = unit.name
        if self.receives:
            self._hold_beside(unit, slice(1, None))
        self.replay.drop("communication", ("received", name))
        self._hold_shard(unit)
        self.leave()
        is_read = self.groups.on_gpu and self.tiers.medium == "host" and self.tiers.gradients
        for category, sent in SENT:
            if is_read:
                self.replay.rename(category, (sent, name), ("leaving", sent))
            else:
                self.replay.drop(category, (sent, name))
        self.replay.drop("gradients", ("carried", name))
        del self._opened[name]
        self._reduced.add(name)

    def leave(self) -> None:
        """Frees the unit that was copied to host memory last: on a GPU the copy may still have read it."""
        for category, sent in SENT:
            self.replay.drop(category, ("leaving", sent))

    def finish(self) -> None:
        """Completes the reduction that was sent last, and the copies to host memory."""
        self.land()
        self.leave()

    def _hold_beside(self, unit: UnitGradients, which: slice) -> None:
        """Allocates the buffers of a reduction, one after the other."""
        own = unit.own if unit.is_owned else None
        for size in self.groups.reduction_bytes(unit.numel, unit.wire_bytes, own)[which]:
            self.replay.hold("communication", ("received", unit.name), size)

    def _hold_shard(self, unit: UnitGradients) -> None:
        if self.keeps_whole:
            return
        away, host = self.tiers.gradients_away(unit.own, unit.align), self.replay.host
        if host is not None and self.tiers.medium == "host" and (unit.name in self._reduced or unit.casts):
            # it is added to, or cast into, the gradient that host memory keeps
            host.hold("gradients", "arrived", away * unit.wire_bytes)
            host.drop("gradients", "arrived")
        self.replay.hold("gradients", ("shard", unit.name), (unit.own - away) * unit.gradient_bytes)
