"""Terms of a step beyond the closed forms of states.py, by name: upper bounds in bytes on one rank's device.

Nothing here is played: a term is a product of sizes, or what padding adds, or the most units that are open at once in
a run's own order of gradients (open_units.py). A run lies between the formula and the formula plus its terms::

    gradients of autograd    the largest that is handed over, with the one that is made beside it
    open units               from a unit's first gradient to its last, and the unit before it, which is sent meanwhile
    units in use             ZeRO-3: the root, one unit with those around and inside of it, and those prefetched
    received                 what a reduction receives into
    tile of an update        gradients in fp32 of what is updated together, as far as it is larger than autograd's
    padding                  parameters start, and shards end, at multiples of 64 bytes

A term below zero is what a run may lack of the formula, as the states of parameters that no step has used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .choices import settle
from .control import flags_bytes
from .formula import Formula, terms
from .groups import GroupShape
from .layout import ALIGN_BYTES
from .open_units import Unit, Weight, most_in_use, most_open, units_of
from .shapes import OptimizerShape, PrecisionShape, Schedule, bytes_of, casts, is_half, master_bytes, trainable
from .shapes import gradient_bytes as gradient_size
from .shapes import wire_bytes as wire_size
from .states import FULL, state_formulas, states_of
from .strategy import StrategyShape
from .tiers import NOWHERE, TierShape

Named = tuple[str, str, float]
"""(category, name, bytes)."""

PADDING, UNUSED = "padding", "states of parameters that no step uses"
AUTOGRAD, TILE = "gradients of autograd", "tile of an update"


def bounded_states(
    strategy: StrategyShape, schedule: Schedule, groups: GroupShape, optimizer: OptimizerShape,
    precision: PrecisionShape = FULL, tiers: TierShape = NOWHERE,
) -> dict[str, Formula]:  # fmt: skip
    """The formulas of states.py, each with what is in flight in its category; "states" with all of it."""
    settled = settle(strategy, schedule.shapes, groups.shard_ranks)
    step = _Step(settled, schedule, groups, optimizer, precision, tiers)
    named = list(_of_shards(step) if strategy.theory.optimizer else _of_replicas(step))
    formulas = state_formulas(settled, schedule.shapes, groups, optimizer, precision, tiers)
    found = {}
    for category, formula in formulas.items():
        sizes: dict[str, float] = {}
        for where, name, size in named:
            if category in (where, "states"):
                sizes[name] = sizes.get(name, 0) + size
        found[category] = replace(formula, in_flight=terms(sizes.items()))
    return found


@dataclass(frozen=True)
class _Step:
    """A step as the terms see it."""

    strategy: StrategyShape
    schedule: Schedule
    groups: GroupShape
    optimizer: OptimizerShape
    precision: PrecisionShape
    tiers: TierShape

    @cached_property
    def exact(self) -> dict[tuple[str, str], float]:
        """(category, letter) -> bytes of the formula on this rank."""
        shapes = self.schedule.shapes
        states = states_of(self.strategy, shapes, self.groups, self.optimizer, self.precision, self.tiers)
        return {(state.category, state.letter): state.bytes_here for state in states}

    @cached_property
    def units(self) -> list[Unit]:
        return units_of(self.strategy, self.schedule.shapes, self.n)

    @cached_property
    def trained(self) -> list[Unit]:
        return [unit for unit in self.units if unit.shape.trainable]

    @property
    def n(self) -> int:
        return self.groups.shard_ranks

    @property
    def keeps_whole(self) -> bool:
        """True where whole gradients stay until the update, as in ZeRO-1."""
        return not (self.strategy.theory.gradients or self.tiers.gradients)

    @property
    def is_alone(self) -> bool:
        """True where gradients are sent nowhere."""
        return self.n == 1 and not self.tiers.gradients

    @property
    def postpones(self) -> bool:
        """True where micro-batches before the last keep whole gradients, and reduce nothing."""
        return self.schedule.micro_batches > 1 and self.strategy.accumulate == "last"

    def updated_here(self, unit: Unit) -> int:
        """Elements of a unit's shard that are updated on the device."""
        shard = unit.numel // self.n
        return shard - self.tiers.updates_away(shard, unit.shape.element_bytes)

    def gradient(self, unit: Unit) -> int:
        """Bytes of a unit's whole gradient as it is accumulated."""
        return unit.numel * gradient_size(unit.shape, self.precision)

    def wire(self, unit: Unit) -> int:
        """Bytes of it as it is sent."""
        return unit.numel * wire_size(unit.shape, self.precision)

    def open(self, weight: Weight) -> int:
        """The most of units that are filling and in flight."""
        return most_open(self.strategy, self.schedule, self.trained, weight)


def _of_replicas(step: _Step) -> Iterator[Named]:
    """DDP: everything is whole on every rank; its buckets are the gradients themselves."""
    shapes, schedule, optimizer = step.schedule.shapes, step.schedule, step.optimizer
    mine, used = trainable(shapes), set(schedule.arrivals)
    tied = [shapes[i] for i in mine if shapes[i].uses > 1]
    autograd = _of_autograd(schedule, summed=True)
    yield "gradients", AUTOGRAD, autograd
    yield "gradients", "gradients of tied parameters", sum((shape.uses - 1) * bytes_of(shape) for shape in tied)
    if step.strategy.find_unused_parameters:
        yield "communication", "flags of used parameters", flags_bytes(schedule)
    if step.postpones:
        yield "gradients", "gradients of earlier micro-batches", sum(bytes_of(shapes[i]) for i in used)
    most, tensors = 0, len(used)
    if any(is_half(shapes[i]) for i in mine) and step.precision.tile_bytes:
        most = step.precision.tile_bytes // ALIGN_BYTES * ALIGN_BYTES
        tensors = sum(-(-master_bytes(shapes[i]) // most) for i in used)
        tile = min(most, sum(master_bytes(shapes[i]) for i in mine))
        yield "gradients", TILE, max(0, tile - autograd)  # an update comes after backward, not beside it
    yield "optimizer", "counts", 4 * optimizer.counts * tensors
    idle = [shapes[i] for i in mine if i not in used]
    yield "optimizer", UNUSED, -optimizer.states * sum(map(master_bytes, idle))
    # a bucket that no gradient lies in is a buffer of DDP's
    yield "gradients", UNUSED, -sum(map(bytes_of, idle))
    yield "communication", UNUSED, sum(map(bytes_of, idle))


def _of_autograd(schedule: Schedule, summed: bool = False) -> int:
    """The largest gradient that is handed over, and the one made beside it.

    `summed`: of a tied parameter that is the sum over its uses, made beside the gradient of the first of them.
    """
    shapes, found = schedule.shapes, [0]
    for shape in (shapes[i] for i in schedule.arrivals):
        beside = bytes_of(shapes[shape.beside]) if shape.beside is not None else 0
        found.append(bytes_of(shape) * (1 + (summed and shape.uses > 1)) + beside)
    return max(found)


def _of_shards(step: _Step) -> Iterator[Named]:
    """Our stages: buckets or units of modules, with shards of them."""
    yield from _of_parameters(step)
    yield from _of_gradients(step)
    yield from _of_communication(step)
    yield from _of_update(step)


def _of_parameters(step: _Step) -> Iterator[Named]:
    def padded(units: Sequence[Unit]) -> int:
        return sum(unit.numel * unit.shape.element_bytes for unit in units)

    def own(units: Sequence[Unit]) -> int:
        return sum(unit.own * unit.shape.element_bytes for unit in units)

    if step.strategy.has_buckets:
        yield "parameters", PADDING, padded(step.units) - own(step.units)
        return
    small, large = ([unit for unit in step.units if unit.stays is stays] for stays in (True, False))
    here = 1 - step.tiers.parameters
    yield "parameters", "small parameters", padded(small) - here * own(small) / step.n
    yield "parameters", PADDING, here * (padded(large) - own(large)) / step.n
    if step.n > 1 or step.tiers.parameters:
        whole = most_in_use(step.strategy, step.schedule, step.units, lambda u: u.numel * u.shape.element_bytes)
        yield "parameters", "units in use", whole
    if step.groups.secondary:
        yield "parameters", "secondary shards", padded(large) / step.groups.nodes[0]


def _of_gradients(step: _Step) -> Iterator[Named]:
    yield "gradients", AUTOGRAD, _of_autograd(step.schedule)
    exact = step.exact["gradients", "G"]
    whole = sum(step.gradient(unit) for unit in step.trained)
    if step.keeps_whole or step.is_alone:
        yield "gradients", PADDING, whole - exact
        if not step.is_alone and step.schedule.micro_batches > 1 and not step.postpones:
            yield "gradients", "sums so far of open units", step.open(lambda unit: step.gradient(unit) // step.n)
    else:
        shards = ((unit.numel // step.n, unit.shape.element_bytes, step.gradient(unit) // unit.numel)
                  for unit in step.trained)  # fmt: skip
        here = sum((numel - step.tiers.gradients_away(numel, size)) * each for numel, size, each in shards)
        yield "gradients", PADDING, here - exact
        if step.postpones:
            yield "gradients", "gradients of earlier micro-batches", whole
    used = set(step.schedule.arrivals)
    idle = [unit for unit in step.trained if not used & {*unit.parameters}]
    yield "gradients", UNUSED, -sum(unit.own * step.gradient(unit) / unit.numel for unit in idle) * _part(step)


def _part(step: _Step) -> float:
    """The part of a gradient that a rank's device keeps."""
    whole = sum(unit.own * step.gradient(unit) / unit.numel for unit in step.trained)
    return step.exact["gradients", "G"] / whole if whole else 0.0


def _of_communication(step: _Step) -> Iterator[Named]:
    if not step.is_alone and step.trained:
        largest = max(map(step.wire, step.trained))
        if not step.keeps_whole:
            yield "communication", "open units", 2 * largest if step.postpones else step.open(step.wire)
        if (step.keeps_whole or step.postpones) and any(casts(unit.shape, step.precision) for unit in step.trained):
            yield "communication", "cast for sending", largest
        if step.strategy.reduce_with == "reduce_scatter":
            sizes = {(unit.numel, wire_size(unit.shape, step.precision)) for unit in step.trained}
            received = [size for one in sizes for size in step.groups.reduction_bytes(*one)]
            yield "communication", "received", max(received)
        if step.schedule.arena:
            yield "communication", "free slots of the arena", _of_arena(step)
    if step.strategy.theory.parameters and step.n > 1:
        codes = most_in_use(step.strategy, step.schedule, step.units, lambda unit: step.groups.gather_bytes(
            unit.numel, unit.shape.element_bytes))  # fmt: skip
        yield "communication", "quantized gathers", codes


def _of_arena(step: _Step) -> int:
    """Slots of each size are as many as were ever taken at once, whatever lies in them."""
    if step.postpones and not step.keeps_whole:
        return sum(step.gradient(unit) + step.wire(unit) for unit in step.trained)
    count = 1 if step.keeps_whole else step.open(lambda _: 1)
    return count * sum({step.wire(unit) for unit in step.trained})


def _of_update(step: _Step) -> Iterator[Named]:
    optimizer, tiers, used = step.optimizer, step.tiers, set(step.schedule.arrivals)
    shapes = step.schedule.shapes
    sizes = [(step.updated_here(unit), max(4, unit.shape.element_bytes), unit) for unit in step.trained]
    masters = sum(here * size for here, size, unit in sizes if is_half(unit.shape) or tiers.parameters)
    yield "master", PADDING, masters - step.exact["master", "O"]
    padded = optimizer.states * sum(here * size for here, size, _ in sizes) - step.exact["optimizer", "O"]
    yield "optimizer", PADDING, max(0, padded)
    if tiers.optimizer:
        leaving = ((unit.numel // step.n - here, unit.own / step.n, size) for here, size, unit in sizes)
        more = sum((gone - tiers.fraction * own) * size for gone, own, size in leaving)
        yield "optimizer", "rounding of what leaves", -optimizer.states * max(0, more) * (tiers.fraction < 1)
    idle = sum(master_bytes(shapes[i]) for i in trainable(shapes) if i not in used)
    # they may all lie in the shards of one rank
    yield "optimizer", UNUSED, -optimizer.states * min(idle, sum(here * size for here, size, _ in sizes))
    most = _tile_numel(step)
    if optimizer.counts:
        cuts = sum(len(unit.parameters) + 1 + here // (most or max(1, here)) for here, _, unit in sizes if here)
        yield "optimizer", "counts", 4 * optimizer.counts * cuts
    here_in_all = sum(here for here, _, _ in sizes)
    tile = min(here_in_all, max(most, tiers.chunk_numel or 0)) if most else here_in_all
    excess = tile * _tile_bytes(step) - step.exact.get(("gradients", "O"), 0)
    yield "gradients", TILE, max(0, excess - _of_autograd(step.schedule))


def _casts_to_update(step: _Step) -> bool:
    return step.precision.gradient_bytes < 4 and any(is_half(unit.shape) for unit in step.trained)


def _tile_numel(step: _Step) -> int | None:
    """Elements that are updated together; None: all."""
    fused = step.optimizer.fused and not _casts_to_update(step) and step.tiers.place is None
    if step.precision.tile_bytes is None or fused:
        return None
    return max(ALIGN_BYTES, step.precision.tile_bytes // ALIGN_BYTES * ALIGN_BYTES) // 4


def _tile_bytes(step: _Step) -> int:
    """Bytes of an element of a tile: as it comes back from another tier, and as it is cast."""
    there_and_back = step.tiers.gradients and not step.tiers.optimizer
    cast = _casts_to_update(step)
    return there_and_back * (step.precision.gradient_bytes if cast else 4) + 4 * cast
