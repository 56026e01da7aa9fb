"""Closed forms of the literature: the model states on one rank, and a step's communication.

States, in bytes per parameter in mixed precision with Adam, K = 12 (in fp32: 4, 4 and K = 8). ψ: trained parameters, φ:
frozen ones; N: ranks that share a state, called k if they are a group::

    ddp       (2 + 2 + K)ψ + 2φ              ZeRO, arXiv 1910.02054, section 3.1
    zero1     (2 + 2)ψ + 2φ + Kψ/N           P_os, section 5.1, figure 1
    zero2     2ψ + 2φ + (2 + K)ψ/N           P_os+g, section 5.2
    zero3     (2 + 2 + K)ψ/N + 2φ/N          P_os+g+p, section 5.3
              (2 + K)ψ/N + 2φ/N              the same with masters as the only shards
    megatron  (2 + 2)ψ + 2φ + (4 + K)ψ/N     Megatron-core, dist_optimizer.md: fp16 gradients, all cast at once
              (2 + 4)ψ + 2φ + Kψ/N           the same with fp32 gradients

An offload subtracts the states that leave the device (ZeRO-Offload, arXiv 2101.06840, table 1), or a fraction f if
that is configured. For a model with several dtypes, bytes replace multiples of ψ: P + (G + O)/N.

Elements that a rank moves, all-reduce counting twice (ZeRO, section 7). r of m micro-batches are reduced, and ZeRO-3
gathers once in forward and once in backward of each; with one micro-batch these are the paper's figures::

    ddp                       2rψ           2ψ     all-reduce, section 7.1
    zero1, zero2, megatron    (r + 1)ψ      2ψ     reduce-scatter and all-gather, section 7.2.1
    zero3                     (r + 2m)ψ     3ψ     reduce-scatter and two all-gathers, section 7.2.2

Bytes between nodes under ZeRO-3 (ZeRO++, arXiv 2306.10209, section 3): a gather of M bytes of parameters moves M, or ψ
in int8 (qwZ), or nothing from secondary shards in the node (hpZ), except for the first gather of a step; a reduction
moves M, or ψ/2 in int4 (qgZ). With 2-byte elements 3M become 0.75M. Each of N ranks in Z nodes sends (Z - 1)/N of that.

A closed form has no schedule. The named terms beyond it are the differences from the replay: replay/states.py for the
states, `explained_volume` for the volume.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from .groups import GroupShape
from .shapes import FULL, NOWHERE, OptimizerShape, ParameterShape, PrecisionShape, Schedule, TierShape
from .strategy import StrategyShape, buffers_of, gather_count, settle

REST = "padding, counts and small parameters, less states unused or not yet made"
"""Remaining differences: parameters start and shards end at multiples of 64 bytes; an optimizer counts its steps; small
parameters stay whole; unused parameters have no states; the largest sum may come before the last reduction."""


@dataclass(frozen=True)
class Term:
    """Bytes or elements that a run has in memory or moves beyond a formula; negative if fewer than the formula."""

    name: str
    size: int


@dataclass(frozen=True)
class Formula:
    """A closed form. `equation`: in ψ, N, K and the like; `numbers`: their values; `value`: in bytes or elements.
    `beyond`: the terms in flight; with them the value is the replay's prediction, to the byte.
    """

    equation: str
    value: int
    numbers: Mapping[str, float]
    beyond: tuple[Term, ...] = ()

    def explained(self, predicted: int, in_flight: Mapping[str, int]) -> Formula:
        """Returns the formula with the terms by which `predicted`, the replay's value, differs from it."""
        named = tuple(Term(name, size) for name, size in in_flight.items() if size)
        rest = predicted - self.value - sum(in_flight.values())
        return replace(self, beyond=(*named, *([Term(REST, rest)] if rest else [])))


def to_json(formulas: Mapping[str, Formula]) -> str:
    """Returns formulas by name as text; `from_json` reads it."""
    return json.dumps({name: asdict(formula) for name, formula in formulas.items()}, ensure_ascii=False)


def from_json(text: object) -> dict[str, Formula]:
    """Returns formulas by name; none for a run that has no text. Raises ValueError for text of another origin."""
    if not isinstance(text, str):
        return {}
    try:
        formulas = {}
        for name, entry in json.loads(text).items():
            numbers = {str(symbol): float(value) for symbol, value in entry["numbers"].items()}
            terms = tuple(Term(str(term["name"]), int(term["size"])) for term in entry["beyond"])
            formulas[name] = Formula(str(entry["equation"]), int(entry["value"]), numbers, terms)
        return formulas
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        raise ValueError(f"formulas cannot be read: {error}") from error


# -- states ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """One kind of model state. `size`: bytes over all parameters; `frozen`: the part that belongs to frozen parameters.
    `ranks`: number that it is divided among; None: each rank has all of it. `stays`: the fraction left on the device.
    """

    category: str
    letter: str
    """P, G or O, as in the paper."""
    size: int
    ranks: int | None
    stays: float = 1.0
    frozen: int = 0


def states_of(
    strategy: StrategyShape, shapes: Sequence[ParameterShape], groups: GroupShape, optimizer: OptimizerShape,
    precision: PrecisionShape = FULL, tiers: TierShape = NOWHERE,
) -> tuple[State, ...]:  # fmt: skip
    """Returns the model states under a strategy; a category may have two."""
    theory, n = strategy.theory, groups.shard_ranks
    trained = [s for s in shapes if s.trainable]
    held = [s for s in shapes if not strategy.keeps_masters(s, tiers)]
    parameters, frozen = sum(s.nbytes for s in held), sum(s.nbytes for s in held if not s.trainable)
    gradients = sum(s.numel * s.gradient_bytes(precision) for s in trained)
    masters = sum(s.master_bytes for s in trained if s.is_half)
    cast = sum(s.master_bytes for s in trained if s.gradient_bytes(precision) < 4)
    # gradients that leave the device as they are reduced are whole on no rank, as under ZeRO-2
    reduced = n if theory.gradients or tiers.gradients else None
    updated = n if theory.optimizer else None
    kept = 1 - tiers.fraction * tiers.optimizer
    numels: Counter[tuple[OptimizerShape, int]] = Counter()
    for shape in trained:
        numels[optimizer.of(shape.matrix is not None), shape.updated_bytes] += shape.numel
    made = sum(shape.states_bytes(numel, size) for (shape, size), numel in numels.items())  # scales for whole blocks
    return (
        State("parameters", "P", parameters, n if theory.parameters else None, 1.0 - tiers.parameters, frozen),
        State("gradients", "G", gradients, reduced, 1 - tiers.fraction * tiers.gradients),
        State("master", "O", masters, updated, kept),
        State("optimizer", "O", made, updated, kept),
        # cast to fp32 all at once, not tile by tile
        State("gradients", "O", cast if precision.tile_bytes is None else 0, updated),
    )


def state_formulas(
    strategy: StrategyShape, shapes: Sequence[ParameterShape], groups: GroupShape, optimizer: OptimizerShape,
    precision: PrecisionShape = FULL, tiers: TierShape = NOWHERE,
) -> dict[str, Formula]:  # fmt: skip
    """Category -> closed form of its bytes on a rank's device; "states" is the sum. Without terms in flight."""
    states = states_of(strategy, shapes, groups, optimizer, precision, tiers)
    formulas = {}
    for category in dict.fromkeys(state.category for state in states):
        of_category = [state for state in states if state.category == category]
        here = sum(state.size * state.stays / (state.ranks or 1) for state in of_category)
        formulas[category] = _formula(of_category, math.floor(here), shapes, groups, tiers)
    joined: dict[tuple[str, float], State] = {}  # with one letter and one part left on the device: K is all of O
    for state in states:
        key = state.letter, state.stays
        size = state.size + (joined[key].size if key in joined else 0)
        joined[key] = replace(joined.get(key, state), size=size, category="states")
    whole = _formula([*joined.values()], _sum(states), shapes, groups, tiers)
    return formulas | {"communication": Formula("0", 0, {}), "states": whole}


def floor_bytes(
    strategy: StrategyShape, shapes: Sequence[ParameterShape], groups: GroupShape, optimizer: OptimizerShape,
    precision: PrecisionShape = FULL, tiers: TierShape = NOWHERE,
) -> int:  # fmt: skip
    """The closed form of the sum of the states on a rank's device, in bytes."""
    return _sum(states_of(strategy, shapes, groups, optimizer, precision, tiers))


def _sum(states: Sequence[State]) -> int:
    """P, G and O each rounded up to whole bytes, as shards are, minus the parts that leave."""
    whole: Counter[str] = Counter()
    for state in states:
        whole[state.letter] += state.size
    ranks = {state.letter: state.ranks or 1 for state in states}
    elsewhere = sum(state.size * (1 - state.stays) / (state.ranks or 1) for state in states)
    return max(0, sum(-(-size // ranks[letter]) for letter, size in whole.items()) - int(elsewhere))


def _formula(
    states: Sequence[State], value: int, shapes: Sequence[ParameterShape], groups: GroupShape, tiers: TierShape
) -> Formula:
    """The states' sum in multiples of ψ and φ if all parameters have one dtype, else of P, G and O."""
    psi, phi = (sum(shape.numel for shape in shapes if shape.trainable is trains) for trains in (True, False))
    is_uniform = psi > 0 and len({shape.element_bytes for shape in shapes if shape.numel}) == 1
    ranks = "k" if groups.shard_group else "N"
    sums: dict[str, list[str]] = {}  # symbol, divided by the ranks -> coefficients
    numbers: dict[str, float] = {}
    for state in states:
        if not state.size or not state.stays:
            continue
        left, products = "(1 − f)·" if state.stays < 1 else "", []
        if left:
            numbers["f"] = tiers.fraction
        if not is_uniform:
            numbers[state.letter] = state.size
            products.append((state.letter, ""))
        if is_uniform and (trained := state.size - state.frozen):
            is_k = state.category == "states" and state.letter == "O"
            numbers |= ({"K": trained / psi} if is_k else {}) | {"ψ": psi}
            products.append(("K" if is_k else f"{trained / psi:g}", "ψ"))
        if is_uniform and state.frozen:
            numbers["φ"] = phi
            products.append((f"{state.frozen / phi:g}", "φ"))
        for coefficient, symbol in products:
            sums.setdefault(symbol + f"/{ranks}" * (state.ranks is not None), []).append(left + coefficient)
        if state.ranks:
            numbers[ranks] = groups.shard_ranks
    terms = []
    for symbol, coefficients in sums.items():
        is_sum = len(coefficients) > 1 and symbol
        terms += [f"({' + '.join(coefficients)}){symbol}"] if is_sum else [text + symbol for text in coefficients]
    return Formula(" + ".join(terms) or "0", value, numbers)


# -- volume ----------------------------------------------------------------------------------------


INT8, INT4 = 1.0, 0.5
"""Bytes of a quantized element, without its scale."""


def volume_formula(strategy: StrategyShape, schedule: Schedule, world_size: int) -> Formula:
    """Elements that a rank moves in a step, by the closed form."""
    psi, m = sum(shape.numel for shape in schedule.shapes if shape.trainable), schedule.micro_batches
    r = strategy.reductions(m)
    if world_size == 1:
        return Formula("0", 0, {"N": 1})
    if not strategy.theory.optimizer:
        text, value = "2rψ", 2 * r
    elif strategy.theory.has_buckets:
        text, value = "(r + 1)ψ", r + 1
    else:
        text, value = "(r + 2m)ψ", r + 2 * m
    if m == 1:
        return Formula(f"{value}ψ", value * psi, {"ψ": psi})
    return Formula(text, value * psi, {"ψ": psi, "r": r} | ({"m": m} if "m" in text else {}))


def explained_volume(strategy: StrategyShape, schedule: Schedule, groups: GroupShape) -> Formula:
    """Returns `volume_formula` with its terms; together they equal the elements that a run moves, unless hops through
    nodes, groups of ranks or quantization change how a collective is counted.
    """
    formula = volume_formula(strategy, schedule, groups.world_size)
    if groups.world_size == 1 or not strategy.theory.optimizer:
        return formula
    strategy, m = settle(strategy, schedule.shapes, groups.shard_ranks), schedule.micro_batches
    r, expected = strategy.reductions(m), 1 if strategy.theory.has_buckets else 2 * m
    sizes: Counter[str] = Counter()
    for unit, buffer in buffers_of(strategy, schedule.shapes, groups.shard_ranks):
        gathers = None if unit is None else m * gather_count(strategy, schedule, unit)
        if not schedule.shapes[buffer.spans[0].parameter].trainable:
            sizes["frozen units"] += (gathers or 0) * buffer.padded_numel
            continue
        # a buffer that stays whole between steps is gathered once
        reduced, gathers = (r, 1) if gathers is None else (r if gathers else 0, gathers)
        again = "units that stay whole, or that no step uses" if gathers < expected else "units that are gathered again"
        sizes["padding"] += (gathers + reduced) * (buffer.padded_numel - buffer.numel)
        sizes[again] += (gathers - expected) * buffer.numel
        sizes["gradients of units that no step uses"] += (reduced - r) * buffer.numel
        if strategy.reduce_with == "all_reduce":
            sizes["all-reduce in place of reduce-scatter"] += reduced * buffer.padded_numel
    return replace(formula, beyond=tuple(Term(name, size) for name, size in sizes.items() if size))


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
        size: float = shape.element_bytes
        for block, coded in ((groups.weight_block, INT8), (groups.difference_block, INT4)):
            size = coded if groups.quantizes(block, shape.element_bytes) else size
        sent = shape.wire_bytes(precision)
        reduced = INT4 if groups.quantizes(groups.gradient_block, sent) else sent
        moved += shape.numel * (gathers * size + strategy.reductions(m) * reduced)
    each = moved / max(1, psi)
    value = int(moved * (nodes - 1) / groups.world_size)
    return Formula(f"{each:g}ψ(Z − 1)/N", value, {"ψ": psi, "Z": nodes, "N": groups.world_size})
