"""Closed forms of the model states on one rank, as the literature prints them.

Bytes per parameter are of mixed precision with Adam, K = 12 (in fp32: 4, 4 and K = 8). ψ: trained parameters, φ: frozen
ones; N: ranks that share a shard, called k where that is a group of them::

    ddp       (2 + 2 + K)ψ + 2φ              ZeRO, arXiv 1910.02054, section 3.1
    zero1     (2 + 2)ψ + 2φ + Kψ/N           P_os, section 5.1, figure 1
    zero2     2ψ + 2φ + (2 + K)ψ/N           P_os+g, section 5.2
    zero3     (2 + 2 + K)ψ/N + 2φ/N          P_os+g+p, section 5.3
    megatron  (2 + 2)ψ + 2φ + (4 + K)ψ/N     Megatron-core, dist_optimizer.md: fp16 gradients, all cast at once
              (2 + 4)ψ + 2φ + Kψ/N           the same with fp32 gradients

An offload drops from these what leaves the device (ZeRO-Offload, arXiv 2101.06840, table 1), a fraction f of it where
that is configured. A model of several dtypes has its bytes in place of multiples of ψ: P + (G + O)/N.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .formula import Formula
from .groups import GroupShape
from .shapes import OptimizerShape, ParameterShape, PrecisionShape, bytes_of, gradient_bytes, is_half, master_bytes
from .strategy import StrategyShape
from .tiers import NOWHERE, TierShape

FULL = PrecisionShape()


@dataclass(frozen=True)
class State:
    """One kind of model state. `size`: bytes over all parameters; `frozen`: those of frozen ones among them.

    `ranks`: among which it is divided; None: every rank holds all of it. `stays`: the part of it left on the device.
    """

    category: str
    letter: str
    """P, G or O, of the paper."""
    size: int
    ranks: int | None
    stays: float = 1.0
    frozen: int = 0

    @property
    def bytes_here(self) -> float:
        """Bytes on one rank's device."""
        return self.size * self.stays / (self.ranks or 1)


def states_of(
    strategy: StrategyShape, shapes: Sequence[ParameterShape], groups: GroupShape, optimizer: OptimizerShape,
    precision: PrecisionShape = FULL, tiers: TierShape = NOWHERE,
) -> tuple[State, ...]:  # fmt: skip
    """Returns the model states under a strategy; a category may have two."""
    theory, n = strategy.theory, groups.shard_ranks
    trained = [s for s in shapes if s.trainable]
    parameters, frozen = (sum(map(bytes_of, some)) for some in (shapes, [s for s in shapes if not s.trainable]))
    gradients = sum(s.numel * gradient_bytes(s, precision) for s in trained)
    masters = sum(master_bytes(s) for s in trained if is_half(s))
    cast = sum(master_bytes(s) for s in trained if gradient_bytes(s, precision) < 4)
    # gradients that leave the device as they are reduced are whole on none, as under ZeRO-2
    reduced = n if theory.gradients or tiers.gradients else None
    updated = n if theory.optimizer else None
    kept = 1 - tiers.fraction * tiers.optimizer
    return (
        State("parameters", "P", parameters, n if theory.parameters else None, 1.0 - tiers.parameters, frozen),
        State("gradients", "G", gradients, reduced, 1 - tiers.fraction * tiers.gradients),
        State("master", "O", masters, updated, kept),
        State("optimizer", "O", optimizer.states * sum(map(master_bytes, trained)), updated, kept),
        # cast to fp32 all at once, not tile by tile
        State("gradients", "O", cast if precision.tile_bytes is None else 0, updated),
    )


def state_formulas(
    strategy: StrategyShape, shapes: Sequence[ParameterShape], groups: GroupShape, optimizer: OptimizerShape,
    precision: PrecisionShape = FULL, tiers: TierShape = NOWHERE,
) -> dict[str, Formula]:  # fmt: skip
    """Category -> closed form of its bytes on a rank's device; "states" is the sum. Without what is in flight."""
    states = states_of(strategy, shapes, groups, optimizer, precision, tiers)
    text = _Text(shapes, groups, tiers)
    found = {}
    for category in dict.fromkeys(state.category for state in states):
        mine = [state for state in states if state.category == category]
        found[category] = text.formula(mine, math.floor(sum(state.bytes_here for state in mine)))
    return found | {"communication": Formula("0", 0, {}), "states": text.formula(_joined(states), _sum(states))}


def floor_bytes(
    strategy: StrategyShape, shapes: Sequence[ParameterShape], groups: GroupShape, optimizer: OptimizerShape,
    precision: PrecisionShape = FULL, tiers: TierShape = NOWHERE,
) -> int:  # fmt: skip
    """The closed form of the sum of the states on a rank's device, in bytes."""
    return _sum(states_of(strategy, shapes, groups, optimizer, precision, tiers))


def _sum(states: Sequence[State]) -> int:
    """P, G and O each rounded up to whole bytes, as shards are, less what leaves."""
    whole: dict[str, int] = {}
    for state in states:
        whole[state.letter] = whole.get(state.letter, 0) + state.size
    ranks = {state.letter: state.ranks or 1 for state in states}
    leaving = sum(state.size * (1 - state.stays) / (state.ranks or 1) for state in states)
    return max(0, sum(-(-size // ranks[letter]) for letter, size in whole.items()) - int(leaving))


def _joined(states: Iterable[State]) -> list[State]:
    """The states, those of the optimizer that stay on the device alike being one: K is all that it keeps."""
    found: dict[tuple[str, float], State] = {}
    for state in states:
        key = state.letter, state.stays
        before = found.get(key, replace(state, size=0))
        found[key] = replace(before, size=before.size + state.size, category="states")
    return list(found.values())


class _Text:
    """Writes states in multiples of ψ where all parameters are of one dtype, else as P, G and O."""

    def __init__(self, shapes: Sequence[ParameterShape], groups: GroupShape, tiers: TierShape) -> None:
        self.psi = sum(s.numel for s in shapes if s.trainable)
        self.phi = sum(s.numel for s in shapes if not s.trainable)
        self.is_uniform = self.psi > 0 and len({s.element_bytes for s in shapes if s.numel}) == 1
        self.ranks, self.shard_ranks = ("k" if groups.shard_group else "N"), groups.shard_ranks
        self.fraction = tiers.fraction

    def formula(self, states: Sequence[State], value: int) -> Formula:
        """The states' sum as an equation, with the numbers in it."""
        sums: dict[str, list[str]] = {}
        numbers: dict[str, float] = {}
        for state in states:
            if state.size and state.stays:
                for token, symbol in self._products(state, numbers):
                    sums.setdefault(symbol + f"/{self.ranks}" * (state.ranks is not None), []).append(token)
                numbers |= {self.ranks: self.shard_ranks} if state.ranks else {}
        return Formula(" + ".join(map(_product, sums.values(), sums)) or "0", value, numbers)

    def _products(self, state: State, numbers: dict[str, float]) -> list[tuple[str, str]]:
        """(coefficient, symbol) of a state; the values of its symbols go into `numbers`."""
        left = "(1 − f)·" if state.stays < 1 else ""
        numbers |= {"f": self.fraction} if left else {}
        trained, found = state.size - state.frozen, []
        if not self.is_uniform:
            numbers[state.letter] = state.size
            return [(left + state.letter, "")]
        if trained:
            each = trained / self.psi
            if short := state.category == "states" and state.letter == "O":
                numbers["K"] = each
            numbers["ψ"] = self.psi
            found.append((left + ("K" if short else f"{each:g}"), "ψ"))
        if state.frozen:
            numbers["φ"] = self.phi
            found.append((f"{left}{state.frozen / self.phi:g}", "φ"))
        return found


def _product(tokens: Sequence[str], symbol: str) -> str:
    """A sum times a symbol: "(2 + K)ψ/N"."""
    if len(tokens) == 1 or not symbol:
        return " + ".join(token + symbol for token in tokens)
    return f"({' + '.join(tokens)}){symbol}"
