"""Stand-ins for a parameter's `.grad` while the engine holds its gradient, from backward to step.

    dropped     `module.zero_grad()`, also of a submodule, or `p.grad = None`: the engine drops that gradient
    used        clip_grad_norm_, GradScaler.unscale_, p.grad.norm(), ...: an error, since there are no values
    replaced    `p.grad = ...`: an error at the next backward or step

A stand-in has its parameter's shape and dtype, and no memory. The optimizer's first tensor has one, too, for callers
that look for gradients in the optimizer. (`_make_wrapper_subclass` is torch-private; tested.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..engine import ShardedEngine
from ..modules.wrapping import inside_backward
from ..parameters.absent import as_they_are

HOW = (
    "to read or change gradients use engine.clip_grad_norm_(), engine.full_gradient(name), engine.gradient_norms() or"
    " engine.gradient_segments() (docs/how-to/gradients.md)"
)

WORDS = {
    ("_amp_foreach_non_finite_check_and_unscale_",): (
        "a GradScaler finds no gradients here; give initialize() loss_scaling=zerobench.zero.LossScaling()"
    ),
}
"""Operators that show a caller's intention -> the message that says what to do instead."""


class StandIn(torch.Tensor):
    """A stand-in for the gradient of `parameter_name`. `zeroed`: names of gradients that were set to zero. `_added`: a
    gradient that came before the engine's backward had begun, as that of a penalty on weights does.
    """

    parameter_name: str
    zeroed: set[str]
    _added: torch.Tensor | None = None

    @staticmethod
    def of(tensor: torch.Tensor, name: str, zeroed: set[str]) -> StandIn:
        """Returns a new stand-in for the gradient of `tensor`."""
        made: StandIn = torch.Tensor._make_wrapper_subclass(
            StandIn, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        made.parameter_name, made.zeroed = name, zeroed
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, StandIn)]
        name = func.overloadpacket.__name__
        if name in ("zero_", "_foreach_zero_"):
            for one in found:
                one.zeroed.add(one.parameter_name)
            return args[0] if name == "zero_" else None
        if name == "add_" and inside_backward():
            found[0]._added = args[1]
            return args[0]
        for others, words in WORDS.items():
            if name in others:
                raise RuntimeError(f"{found[0].parameter_name}: {words}; {HOW}")
        raise RuntimeError(f"{found[0].parameter_name}: its gradient is in the engine's shards, not in .grad; {HOW}")

    def take_added(self) -> torch.Tensor | None:
        """Returns the gradient that autograd has added, and forgets it."""
        added, self._added = self._added, None
        return added

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        """Returns no inner tensors, so that instruments that count memory find none."""
        return [], self.parameter_name

    @staticmethod
    def __tensor_unflatten__(_inner: Any, _name: str, *_: Any) -> StandIn:
        raise RuntimeError("a gradient's stand-in cannot be copied")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        name = self.parameter_name
        return f"<the gradient of {name}, in the engine's shards: engine.full_gradient({name!r})>"


class StandIns:
    """The placeholders of one engine. `drop`: drops the gradients of parameters, by number.

    `_made`    by parameter number, created once
    `_put`     numbers of the parameters that have theirs now; `_pairs`: these parameters with their stand-ins
    `_zeroed`  names of the gradients that have been set to zero
    """

    def __init__(self, engine: ShardedEngine, drop: Callable[[set[int]], object]) -> None:
        self._engine, self._drop = engine, drop
        self._made: dict[int, StandIn] = {}
        self._put: frozenset[int] = frozenset()
        self._pairs: list[tuple[torch.Tensor, StandIn]] = []
        self._zeroed: set[str] = set()
        self._of_optimizer: StandIn | None = None

    def put(self) -> None:
        """Puts a stand-in into `.grad` for each gradient of a finished backward."""
        engine = self._engine
        for i in engine.update.used - self._made.keys():
            self._made[i] = StandIn.of(engine.trainable[i], engine.names[i], self._zeroed)
        self._zeroed.clear()
        self._put = frozenset(engine.update.used)
        self._pairs = [(engine.trainable[i], self._made[i]) for i in self._put]
        with as_they_are():
            for parameter, stand_in in self._pairs:
                parameter.grad = stand_in
        if not engine.update.is_running:  # behind a forward, in a thread, with gradients of its own
            for segment in engine.update.segments[:1]:
                if self._of_optimizer is None:
                    self._of_optimizer = StandIn.of(segment.tensor, "optimizer", set())
                segment.tensor.grad = self._of_optimizer

    def take_away(self) -> None:
        """Removes the stand-ins before a backward or the optimizer would find them."""
        with as_they_are():
            for parameter, _ in self._pairs:
                parameter.grad = None
        self._put, self._pairs = frozenset(), []
        if self._engine.update.is_running:
            return  # in a thread, which sets and drops gradients of its own there: not even to be read meanwhile
        for segment in self._engine.update.segments[:1]:
            if segment.tensor.grad is self._of_optimizer:
                segment.tensor.grad = None

    def heed(self) -> None:
        """Drops gradients whose stand-ins were dropped. Raises RuntimeError for a stand-in that was replaced."""
        parameters = self._engine.trainable
        complete = len(self._pairs) == len(parameters) or not self._pairs
        with as_they_are():
            untouched = complete and not self._zeroed and all(p.grad is stand_in for p, stand_in in self._pairs)
            untouched = untouched and (bool(self._pairs) or all(p.grad is None for p in parameters))
        if untouched:
            return
        dropped: set[int] = set()
        for i, parameter in enumerate(self._engine.trainable):
            grad, name = parameter.grad, self._engine.names[i]
            if i in self._put and (grad is None or name in self._zeroed):
                dropped.add(i)
                parameter.grad = None
            elif grad is not (self._made[i] if i in self._put else None):
                raise RuntimeError(
                    f"{name}: something was assigned to its .grad, which the engine does not read; use"
                    " engine.set_full_gradient(name, value) after backward (docs/how-to/gradients.md)"
                )
        if not dropped:
            return
        if dropped == self._put:
            self._engine.zero_grad()
            return
        self._put -= dropped
        self._pairs = [(self._engine.trainable[i], self._made[i]) for i in self._put]
        self._zeroed.clear()
        self._drop(dropped)
