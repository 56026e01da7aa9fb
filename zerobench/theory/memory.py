"""Bytes of the model states: the paper's floors, and what is in flight by the schedule of each strategy.

With P, G, O the bytes of parameters, gradients and optimizer states (fp32 Adam: 4ψ, 4ψ, 8ψ)::

    ddp     P   + G   + O          zero2   P   + G/N + O/N
    zero1   P   + G   + O/N        zero3   P/N + G/N + O/N           (ZeRO, arXiv 1910.02054, figure 1)

Real runs hold more for a while: the gradient that autograd has just made (three of a tied parameter), buckets and
units on their way, the receive side of an exchange. That part is replayed event by event in the order of a sequential
model: forward through the units as registered, gradients in the reverse order of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .partition import FlatBuffer, by_kind, by_unit, lay_out
from .shapes import ROOT, ParameterShape

STATES = ("parameters", "gradients", "master", "optimizer", "communication")

STEP_COUNTER_BYTES = 4
"""torch's optimizers count steps in one fp32 scalar a tensor."""


@dataclass
class Prediction:
    """`states_bytes`: largest sum over time. `floor_bytes`: the paper's formula. `highest`: each category's maximum."""

    states_bytes: int
    floor_bytes: int
    highest: dict[str, int]

    def of_category(self, category: str) -> int | None:
        """The expected maximum of `category`, or None where theory says nothing."""
        return self.states_bytes if category == "states" else self.highest.get(category)


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


def predict_states(
    strategy: dict[str, Any], shapes: Sequence[ParameterShape], world_size: int, states_per_parameter: int
) -> Prediction:
    """What the states of one step need on the rank that needs most. `strategy`: a resolved section."""
    replay = Replay()
    _REPLAYS[strategy["name"]](replay, strategy, shapes, world_size, states_per_parameter)
    floor = _floor(strategy["name"], shapes, world_size, states_per_parameter)
    return Prediction(replay.most, floor, replay.highest)


def _floor(name: str, shapes: Sequence[ParameterShape], n: int, k: int) -> int:
    whole = sum(s.numel * s.element_bytes for s in shapes)
    trained = sum(s.numel * s.element_bytes for s in shapes if s.trainable)
    shared = {"ddp": (1, 1, 1), "zero1": (1, 1, n), "zero2": (1, n, n), "zero3": (n, n, n)}[name]
    return sum(-(-size // ranks) for size, ranks in zip((whole, trained, k * trained), shared, strict=True))


def _trainable(shapes: Sequence[ParameterShape]) -> list[int]:
    return [i for i, s in enumerate(shapes) if s.trainable and s.numel]


def _bytes(shape: ParameterShape) -> int:
    return shape.numel * shape.element_bytes


def _hold_fresh(replay: Replay, shape: ParameterShape) -> None:
    """The gradient that autograd hands over; of a tied parameter, beside its sum, one from each place of use."""
    copies = shape.uses + 1 if shape.uses > 1 else 1
    replay.drop("gradients", ("waiting", shape))
    replay.hold("gradients", "fresh", copies * _bytes(shape))


def _hold_waiting(replay: Replay, shapes: Sequence[ParameterShape]) -> None:
    """Tied parameters: the gradients of all uses but the first in forward wait through most of the backward."""
    for shape in shapes:
        if shape.trainable and shape.uses > 1:
            replay.hold("gradients", ("waiting", shape), (shape.uses - 1) * _bytes(shape))


def _replay_ddp(replay: Replay, strategy: dict[str, Any], shapes: Sequence[ParameterShape], n: int, k: int) -> None:
    trained = _trainable(shapes)
    replay.hold("parameters", "all", sum(_bytes(s) for s in shapes))
    replay.hold("optimizer", "all", sum(k * _bytes(shapes[i]) + STEP_COUNTER_BYTES * bool(k) for i in trained))
    replay.hold("gradients", "buckets", sum(_bytes(shapes[i]) for i in trained))
    _hold_waiting(replay, shapes)
    for i in reversed(trained):
        _hold_fresh(replay, shapes[i])


def _hold_optimizer(replay: Replay, buffers: Sequence[FlatBuffer], n: int, k: int) -> None:
    """The optimizer states of the rank that owns most, padding apart."""
    size = []
    for rank in range(n):
        owned = [(buffer.owned(rank), buffer.element_bytes) for buffer in buffers]
        size.append(sum(k * numel * b + STEP_COUNTER_BYTES * parts * bool(k) for (numel, parts), b in owned))
    replay.hold("optimizer", "all", max(size))


def _replay_buckets(keep_gradients: bool) -> Callable[..., None]:
    """Stage 1 (gradients stay whole) and stage 2 (a bucket lives while it fills and while it is sent)."""

    def play(replay: Replay, strategy: dict[str, Any], shapes: Sequence[ParameterShape], n: int, k: int) -> None:
        kinds = by_kind(shapes, _trainable(shapes)[::-1])
        buffers = [lay_out(shapes, kind, n, strategy["bucket_bytes"]) for kind in kinds]
        replay.hold("parameters", "flat", sum(b.padded_bytes for b in buffers))
        replay.hold("parameters", "frozen", sum(_bytes(s) for s in shapes if not s.trainable))
        _hold_optimizer(replay, buffers, n, k)
        whole = sum(b.padded_bytes for b in buffers)
        replay.hold("gradients", "kept", whole if keep_gradients else whole // n)
        _hold_waiting(replay, shapes)
        for buffer in buffers:
            _play_buckets(replay, buffer, shapes, n, keep_gradients)

    return play


def _play_buckets(
    replay: Replay, buffer: FlatBuffer, shapes: Sequence[ParameterShape], n: int, keep_gradients: bool
) -> None:
    units = [(start, start + numel, numel * buffer.element_bytes) for start, numel in buffer.units]
    sent: list[int] = []
    for span in buffer.spans:
        _hold_fresh(replay, shapes[span.parameter])
        for number, (low, high, size) in enumerate(units):
            if n == 1 or min(high, span.stop) <= max(low, span.start):
                continue
            if not keep_gradients:
                replay.hold("communication", ("bucket", number), size)
            is_full = span.stop >= min(high, buffer.end)
            if is_full:
                for earlier in sent:
                    replay.drop("communication", ("bucket", earlier))
                    replay.drop("communication", ("received", earlier))
                replay.hold("communication", ("received", number), size // n * (n - 1))
                sent = [number]
        replay.drop("gradients", "fresh")
    for number in sent:
        replay.drop("communication", ("bucket", number))
        replay.drop("communication", ("received", number))


def _replay_stage3(replay: Replay, strategy: dict[str, Any], shapes: Sequence[ParameterShape], n: int, k: int) -> None:
    units = {
        name: [lay_out(shapes, kind, n) for kind in by_kind(shapes, mine)] for name, mine in by_unit(shapes).items()
    }
    trained = {name: [b for b in buffers if shapes[b.spans[0].parameter].trainable] for name, buffers in units.items()}
    every = [b for buffers in trained.values() for b in buffers]
    shard = sum(b.padded_bytes // n for buffers in units.values() for b in buffers)
    replay.hold("parameters", "shards", shard)
    _hold_optimizer(replay, every, n, k)
    replay.hold("gradients", "kept", sum(b.padded_bytes // n for b in every))
    schedule = _Stage3(replay, shapes, n, strategy["prefetch"], list(units), units, trained)
    if n > 1:
        schedule.forward()
    schedule.backward()


@dataclass
class _Stage3:
    """The schedule of stage 3 for a sequential model: the root first, then `order[1:]` one after the other."""

    replay: Replay
    shapes: Sequence[ParameterShape]
    n: int
    prefetch: int
    order: list[str]
    units: dict[str, list[FlatBuffer]]
    trained: dict[str, list[FlatBuffer]]
    sent: str | None = None

    def forward(self) -> None:
        for place, name in enumerate(self.order):
            self._unshard(place)
            for ahead in range(place + 1, min(len(self.order), place + 1 + self.prefetch)):
                self._unshard(ahead)
            if name != ROOT:
                self.replay.drop("parameters", name)

    def backward(self) -> None:
        """Gradients in reverse order; before a unit's first, its parameters come back and its successor is sent."""
        here = len(self.order)
        _hold_waiting(self.replay, self.shapes)
        for i in reversed(_trainable(self.shapes)):
            place = self.order.index(self.shapes[i].unit)
            while 0 < place < here:
                here -= 1
                self._enter(here)
            self._arrive(i)
        while here > 1:
            here -= 1
            self._enter(here)

    def _enter(self, place: int) -> None:
        if self.n == 1:
            return
        if place + 1 < len(self.order):
            self.replay.drop("parameters", self.order[place + 1])
            self._send(self.order[place + 1])
        self._unshard(place)
        for behind in range(place - 1, max(0, place - self.prefetch) - 1, -1):
            self._unshard(behind)

    def _arrive(self, i: int) -> None:
        name = self.shapes[i].unit
        _hold_fresh(self.replay, self.shapes[i])
        if self.n > 1:
            self.replay.hold("communication", ("gradients", name), self._size(self.trained[name]))
        self.replay.drop("gradients", "fresh")

    def _send(self, name: str) -> None:
        size = self._size(self.trained[name])
        if not size:
            return
        if self.sent is not None:
            self.replay.drop("communication", ("gradients", self.sent))
            self.replay.drop("communication", ("received", self.sent))
        self.replay.hold("communication", ("received", name), size // self.n * (self.n - 1))
        self.sent = name

    def _unshard(self, place: int) -> None:
        self.replay.hold("parameters", self.order[place], self._size(self.units[self.order[place]]))

    @staticmethod
    def _size(buffers: list[FlatBuffer]) -> int:
        return sum(b.padded_bytes for b in buffers)


_REPLAYS: dict[str, Callable[..., None]] = {
    "ddp": _replay_ddp,
    "zero1": _replay_buckets(keep_gradients=True),
    "zero2": _replay_buckets(keep_gradients=False),
    "zero3": _replay_stage3,
}
