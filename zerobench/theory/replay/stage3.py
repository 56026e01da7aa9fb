"""ZeRO-3, event by event: units are gathered and freed as their modules run forward and backward.

Each rank keeps its shards; a unit is whole while its module runs, the root from forward to backward, and small
parameters, if configured, always. Gradients are handled as under ZeRO-2, and a unit is sent once backward has passed
all its uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..groups import GroupShape
from ..layout import FlatBuffer, by_kind, by_unit, lay_out
from ..shapes import ROOT, OptimizerShape, PrecisionShape, Schedule, TierShape
from ..strategy import StrategyShape, frees_root, reads
from .live_bytes import CODES, SECONDARY, UNIT, Reductions, Replay, UnitGradients, hand_over
from .shards import Shards


@dataclass(frozen=True, eq=False)
class UnitPart:
    """Parameters of one module group and one kind: one dtype, all trained or all frozen."""

    buffer: FlatBuffer
    gradients: UnitGradients | None
    """None: frozen."""
    keeps_masters: bool
    """Whether its shard holds the masters instead of the parameters."""
    moves: bool
    """Whether it is whole only while its module runs."""


@dataclass(frozen=True)
class Use:
    """A module's parts in one run of its forward. `returns`: backward returns to it."""

    name: str
    parts: tuple[UnitPart, ...]
    returns: bool = True


def replay_units(
    replay: Replay, strategy: StrategyShape, schedule: Schedule, groups: GroupShape, optimizer: OptimizerShape,
    precision: PrecisionShape, tiers: TierShape,
) -> None:  # fmt: skip
    """Plays a step with module units on the rank that uses most memory."""
    shapes, n = schedule.shapes, groups.shard_ranks
    kept, by_name = by_unit(shapes, strategy.persistence_numel)

    def parts_of(indices: list[int], stays: bool = False) -> tuple[UnitPart, ...]:
        parts = []
        for kind in by_kind(shapes, indices):
            buffer, shape = lay_out(shapes, kind, n), shapes[kind[0]]
            keeps_masters = not stays and strategy.keeps_masters(shape, tiers)
            moves = keeps_masters or ((n > 1 or tiers.parameters) and not stays)
            gradients = None
            if shape.trainable:
                own = buffer.shard_numel(replay.owner)
                gradients = UnitGradients.of(kind[0], buffer.padded_numel, shape, precision, own)
            parts.append(UnitPart(buffer, gradients, keeps_masters, moves))
        return tuple(parts)

    small = parts_of(kept, stays=True)
    units = {name: parts_of(members) for name, members in by_name.items()}
    large = [part for parts in units.values() for part in parts]
    sharded = [part.buffer for part in large if not part.keeps_masters]
    own = sum(buffer.shard_numel(replay.owner) * buffer.element_bytes for buffer in sharded)
    replay.hold("parameters", "small", sum(part.buffer.padded_bytes for part in small))
    replay.hold("parameters", "shards", 0 if tiers.parameters else own)
    if tiers.parameters and replay.host is not None:
        replay.host.hold("parameters", "shards", own if tiers.medium == "host" else 0)
        replay.files += own if tiers.medium == "nvme" else 0
    trained = [part.buffer for part in [*small, *large] if part.gradients]
    shards = Shards(trained, n, optimizer, precision, tiers, replay.owner)
    shards.hold(replay, schedule)
    returns = schedule.returns or (True,) * len(schedule.uses)
    runs = zip(schedule.uses, returns, strict=True)
    uses = [Use(ROOT, units[ROOT]), *(Use(name, units[name], back) for name, back in runs if name in units)]
    reductions = Reductions(replay, groups, strategy, tiers)
    steps = _Units(replay, schedule, groups, strategy, [use for use in uses if use.parts], small, reductions)
    for last in schedule.played:
        reductions.synchronizing = strategy.synchronizes(last)
        steps.forward()
        steps.backward()
    shards.update(replay, schedule)


class _Units:
    """Tracks which units are whole and when gradients are sent. `uses`: of one forward, the root first; `small`:
    parameters that stay whole.

    `parts`: the parts of all uses in a row; those of a use are `parts[starts[index] : starts[index + 1]]`. A use may
    run inside another: `inner[index]` is the index of the last use inside, or its own if its module has no units.
    `ends`: indices of the uses in the order in which they end.
    """

    def __init__(
        self, replay: Replay, schedule: Schedule, groups: GroupShape, strategy: StrategyShape, uses: Sequence[Use],
        small: Sequence[UnitPart], reductions: Reductions,
    ) -> None:  # fmt: skip
        self.replay, self.schedule, self.groups, self.strategy = replay, schedule, groups, strategy
        self.uses, self.small, self.reductions = uses, small, reductions
        self.parts = [part for use in uses for part in use.parts]
        sizes = [len(use.parts) for use in uses]
        self.starts = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
        self.inner = []
        for index, use in enumerate(uses):
            last = index
            while use.name != ROOT and last + 1 < len(uses) and uses[last + 1].name.startswith(f"{use.name}."):
                last += 1
            self.inner.append(last)
        self.ends = sorted(range(len(uses)), key=lambda index: (self.inner[index], -index))
        self.part_of = {span.parameter: part for part in [*small, *self.parts] for span in part.buffer.spans}
        self.root = [part for use in uses if use.name == ROOT for part in use.parts]
        freed = self.root if frees_root(strategy, schedule.shapes) else []
        self.of_freed_root = {span.parameter for part in freed for span in part.buffer.spans}
        self.entered: tuple[UnitPart, ...] = ()
        """The parts of the use that backward is in."""
        self.next: list[UnitPart] = []
        """Parts to prefetch in backward."""
        self.sent: set[UnitPart] = set()
        """Parts that backward has passed, and sent."""
        trained = {part for part in self.parts if part.gradients}
        self.stale = {part for part in trained if self._difference_bytes(part)}
        """Parts whose next gather sends the differences to their secondary shards."""
        if groups.shard_ranks > 1:
            for part in self.parts:
                if part.gradients is None or part in self.stale:  # never without secondary shards after the first step
                    self._keep_secondary(part)

    def forward(self) -> None:
        for index, use in enumerate(self.uses):
            self._unshard(use.parts)
            end = self.starts[index + 1]
            self._unshard(self.parts[end : end + self.strategy.prefetch], ahead=True)
            for ended in (self.uses[other] for other in self.ends if self.inner[other] == index):
                if ended.name != ROOT and self.strategy.reshard_after_forward:
                    self._reshard(ended.parts)
        if not self.strategy.keep_root or (self.of_freed_root and self.groups.shard_ranks == 1):
            self._reshard(self.root)

    def backward(self) -> None:
        """Plays backward: before a unit's first gradient it passes all units that forward used after that unit."""
        self._unshard(self.root)
        self.entered, self.next = tuple(self.root), self._preceding(len(self.parts))
        # The last unit is gathered as backward comes to the head. If the head is the loss, the engine's hook at the
        # head runs before the one at the model's output, and the unit is gathered when backward has left the head.
        if not (self.schedule.head_is_loss and self.of_freed_root):
            self._gather_next()
        to_come = [index for index in self.ends if self.uses[index].name != ROOT]
        names = [self.uses[index].name for index in to_come]
        left = Counter(self.schedule.arrivals)  # gradients of each parameter to come
        arrived = Counter[UnitPart]()  # elements

        def enter(i: int) -> None:
            if i in self.of_freed_root and reads(self.schedule.shapes[i], left[i]):
                self._unshard(self.root)
            while self.schedule.shapes[i].unit in names:
                names.pop()
                self._enter(to_come.pop())

        for i in hand_over(self.replay, self.schedule, enter):
            part = self.part_of[i]
            if part.gradients:
                self.reductions.write(part.gradients)
                left[i] -= 1
                arrived[part] += 0 if left[i] else self.schedule.shapes[i].numel
                # once half of a unit's gradients have arrived, the next unit is gathered
                if self.next and part in self.entered and 2 * arrived[part] >= part.buffer.numel:
                    self.reductions.finish()
                    self._gather_next()
        while to_come:
            self._enter(to_come.pop())
        self.next = []
        self._reshard(self.parts)
        for part in dict.fromkeys([*reversed(self.parts), *self.small]):
            if part not in self.sent:
                self._send(part)
        if self.reductions.synchronizing:
            self.reductions.finish()
        self.sent.clear()

    def _enter(self, index: int) -> None:
        """Enters a use in backward: frees and sends units that are passed, and gathers the next ones."""
        use, end = self.uses[index], self.starts[self.inner[index] + 1]
        if not use.returns:
            return
        self._gather_next()
        for part in dict.fromkeys(reversed(self.parts[end:])):
            if part not in self.parts[:end] and part not in self.sent:
                self.sent.add(part)
                self._reshard([part])
                self._send(part)
        if self.of_freed_root:
            self._reshard(self.root)
        self._unshard(use.parts)
        if self.schedule.recomputes:  # with all that runs inside of it
            self._unshard(self.parts[self.starts[index] : end])
        self.entered, self.next = use.parts, self._preceding(end - len(use.parts))
        if not (self.reductions.sent and any(part.gradients for part in self.entered)):
            self._gather_next()

    def _gather_next(self) -> None:
        self._unshard(self.next, ahead=True)
        self.next = []

    def _preceding(self, end: int) -> list[UnitPart]:
        """Returns the parts to prefetch: those just before `end` that backward will reach."""
        returns = [use.returns for use in self.uses for _ in use.parts]
        window = range(max(0, end - self.strategy.prefetch), end)
        parts = [self.parts[index] for index in window if returns[index]]
        return [part for part in parts if part.buffer.spans[0].parameter not in self.of_freed_root]

    def _send(self, part: UnitPart) -> None:
        if part.gradients and self.reductions.synchronizing:
            self.reductions.send(part.gradients)

    def _unshard(self, parts: Sequence[UnitPart], ahead: bool = False) -> None:
        """Gathers parts. `ahead`: they are prefetched and not awaited."""
        for part in (part for part in parts if part.moves):
            if ("parameters", (UNIT, part)) not in self.replay.live:
                buffer, size = part.buffer, None
                self.replay.hold("parameters", (UNIT, part), buffer.padded_bytes)
                if part in self.stale:
                    self.stale.remove(part)
                    size = self._difference_bytes(part)
                elif ("parameters", (SECONDARY, part)) not in self.replay.live:
                    size = self.groups.gather_bytes(buffer.padded_numel, buffer.element_bytes)
                if size is not None:
                    self.replay.hold("communication", (CODES, part), size)
            if not ahead:
                self.replay.drop("communication", (CODES, part))

    def _reshard(self, parts: Sequence[UnitPart]) -> None:
        for part in parts:
            if ("parameters", (UNIT, part)) in self.replay.live:
                self.replay.drop("communication", (CODES, part))
                self._keep_secondary(part)
            self.replay.drop("parameters", (UNIT, part))

    def _difference_bytes(self, part: UnitPart) -> int:
        return self.groups.difference_bytes(part.buffer.padded_numel, part.buffer.element_bytes)

    def _keep_secondary(self, part: UnitPart) -> None:
        if self.groups.secondary:
            self.replay.hold("parameters", (SECONDARY, part), part.buffer.padded_bytes // self.groups.nodes[0])
