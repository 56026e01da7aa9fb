"""ZeRO-3, event by event: units are gathered and freed as their modules run forward and backward.

Each rank keeps its shards; a unit is whole while its module runs, the root from forward to backward, and small
parameters, if configured, always. Gradients are handled as under ZeRO-2, and a unit is sent once backward has passed
all its uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..groups import GroupShape
from ..layout import FlatBuffer, by_kind, by_unit, lay_out
from ..shapes import ROOT, OptimizerShape, PrecisionShape, Schedule, micro_batches
from ..strategy import StrategyShape, frees_root, reads
from ..tiers import NOWHERE, TierShape
from .live_bytes import Replay, hand_over
from .reductions import Reductions, UnitGradients
from .shards import Shards


@dataclass(frozen=True, eq=False)
class UnitPart:
    """Parameters of one module group and one kind: one dtype, all trained or all frozen."""

    buffer: FlatBuffer
    gradients: UnitGradients | None
    """None: frozen."""
    keeps_masters: bool
    """Whether its shard is that of the masters."""
    moves: bool
    """Whether it is whole only while its module runs."""


@dataclass(frozen=True)
class Use:
    """A module's parts in one run of its forward. `returns`: backward returns to it."""

    parts: tuple[UnitPart, ...]
    returns: bool
    is_root: bool


def replay_units(
    replay: Replay, strategy: StrategyShape, schedule: Schedule, groups: GroupShape, optimizer: OptimizerShape,
    precision: PrecisionShape, tiers: TierShape = NOWHERE,
) -> None:  # fmt: skip
    """Plays a step with module units on the rank that uses most memory."""
    shapes, n = schedule.shapes, groups.shard_ranks
    kept, by_name = by_unit(shapes, strategy.persistence_numel)
    moves = n > 1 or tiers.parameters

    def parts_of(indices: list[int], stays: bool = False) -> tuple[UnitPart, ...]:
        parts = []
        for kind in by_kind(shapes, indices):
            buffer, shape = lay_out(shapes, kind, n), shapes[kind[0]]
            alone = not stays and strategy.keeps_masters(shape, tiers)
            gradients = None
            if shape.trainable:
                own = buffer.shard_numel(replay.owner)
                gradients = UnitGradients.of(kind[0], buffer.padded_numel, shape, precision, own)
            parts.append(UnitPart(buffer, gradients, alone, alone or (moves and not stays)))
        return tuple(parts)

    small = parts_of(kept, stays=True)
    units = {name: parts_of(members) for name, members in by_name.items()}
    large = [part for parts in units.values() for part in parts]
    trained = [part.buffer for part in [*small, *large] if part.gradients]
    _hold_parameters(replay, small, large, tiers)
    shards = Shards(trained, n, optimizer, precision, tiers, replay.owner)
    shards.hold(replay, schedule)
    returns = schedule.returns or (True,) * len(schedule.uses)
    uses = [Use(units[ROOT], True, True)]
    uses += [Use(units[name], back, False) for name, back in zip(schedule.uses, returns, strict=True) if name in units]
    reductions = Reductions(replay, groups, False, strategy.reduce_with, tiers)
    steps = _Units(replay, schedule, groups, strategy, [use for use in uses if use.parts], small, reductions)
    for last in micro_batches(schedule):
        reductions.synchronizing = strategy.synchronizes(last)
        steps.forward()
        steps.backward()
    shards.update(replay, schedule)


def _hold_parameters(replay: Replay, small: Sequence[UnitPart], large: Sequence[UnitPart], tiers: TierShape) -> None:
    replay.hold("parameters", "small", sum(part.buffer.padded_bytes for part in small))
    beside = [part.buffer for part in large if not part.keeps_masters]
    own = sum(buffer.shard_numel(replay.owner) * buffer.element_bytes for buffer in beside)
    replay.hold("parameters", "shards", 0 if tiers.parameters else own)
    if tiers.parameters and replay.host is not None:
        replay.host.hold("parameters", "shards", own if tiers.medium == "host" else 0)
        replay.files += own if tiers.medium == "nvme" else 0


@dataclass
class _Units:
    """Tracks which units are whole and when gradients are sent. `uses`: of one forward, the root first; `small`:
    parameters that stay whole.
    """

    replay: Replay
    schedule: Schedule
    groups: GroupShape
    strategy: StrategyShape
    uses: list[Use]
    small: tuple[UnitPart, ...]
    reductions: Reductions
    done: set[UnitPart] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.row = [part for use in self.uses for part in use.parts]
        sizes = [len(use.parts) for use in self.uses]
        self.starts = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
        self.last = _last_inside([self._name(use) for use in self.uses])
        self.ends = sorted(range(len(self.uses)), key=lambda index: (self.last[index], -index))
        self.part_of = {s.parameter: part for part in [*self.small, *self.row] for s in part.buffer.spans}
        self.entered: tuple[UnitPart, ...] = ()
        self.waiting: list[UnitPart] = []
        self.first = int(bool(self.uses) and self.uses[0].is_root)
        parts = self.row[: self.starts[self.first]] if frees_root(self.strategy, self.schedule.shapes) else []
        self.of_root = {span.parameter for part in parts for span in part.buffer.spans}
        for part in self.row if self.groups.shard_ranks > 1 else ():
            if part.gradients is None or self._sends_differences(part):  # never stale: since the first step
                self._keep_secondary(part)
        self.behind = {part for part in self.row if part.gradients and self._sends_differences(part)}

    def forward(self) -> None:
        for index, use in enumerate(self.uses):
            self._unshard(use.parts)
            end = self.starts[index + 1]
            self._unshard(self.row[end : end + self.strategy.prefetch], ahead=True)
            for over in (self.uses[other] for other in self.ends if self.last[other] == index):
                if not over.is_root and self.strategy.reshard_after_forward:
                    self._reshard(over.parts)
        if not self.strategy.keep_root or (self.of_root and self.groups.shard_ranks == 1):
            self._reshard(self.row[: self.starts[self.first]])

    def backward(self) -> None:
        """Plays backward, which has passed all units used after a unit before that unit's first gradient."""
        self._unshard(self.row[: self.starts[self.first]])
        self._unshard(self._preceding(len(self.row)), ahead=True)
        to_come = [index for index in self.ends if not self.uses[index].is_root]
        self.left, self.come = Counter(self.schedule.arrivals), Counter[UnitPart]()
        names = [self._name(self.uses[index]) for index in to_come]

        def enter(i: int) -> None:
            if i in self.of_root and reads(self.schedule.shapes[i], self.left[i]):
                self._unshard(self.row[: self.starts[self.first]])
            while self.schedule.shapes[i].unit in names:
                names.pop()
                self._enter(to_come.pop())

        for i in hand_over(self.replay, self.schedule, enter):
            part = self.part_of[i]
            if part.gradients:
                self.reductions.write(part.gradients)
                self._count(part, i)
        while to_come:
            self._enter(to_come.pop())
        self.waiting = []
        self._reshard(self.row)
        for part in dict.fromkeys([*reversed(self.row), *self.small]):
            if part not in self.done:
                self._send(part)
        if self.reductions.synchronizing:
            self.reductions.finish()
        self.done.clear()

    def _name(self, use: Use) -> str:
        return self.schedule.shapes[use.parts[0].buffer.spans[0].parameter].unit

    def _enter(self, index: int) -> None:
        """Enters a use in backward: units that backward has fully passed are freed and sent, and the next ones
        gathered.
        """
        if not self.uses[index].returns:
            return
        self._gather_waiting()
        end = self.starts[self.last[index] + 1]
        for passed in dict.fromkeys(reversed(self.row[end:])):
            if passed not in self.row[:end] and passed not in self.done:
                self.done.add(passed)
                self._reshard([passed])
                self._send(passed)
        if self.of_root:
            self._reshard(self.row[: self.starts[self.first]])
        self._unshard(self.uses[index].parts)
        if self.schedule.recomputes:  # with all that runs inside of it
            self._unshard(self.row[self.starts[index] : end])
        self.entered, self.waiting = self.uses[index].parts, self._preceding(end - len(self.uses[index].parts))
        if not (self.reductions.sent and any(part.gradients for part in self.entered)):
            self._gather_waiting()

    def _count(self, part: UnitPart, i: int) -> None:
        """Counts a gradient. Once half of a unit's gradients have arrived, the next unit is gathered."""
        self.left[i] -= 1
        self.come[part] += 0 if self.left[i] else self.schedule.shapes[i].numel
        if self.waiting and part in self.entered and 2 * self.come[part] >= part.buffer.numel:
            self.reductions.finish()
            self._gather_waiting()

    def _gather_waiting(self) -> None:
        self._unshard(self.waiting, ahead=True)
        self.waiting = []

    def _preceding(self, end: int) -> list[UnitPart]:
        """Returns the parts to prefetch: those just before `end` in the row that backward will reach."""
        returns = [use.returns for use in self.uses for _ in use.parts]
        window = range(max(0, end - self.strategy.prefetch), end)
        parts = [self.row[at] for at in window if returns[at]]
        return [part for part in parts if part.buffer.spans[0].parameter not in self.of_root]

    def _send(self, part: UnitPart) -> None:
        if part.gradients and self.reductions.synchronizing:
            self.reductions.send(part.gradients)

    def _unshard(self, parts: Sequence[UnitPart], ahead: bool = False) -> None:
        """Gathers parts. `ahead`: they are prefetched and not awaited."""
        for part in (part for part in parts if part.moves):
            buffer, codes = part.buffer, ("communication", ("codes", part))
            if ("parameters", ("unit", part)) not in self.replay.live:
                self.replay.hold("parameters", ("unit", part), buffer.padded_bytes)
                if part in self.behind:
                    self.behind.remove(part)
                    self.replay.hold(*codes, self.groups.difference_bytes(buffer.padded_numel, buffer.element_bytes))
                elif ("parameters", ("secondary", part)) not in self.replay.live:
                    self.replay.hold(*codes, self.groups.gather_bytes(buffer.padded_numel, buffer.element_bytes))
            if not ahead:
                self.replay.drop(*codes)

    def _reshard(self, parts: Sequence[UnitPart]) -> None:
        for part in parts:
            if ("parameters", ("unit", part)) in self.replay.live:
                self.replay.drop("communication", ("codes", part))
                self._keep_secondary(part)
            self.replay.drop("parameters", ("unit", part))

    def _sends_differences(self, part: UnitPart) -> bool:
        buffer = part.buffer
        return self.groups.difference_bytes(buffer.padded_numel, buffer.element_bytes) > 0

    def _keep_secondary(self, part: UnitPart) -> None:
        if self.groups.secondary:
            self.replay.hold("parameters", ("secondary", part), part.buffer.padded_bytes // self.groups.nodes[0])


def _last_inside(names: list[str]) -> list[int]:
    """Returns, for each use, the last use that runs inside it: itself, unless its module contains units."""
    ends = []
    for index, name in enumerate(names):
        last = index
        while name != ROOT and last + 1 < len(names) and names[last + 1].startswith(f"{name}."):
            last += 1
        ends.append(last)
    return ends
