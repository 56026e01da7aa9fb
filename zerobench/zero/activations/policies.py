"""ZeRO-R for activations: what becomes, between forward and backward, of what backward will need.

Of each *unit* (modules.blocks: a transformer's blocks), beside small tensors::

    policy               on the device                              in host memory    what it costs
    none                 all that autograd saves                    -
    checkpoint           its inputs                                 -                 a second forward
    offload              of the last unit all, of two on their way  all but that      bytes to the host and back
    checkpoint_offload   of the last unit its inputs                the inputs        both

(ZeRO, arXiv 1910.02054, section 6.1, without the partitioning over model-parallel ranks, P_a; checkpointing: Chen et
al., arXiv 1604.06174.) The last unit's stay: backward, which comes to it first, would wait for all of it.

A policy wraps the units' `forward`, so hooks on the units run outside of it: a strategy that comes later brings a
unit's parameters before backward comes to the unit, and so before that is computed again. Wrapped twice, the inner way
comes first: what checkpointing saves, the inputs, is what goes to the host. In a copy of the module all is plain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..modules.wrapping import blocks, inside_backward, saved_by_others
from .offload import Offloader
from .slots import SlotSwapper

Forward = Callable[..., Any]

LEAST_BYTES = 64 * 1024
"""Smaller tensors are not worth a copy of their own."""


@dataclass(frozen=True)
class ActivationPolicy:
    """`recompute`: units keep their inputs alone. `keep`: where what units save waits, a row of KEEPERS.
    `least_bytes`: what is smaller stays where it is.
    """

    recompute: bool = False
    keep: str = "device"
    least_bytes: int = LEAST_BYTES


POLICIES: dict[str, ActivationPolicy] = {
    "none": ActivationPolicy(),
    "checkpoint": ActivationPolicy(recompute=True),
    "offload": ActivationPolicy(keep="host"),
    "checkpoint_offload": ActivationPolicy(recompute=True, keep="host"),
}
"""By the names that a user gives them."""


class Keeper(Protocol):
    """Has what units save wait elsewhere."""

    def run(self, unit: nn.Module, name: str, is_last: bool, forward: Callable[[], Any]) -> Any:
        """The forward of a unit; what it returns."""


KEEPERS: dict[str, Callable[[int], Keeper]] = {"host": Offloader, "slab": SlotSwapper}
"""Each from the least bytes that it takes. With "device" all stays where autograd has it."""


class Wrapped:
    """A module's forward with something around it. A copy of the module has its plain forward."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        """The forward."""
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        return _plain, (self.forward,)


class Recomputed(Wrapped):
    """What forward makes is made again in backward, with the random numbers that it drew."""

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        return checkpoint(self.forward, *inputs, use_reentrant=False, **named_inputs)


class OffloadedForward(Wrapped):
    """What forward saves waits where `keeper` has it; but where somebody else has hooks on it, it is theirs.

    Recomputation around a unit has: it counts what is saved, and were a part of that kept from it, the rest would be
    taken for something else.
    """

    def __init__(self, forward: Forward, keeper: Keeper, unit: nn.Module, name: str, is_last: bool) -> None:
        super().__init__(forward)
        self._run = partial(keeper.run, unit, name, is_last)

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        if not torch.is_grad_enabled() or inside_backward() or saved_by_others():
            return self.forward(*inputs, **named_inputs)
        return self._run(partial(self.forward, *inputs, **named_inputs))


def _plain(forward: Forward) -> Forward:
    return forward


def recompute(unit: nn.Module) -> None:
    """From now on `unit` keeps its inputs alone for the backward."""
    unit.forward = Recomputed(unit.forward)


def apply(model: nn.Module, policy: ActivationPolicy) -> None:
    """Puts the model's units under `policy`, before any strategy has the model.

    Raises ValueError, one sentence, for a model without units.
    """
    if not policy.recompute and policy.keep not in KEEPERS:
        return
    units = blocks(model)
    if not units:
        raise ValueError(
            f"activation: {type(model).__name__} has no blocks to treat so; put them into an nn.ModuleList or an"
            " nn.Sequential, or use activation=none"
        )
    keeper = KEEPERS[policy.keep](policy.least_bytes) if policy.keep in KEEPERS else None
    for number, (name, unit) in enumerate(units):
        if policy.recompute:
            recompute(unit)
        if keeper is not None:
            kept = OffloadedForward(unit.forward, keeper, unit, name, is_last=number == len(units) - 1)
            unit.forward = kept
