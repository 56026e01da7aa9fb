"""Live bytes while a schedule is played event by event, and their maxima."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .shapes import ParameterShape

STATES = ("parameters", "gradients", "master", "optimizer", "communication")


@dataclass
class Replay:
    """Live bytes by (category, name) while a schedule is played; remembers the maxima."""

    live: dict[tuple[str, Any], int] = field(default_factory=dict)
    highest: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STATES, 0))
    most: int = 0

    def hold(self, category: str, name: Any, size: int) -> None:
        """`name` comes alive (again: no effect)."""
        self.live[category, name] = size
        totals = dict.fromkeys(self.highest, 0)
        for (kind, _), value in self.live.items():
            totals[kind] += value
        self.highest = {kind: max(self.highest[kind], totals[kind]) for kind in totals}
        self.most = max(self.most, sum(totals.values()))

    def drop(self, category: str, name: Any) -> None:
        """`name` is freed."""
        self.live.pop((category, name), None)


def bytes_of(shape: ParameterShape) -> int:
    """Bytes of the whole parameter."""
    return shape.numel * shape.element_bytes


def trainable(shapes: Sequence[ParameterShape]) -> list[int]:
    """The numbers of the parameters that are trained."""
    return [i for i, s in enumerate(shapes) if s.trainable and s.numel]


def is_half(shape: ParameterShape) -> bool:
    """Whether the parameter has an fp32 master beside it."""
    return shape.element_bytes < 4


def master_bytes(shape: ParameterShape) -> int:
    """Bytes of what the optimizer updates, and of each of its states: fp32, or the parameter's own dtype above."""
    return shape.numel * max(4, shape.element_bytes)


def hold_fresh(replay: Replay, shape: ParameterShape) -> None:
    """The gradient that autograd hands over; of a tied parameter, for a moment beside those from each place of use."""
    if shape.uses > 1:
        replay.drop("gradients", ("waiting", shape))
        replay.hold("gradients", "fresh", (shape.uses + 1) * bytes_of(shape))
    replay.hold("gradients", "fresh", bytes_of(shape))


def hold_waiting(replay: Replay, shapes: Sequence[ParameterShape]) -> None:
    """Tied parameters: the gradients of all uses but the first in forward wait through most of the backward."""
    for shape in shapes:
        if shape.trainable and shape.uses > 1:
            replay.hold("gradients", ("waiting", shape), (shape.uses - 1) * bytes_of(shape))
