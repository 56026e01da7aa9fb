"""Closed forms of a step's communication, and what a run moves beyond them, each stated by name.

Elements that a rank moves, all-reduce counting twice (ZeRO, arXiv 1910.02054, section 7). Of m micro-batches r are
reduced, and ZeRO-3 gathers each once in forward and once in backward; with one micro-batch the paper's figures::

    ddp                       2rψ           2ψ     all-reduce, section 7.1
    zero1, zero2, megatron    (r + 1)ψ      2ψ     reduce-scatter and all-gather, section 7.2.1
    zero3                     (r + 2m)ψ     3ψ     reduce-scatter and two all-gathers, section 7.2.2

Bytes between nodes under ZeRO-3 (ZeRO++, arXiv 2306.10209, section 3): a gather of M bytes of parameters moves M, in
int8 (qwZ) ψ; none from secondary shards in the node (hpZ), but for the first of a step; a reduction moves M, in int4
(qgZ) ψ/2. With 2-byte elements 3M become 0.75M. Each of N ranks in Z nodes sends (Z - 1)/N of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from .choices import settle
from .formula import Formula, terms
from .gathers import gathers_of
from .groups import GroupShape
from .open_units import Unit, units_of
from .shapes import PrecisionShape, Schedule, wire_bytes
from .strategy import StrategyShape

INT8, INT4 = 1.0, 0.5
"""Bytes of a quantized element, its scale apart."""


def volume_formula(strategy: StrategyShape, schedule: Schedule, world_size: int) -> Formula:
    """Elements that a rank moves in a step, by the closed form."""
    psi, m = sum(shape.numel for shape in schedule.shapes if shape.trainable), schedule.micro_batches
    r = strategy.reductions(m)
    if world_size == 1:
        return Formula("0", 0, {"N": 1})
    if not strategy.theory.optimizer:
        text, value = "2rψ", 2 * r
    elif strategy.has_buckets:
        text, value = "(r + 1)ψ", r + 1
    else:
        text, value = "(r + 2m)ψ", r + 2 * m
    if m == 1:
        return Formula(f"{value}ψ", value * psi, {"ψ": psi})
    return Formula(text, value * psi, {"ψ": psi, "r": r} | ({"m": m} if "m" in text else {}))


def bounded_volume(strategy: StrategyShape, schedule: Schedule, groups: GroupShape) -> Formula:
    """Returns `volume_formula` with its terms; the sum of both is what a run moves, where no hop through
    nodes, group of ranks or quantization changes what a collective counts as.
    """
    formula = volume_formula(strategy, schedule, groups.world_size)
    if groups.world_size == 1 or not strategy.theory.optimizer:
        return formula
    strategy = settle(strategy, schedule.shapes, groups.shard_ranks)
    sizes: dict[str, int] = {}
    for unit in units_of(strategy, schedule.shapes, groups.shard_ranks):
        for name, size in _beyond(strategy, schedule, unit):
            sizes[name] = sizes.get(name, 0) + size
    return Formula(formula.equation, formula.value, formula.numbers, terms(sizes.items()))


def _beyond(strategy: StrategyShape, schedule: Schedule, unit: Unit) -> Iterator[tuple[str, int]]:
    """(name, elements) that a unit moves beyond the formula, below zero where it moves less."""
    m = schedule.micro_batches
    expected, r = (1 if strategy.has_buckets else 2 * m), strategy.reductions(m)
    gathers = _gathers(strategy, schedule, unit)
    if not unit.shape.trainable:
        yield "frozen units", gathers * unit.numel
        return
    reduced = r if strategy.has_buckets or unit.stays or gathers else 0
    yield "padding", (gathers + reduced) * (unit.numel - unit.own)
    by = "units that stay whole, or that no step uses" if gathers < expected else "units that are gathered again"
    yield by, (gathers - expected) * unit.own
    yield "gradients of units that no step uses", (reduced - r) * unit.own
    if strategy.reduce_with == "all_reduce":
        yield "all-reduce in place of reduce-scatter", reduced * unit.numel


def _gathers(strategy: StrategyShape, schedule: Schedule, unit: Unit) -> int:
    """All-gathers of a unit in a step."""
    if strategy.has_buckets or unit.stays:
        return int(unit.shape.trainable)
    return schedule.micro_batches * gathers_of(strategy, schedule, unit.module)


def between_nodes_formula(
    strategy: StrategyShape, schedule: Schedule, groups: GroupShape, precision: PrecisionShape
) -> Formula:  # fmt: skip
    """Bytes that a rank sends to other nodes in a step of ZeRO-3, by the closed form of ZeRO++."""
    m, (_, nodes) = schedule.micro_batches, groups.nodes
    trained = [shape for shape in schedule.shapes if shape.trainable]
    psi = sum(shape.numel for shape in trained)
    moved = 0.0
    for shape in trained:
        gathers = 1 if groups.secondary else 2 * m
        size = INT8 if groups.quantizes(groups.weight_block, shape.element_bytes) else shape.element_bytes
        sent = wire_bytes(shape, precision)
        reduced = INT4 if groups.quantizes(groups.gradient_block, sent) else sent
        moved += shape.numel * (gathers * size + strategy.reductions(m) * reduced)
    each = moved / max(1, psi)
    value = int(moved * (nodes - 1) / groups.world_size)
    return Formula(f"{each:g}ψ(Z − 1)/N", value, {"ψ": psi, "Z": nodes, "N": groups.world_size})
