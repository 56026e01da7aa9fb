"""Bytes of the model states: the paper's floors, and what is in flight by the schedule of each strategy.

With P, G, O the bytes of parameters, gradients and optimizer states (Adam: 4ψ, 4ψ, 8ψ in fp32; below it 2ψ, 2ψ and,
with the fp32 masters, 12ψ)::

    ddp     P   + G   + O          zero2   P   + G/N + O/N
    zero1   P   + G   + O/N        zero3   P/N + G/N + O/N           (ZeRO, arXiv 1910.02054, figure 1)

Real runs hold more for a while: the gradient that autograd has just made (under DDP three of a tied
parameter), buckets and units on their way, and the slots that they are received into. That part is replayed event by
event in the order of the model's own schedule (shapes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .ddp import replay_ddp
from .partition import FlatBuffer, by_kind, by_unit, lay_out, lay_out_buckets, slots_bytes
from .replay import Replay, bytes_of, is_half, master_bytes, trainable
from .shapes import ROOT, OptimizerShape, ParameterShape, PrecisionShape, Schedule

FULL = PrecisionShape()


@dataclass
class Prediction:
    """`states_bytes`: largest sum over time. `floor_bytes`: the paper's formula. `highest`: each category's maximum."""

    states_bytes: int
    floor_bytes: int
    highest: dict[str, int]

    def of_category(self, category: str) -> int | None:
        """The expected maximum of `category`, or None where theory says nothing."""
        return self.states_bytes if category == "states" else self.highest.get(category)


def predict_states(
    strategy: dict[str, Any], schedule: Schedule, world_size: int, optimizer: OptimizerShape,
    precision: PrecisionShape = FULL,
) -> Prediction:  # fmt: skip
    """What the states of one step need on the rank that needs most. `strategy`: a resolved section."""
    replay = Replay()
    _REPLAYS[strategy["name"]](replay, strategy, schedule, world_size, optimizer, precision)
    floor = _floor(strategy["name"], schedule.shapes, world_size, optimizer.states, precision)
    return Prediction(replay.most, floor, replay.highest)


def _floor(name: str, shapes: Sequence[ParameterShape], n: int, states: int, precision: PrecisionShape) -> int:
    trained = [s for s in shapes if s.trainable]
    parameters = sum(bytes_of(s) for s in shapes)
    gradients = sum(s.numel * (precision.gradient_bytes if is_half(s) else s.element_bytes) for s in trained)
    kept = sum(states * master_bytes(s) + is_half(s) * master_bytes(s) for s in trained)
    shared = {"ddp": (1, 1, 1), "zero1": (1, 1, n), "megatron": (1, 1, n), "zero2": (1, n, n), "zero3": (n, n, n)}[name]
    return sum(-(-size // ranks) for size, ranks in zip((parameters, gradients, kept), shared, strict=True))


def _hold_optimizer(
    replay: Replay, buffers: Sequence[FlatBuffer], schedule: Schedule, n: int, optimizer: OptimizerShape
) -> None:
    """The optimizer states of the rank that owns most of what is used, padding apart."""
    used = set(schedule.arrivals)
    size = []
    for rank in range(n):
        owned = [(buffer.owned(rank, used), buffer.element_bytes) for buffer in buffers]
        size.append(sum(optimizer.bytes_of(numel * each, segments) for (numel, segments), each in owned))
    replay.hold("optimizer", "all", max(size))


def _replay_buckets(keep_gradients: bool) -> Callable[..., None]:
    """Stage 1 (gradients stay whole) and stage 2 (a bucket lives while it fills and while it is sent)."""

    def play(
        replay: Replay, strategy: dict[str, Any], schedule: Schedule, n: int, optimizer: OptimizerShape,
        precision: PrecisionShape,
    ) -> None:  # fmt: skip
        shapes = schedule.shapes
        kinds = by_kind(shapes, trainable(shapes)[::-1])
        buffers = [b for kind in kinds for b in lay_out_buckets(shapes, kind, n, strategy["bucket_bytes"])]
        whole = sum(b.padded_bytes for b in buffers)
        replay.hold("parameters", "flat", whole)
        replay.hold("parameters", "frozen", sum(bytes_of(s) for s in shapes if not s.trainable))
        _hold_optimizer(replay, buffers, schedule, n, optimizer)
        replay.hold("gradients", "kept", whole if keep_gradients else whole // n)
        _Buckets(replay, schedule, n, keep_gradients, buffers).backward()

    return play


class _Buckets:
    """The schedule of stages 1 and 2: buckets fill as gradients come and are sent in one order, one at a time."""

    def __init__(
        self, replay: Replay, schedule: Schedule, n: int, keep_gradients: bool, buffers: Sequence[FlatBuffer]
    ) -> None:
        self.replay, self.schedule, self.n, self.keep_gradients = replay, schedule, n, keep_gradients
        self.sizes: list[int] = []
        self.missing: list[list[int]] = []  # of each bucket: the gradients that have not come
        self.places: dict[int, list[int]] = {}  # of each parameter: its buckets
        for buffer in buffers:
            for start, numel in buffer.units:
                inside = [s.parameter for s in buffer.spans if min(start + numel, s.stop) > max(start, s.start)]
                for parameter in inside:
                    self.places.setdefault(parameter, []).append(len(self.sizes))
                self.missing.append([i for i in inside for _ in range(schedule.arrivals.count(i) or 1)])
                self.sizes.append(numel * buffer.element_bytes)
        self.next = 0
        self.sent: int | None = None

    def backward(self) -> None:
        for parameter in self.schedule.arrivals:
            self.replay.hold("gradients", "fresh", bytes_of(self.schedule.shapes[parameter]))
            for bucket in self.places[parameter]:
                self._open(bucket)
                self.missing[bucket].remove(parameter)
                while self.next < len(self.sizes) and not self.missing[self.next]:
                    self._send()
            self.replay.drop("gradients", "fresh")
        while self.next < len(self.sizes):
            self._send()

    def _open(self, bucket: int) -> None:
        if self.n > 1 and not self.keep_gradients:
            self.replay.hold("communication", ("bucket", bucket), self.sizes[bucket])

    def _send(self) -> None:
        bucket, self.next = self.next, self.next + 1
        if self.n == 1:
            return
        self._open(bucket)
        if self.sent is not None:
            self.replay.drop("communication", ("bucket", self.sent))
            self.replay.drop("communication", ("received", self.sent))
        self.replay.hold("communication", ("received", bucket), slots_bytes(self.sizes[bucket], self.n))
        self.sent = bucket


def _replay_stage3(
    replay: Replay, strategy: dict[str, Any], schedule: Schedule, n: int, optimizer: OptimizerShape,
    precision: PrecisionShape,
) -> None:  # fmt: skip
    shapes = schedule.shapes
    units = {u: [lay_out(shapes, kind, n) for kind in by_kind(shapes, mine)] for u, mine in by_unit(shapes).items()}
    trained = {u: [b for b in buffers if shapes[b.spans[0].parameter].trainable] for u, buffers in units.items()}
    every = [b for buffers in trained.values() for b in buffers]
    replay.hold("parameters", "shards", sum(b.padded_bytes // n for buffers in units.values() for b in buffers))
    _hold_optimizer(replay, every, schedule, n, optimizer)
    replay.hold("gradients", "kept", sum(b.padded_bytes // n for b in every))
    sizes = {u: sum(b.padded_bytes for b in buffers) for u, buffers in units.items()}
    sent = {u: sum(b.padded_bytes for b in buffers) for u, buffers in trained.items()}
    uses = [ROOT, *(u for u in schedule.uses if sizes.get(u))]
    steps = _Stage3(replay, schedule, n, strategy["prefetch"], uses, sizes, sent)
    if n > 1:
        steps.forward()
    steps.backward()


@dataclass
class _Stage3:
    """The schedule of stage 3: units come and go as `uses` runs forward and backward; the root stays throughout."""

    replay: Replay
    schedule: Schedule
    n: int
    prefetch: int
    uses: list[str]
    sizes: dict[str, int]
    gradients: dict[str, int]
    sent: str | None = None

    def forward(self) -> None:
        for place, name in enumerate(self.uses):
            self._unshard(name)
            for ahead in self.uses[place + 1 : place + 1 + self.prefetch]:
                self._unshard(ahead)
            if name != ROOT:
                self.replay.drop("parameters", name)

    def backward(self) -> None:
        """Gradients as they come; before a unit's first, backward has passed all that was used after it."""
        here = len(self.uses)
        for i in self.schedule.arrivals:
            name = self.schedule.shapes[i].unit
            while here > 1 and name != ROOT and name in self.uses[1:here]:
                here -= 1
                self._enter(here)
                if self.uses[here] == name and name not in self.uses[1:here]:
                    break
            self._arrive(i)
        while here > 1:
            here -= 1
            self._enter(here)
        for name in dict.fromkeys([*self.uses[1:2], ROOT]):
            self._send(name)

    def _enter(self, place: int) -> None:
        """Backward comes to a use: what lies wholly behind is given back and sent, what comes next is gathered."""
        if self.n == 1:
            return
        for passed in dict.fromkeys(self.uses[place + 1 : place + 2]):
            if passed not in self.uses[: place + 1]:
                self.replay.drop("parameters", passed)
                self._send(passed)
        self._unshard(self.uses[place])
        for behind in self.uses[max(0, place - self.prefetch) : place][::-1]:
            self._unshard(behind)

    def _arrive(self, i: int) -> None:
        shape = self.schedule.shapes[i]
        self.replay.hold("gradients", "fresh", bytes_of(shape))
        if self.n > 1:
            self.replay.hold("communication", ("gradients", shape.unit), self.gradients[shape.unit])
        self.replay.drop("gradients", "fresh")

    def _send(self, name: str) -> None:
        size = self.gradients[name]
        if not size or self.n == 1:
            return
        if self.sent is not None:
            self.replay.drop("communication", ("gradients", self.sent))
            self.replay.drop("communication", ("received", self.sent))
        self.replay.hold("communication", ("gradients", name), size)
        self.replay.hold("communication", ("received", name), slots_bytes(size, self.n))
        self.sent = name

    def _unshard(self, name: str) -> None:
        self.replay.hold("parameters", name, self.sizes[name])


_REPLAYS: dict[str, Callable[..., None]] = {
    "ddp": replay_ddp,
    "zero1": _replay_buckets(keep_gradients=True),
    "megatron": _replay_buckets(keep_gradients=True),
    "zero2": _replay_buckets(keep_gradients=False),
    "zero3": _replay_stage3,
}
