"""Facts that an optimizer keeps beside the states of parameters: numbers in its groups and attributes.

    read      the facts as they are
    put       back to facts that were read: what has come since goes
    changed   between two readings

A fact is a number, a text, a tuple of them, or a tensor of one element, which stays the same tensor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import optim

from .segments import ELEMENTWISE

ATTRIBUTES, STATE = "attributes", "state"
_SIMPLE = (bool, int, float, complex, str, type(None))


class Fact(NamedTuple):
    """`held`: what the optimizer has; `value`: the same, or a copy of a tensor."""

    held: Any
    value: Any

    def equals(self, other: Fact) -> bool:
        """True where the values are equal, NaN and NaN among them."""
        mine, others = self.value, other.value
        if isinstance(mine, torch.Tensor) and isinstance(others, torch.Tensor):
            return torch.equal(mine, others) or bool(mine.isnan().all() and others.isnan().all())
        return type(mine) is type(others) and bool(mine == others or (mine != mine and others != others))


Facts = dict[tuple[int | str, str], Fact]
"""(number of a group, or ATTRIBUTES or STATE; key) -> what it holds there."""


def read(optimizer: optim.Optimizer) -> Facts:
    """All of them."""
    return {
        (place, key): Fact(held, held.detach().clone() if isinstance(held, torch.Tensor) else held)
        for place, mapping in _places(optimizer).items()
        for key, held in mapping.items()
        if isinstance(key, str) and _is_fact(held)
    }


def put(optimizer: optim.Optimizer, facts: Facts) -> None:
    """The optimizer's facts become these."""
    places = _places(optimizer)
    for place, key in read(optimizer).keys() - facts.keys():
        del places[place][key]
    for (place, key), fact in facts.items():
        places[place][key] = fact.held
        if isinstance(fact.held, torch.Tensor):
            fact.held.detach().copy_(fact.value)


def changed(before: Facts, after: Facts) -> Facts:
    """Of `after`, what is new or another."""
    return {at: fact for at, fact in after.items() if at not in before or not fact.equals(before[at])}


def follow(optimizer: optim.Optimizer, before: Facts, after: Facts) -> None:
    """Takes over what another optimizer, which began with the facts `before`, has changed, unless it has moved here."""
    if type(optimizer) in ELEMENTWISE:
        return
    mine = read(optimizer)
    moved = changed(before, mine)
    news = {at: fact for at, fact in changed(before, after).items() if at not in moved}
    for at, fact in news.items():
        if at in mine and isinstance(mine[at].held, torch.Tensor):
            news[at] = Fact(mine[at].held, fact.value)
    put(optimizer, mine | news)


class FactsOfParts:
    """An update in parts, each of which finds the facts as the first did; what any of them changes holds at the end.

    torch's own optimizers change none, and are not asked.
    """

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._is_asked = type(optimizer) not in ELEMENTWISE
        self._changes: Facts = {}
        self._before: Facts = {}

    def begin(self) -> None:
        """The first part starts."""
        if self._is_asked:
            self._before = read(self._optimizer)

    def end_part(self) -> None:
        """A part is done, and another follows. Raises RuntimeError where two parts disagree."""
        if self._is_asked:
            self._note()
            put(self._optimizer, self._before)

    def end(self) -> None:
        """The last part is done."""
        if self._is_asked:
            self._note()
            put(self._optimizer, self._before | self._changes)

    def _note(self) -> None:
        for at, fact in changed(self._before, read(self._optimizer)).items():
            known = self._changes.setdefault(at, fact)
            if not known.equals(fact):
                raise RuntimeError(
                    f"optimizer: {type(self._optimizer).__name__} changed {at[1]!r} to {known.value} by some parameters"
                    f" and to {fact.value} by others; an update that mixes parameters cannot be sharded"
                )


def _places(optimizer: optim.Optimizer) -> dict[int | str, dict[Any, Any]]:
    return {**dict(enumerate(optimizer.param_groups)), ATTRIBUTES: vars(optimizer), STATE: optimizer.state}


def _is_fact(held: Any) -> bool:
    if isinstance(held, torch.Tensor):
        return held.numel() == 1
    return all(isinstance(one, _SIMPLE) for one in held) if isinstance(held, tuple) else isinstance(held, _SIMPLE)
