"""One step of an optimizer over several tiles, which looks from outside like a single step.

    hooks     the user's, before and after a step, run once around all tiles, like wrappers of `optimizer.step`
    facts     an optimizer's values besides the states of parameters: numbers in its groups and attributes, such as a
              step count. Every tile starts with the same facts, and all tiles must change them in the same way

torch's own optimizers have no such facts. Gradients that need no cast and no copy are visible to the hooks before a
step only if there is one tile.

[Note: facts]
A *fact* is an optimizer value that belongs to no single parameter: a number, a string or None, a tuple of these, or a
one-element tensor, which is updated in place, never replaced.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import optim
from torch.optim.optimizer import _global_optimizer_post_hooks

from .. import labels
from ..bucket import Heap
from ..parameters.access import Versions
from ..precision import Share, shaped_as
from .segments import ELEMENTWISE

TILE_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}
"""Default size of a tile by device type: smaller ones stay in a CPU's cache, and leave a GPU's multiprocessors idle."""

ONE_PASS = 0
"""The size of a tile if one kernel updates all shards and casts gradients as it reads them (one_pass.py)."""

Visit = Callable[[Sequence[Any]], AbstractContextManager[None]]
"""Given a tile: makes its masters, states and gradients available inside, and rounds the masters to parameters."""


def update_tiles(
    optimizer: optim.Optimizer, tiles: Sequence[Sequence[Share]], coefficient: torch.Tensor | float | None,
    buffers: TileBuffers, visit: Visit,
) -> bool:  # fmt: skip
    """Makes one `optimizer.step()`, a tile at a time; torch's optimizers skip parameters without a gradient. Returns
    True if a hook after the step has written to tiles that were done: then all masters must be rounded again.

    `coefficient` multiplies the gradients (unscaling, clipping). Raises RuntimeError if an optimizer's facts end
    differently after different tiles.
    """
    finished_masters = Versions([share.tensor for tile in tiles[:-1] for share in tile])
    with ExitStack() as open_until_the_end:
        if len(tiles) > 1:
            facts, update = FactsOfParts(optimizer), tile_update(optimizer)

            # The last tile is updated by `optimizer.step` itself, so that the caller's hooks run once around all
            # tiles; the others run right before it, after the hooks that may still change learning rates.
            def all_but_the_last() -> None:
                facts.begin()
                open_until_the_end.enter_context(buffers.present())
                for tile in tiles[:-1]:
                    with _with_gradients(tile, coefficient, buffers, visit):
                        update(tile)
                        facts.end_part()
                open_until_the_end.enter_context(_with_gradients(tiles[-1], coefficient, buffers, visit))
                finished_masters.note()

            step_with(optimizer, all_but_the_last)
            facts.end()
        else:
            # at most one tile: its gradients are in place before the step, so that the user's pre-hooks find them
            for tile in tiles:
                open_until_the_end.enter_context(buffers.present())
                open_until_the_end.enter_context(_with_gradients(tile, coefficient, buffers, visit))
            optimizer.step()
    return finished_masters.have_moved


def update_silently(
    optimizer: optim.Optimizer, tiles: Sequence[Sequence[Share]], coefficient: torch.Tensor | float | None
) -> None:
    """Runs update_tiles without hooks: in a thread, after the step that they belonged to."""
    facts, update, buffers = FactsOfParts(optimizer), tile_update(optimizer), TileBuffers(tiles)
    facts.begin()
    with buffers.present():
        for tile in tiles:
            with _with_gradients(tile, coefficient, buffers, lambda _: nullcontext()):
                update(tile)
                facts.end_part()
    facts.end()


@contextmanager
def _with_gradients(
    tile: Sequence[Share], coefficient: torch.Tensor | float | None, buffers: TileBuffers, visit: Visit
) -> Iterator[None]:
    """Visits a tile; inside, its gradients are where the optimizer looks, multiplied by `coefficient`."""
    with visit(tile):
        for share, gradient in zip(tile, buffers.ready(tile), strict=True):
            if gradient is not None and coefficient is not None:
                if isinstance(coefficient, torch.Tensor):  # a gradient may be in host memory
                    gradient.mul_(coefficient.to(gradient.device))
                else:
                    gradient.mul_(coefficient)
            share.tensor.grad = None if gradient is None else shaped_as(share.tensor, gradient)
        labels.updates([share for share in tile if share.tensor.grad is not None])
        yield
        for share in tile:
            share.tensor.grad = None


def step_with(optimizer: optim.Optimizer, before: Callable[[], None]) -> None:
    """Calls `optimizer.step()`, with `before` run once after all user hooks, right before the update."""
    due = [before]  # a subclass whose step calls its parent's runs hooks twice

    def once(*_: Any) -> None:
        if due:
            due.pop()()

    hook = optimizer.register_step_pre_hook(once)
    try:
        optimizer.step()
    finally:
        hook.remove()


class _UpdateReplaced(Exception):
    """Raised by the last pre-hook to exit `step` before it updates anything."""


def step_without_update(optimizer: optim.Optimizer, instead: Callable[[], None]) -> None:
    """Calls `optimizer.step()` with its wrappers and hooks, but `instead` in place of the update."""

    def replace() -> None:
        instead()
        # the only way without side effects: even with no parameters, a step may change facts
        raise _UpdateReplaced

    with suppress(_UpdateReplaced):
        step_with(optimizer, replace)
    for hook in [*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()]:
        hook(optimizer, (optimizer,), {})


def raw_step(optimizer: optim.Optimizer) -> None:
    """Updates parameters with gradients, without hooks. (`__wrapped__`, names of hooks: torch-private, tested.)"""
    step = type(optimizer).step
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    hooks = {name: getattr(optimizer, name) for name in names}
    vars(optimizer).update({name: OrderedDict() for name in names})  # a step that calls its parent's would run them
    try:
        getattr(step, "__wrapped__", step)(optimizer) if getattr(step, "hooked", False) else step(optimizer)
    finally:
        vars(optimizer).update(hooks)


def optimizer_over(optimizer: optim.Optimizer, groups: list[dict[str, Any]]) -> optim.Optimizer:
    """Returns another optimizer of the same class, with the same states and attributes and its own parameter groups."""
    other: optim.Optimizer = object.__new__(type(optimizer))
    copied = {
        name: value.clone() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for name, value in vars(optimizer).items()
        if name not in ("step", "zero_grad")  # instance attributes bound to the original
    }
    vars(other).update(copied, param_groups=groups)
    return other


def tile_update(optimizer: optim.Optimizer) -> Callable[[Sequence[Share]], None]:
    """Returns a function that runs the optimizer's step, without hooks, over a tile.

    torch's optimizers go through all parameters of their groups, which over many tiles is quadratic: they get groups
    with only the tile's. Others keep their groups whole: they may have more values in the order of the parameters.
    """
    if not type(optimizer).__module__.startswith(("torch.optim.", f"{__package__}.muon")):
        return lambda _: raw_step(optimizer)
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}

    def update(tile: Sequence[Share]) -> None:
        groups: dict[int, dict[str, Any]] = {}
        for share in tile:
            if (group := group_of.get(id(share.tensor))) is not None:
                groups.setdefault(id(group), group | {"params": []})["params"].append(share.tensor)
        raw_step(optimizer_over(optimizer, list(groups.values())))

    return update


class TileBuffers:
    """Gradients for the optimizer: per tier and dtype one permanent buffer, with memory only during an update."""

    def __init__(self, tiles: Sequence[Sequence[Share]]) -> None:
        self._max_numel = max((sum(share.tensor.numel() for share in tile) for tile in tiles), default=0)
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._offsets: dict[tuple[str, torch.dtype], int] = {}
        self._views: dict[tuple[Share, torch.dtype, int], torch.Tensor] = {}

    @contextmanager
    def present(self) -> Iterator[None]:
        """Gives memory to the buffers inside; `ready` creates those that do not exist yet."""
        for (tier, _), buffer in self._buffers.items():
            Heap().restore(labels.label(buffer, labels.GRADIENTS, "tile", tier=tier))
        try:
            yield
        finally:
            for buffer in self._buffers.values():
                Heap().release(buffer)

    def ready(self, tile: Sequence[Share]) -> list[torch.Tensor | None]:
        """Returns a tile's gradients in its masters' tier and dtype; copies overwrite the previous tile's."""
        self._offsets.clear()
        gradients = [share.gradient() for share in tile]
        casts, sources = list[torch.Tensor](), list[torch.Tensor]()
        for number, (share, gradient) in enumerate(zip(tile, gradients, strict=True)):
            # 1 to the other tier, in its own dtype: a half gradient is sent as 2 bytes, not as 4
            if gradient is not None and share.crosses:
                gradient = self._view(share, gradient.dtype, pinned=gradient.is_cuda).copy_(gradient)
            # 2 a cast, in the one buffer that all tiles share in turn
            if gradient is not None and gradient.dtype != share.tensor.dtype:
                sources.append(gradient)
                casts.append(gradient := self._view(share, share.tensor.dtype))
            gradients[number] = gradient
        if len(casts) == 1:  # a GPU's kernel for lists keeps fewer of its threads busy
            casts[0].copy_(sources[0])
        elif casts:
            torch._foreach_copy_(casts, sources)
        return gradients

    def _view(self, share: Share, dtype: torch.dtype, pinned: bool = False) -> torch.Tensor:
        key, numel = (share.tier, dtype), share.tensor.numel()
        start = self._offsets.get(key, 0)
        self._offsets[key] = start + numel
        if (view := self._views.get((share, dtype, start))) is None:
            if key not in self._buffers:
                buffer = torch.empty(self._max_numel, dtype=dtype, device=share.tensor.device, pin_memory=pinned)
                self._buffers[key] = labels.label(buffer, labels.GRADIENTS, "tile", tier=share.tier)
            view = self._views[share, dtype, start] = self._buffers[key].narrow(0, start, numel)
        return view


# -- facts -----------------------------------------------------------------------------------------------------


ATTRIBUTES, STATE = "attributes", "state"
_SIMPLE = (bool, int, float, complex, str, type(None))


class Fact(NamedTuple):
    """`held`: the optimizer's value; `value`: the same, or a copy of a tensor."""

    held: Any
    value: Any

    def equals(self, other: Fact) -> bool:
        """Returns True if the values are equal; NaN equals NaN."""
        a, b = self.value, other.value
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return torch.equal(a, b) or bool(a.isnan().all() and b.isnan().all())
        return type(a) is type(b) and bool(a == b or (a != a and b != b))


Facts = dict[tuple[int | str, str], Fact]
"""(number of a group, or ATTRIBUTES or STATE; key) -> its fact."""


def facts_of(optimizer: optim.Optimizer) -> Facts:
    """Returns the current facts of an optimizer."""
    return {
        (owner, key): Fact(held, held.detach().clone() if isinstance(held, torch.Tensor) else held)
        for owner, mapping in _mappings(optimizer).items()
        for key, held in mapping.items()
        if isinstance(key, str) and _is_fact(held)
    }


def _mappings(optimizer: optim.Optimizer) -> dict[int | str, dict[Any, Any]]:
    return {**dict(enumerate(optimizer.param_groups)), ATTRIBUTES: vars(optimizer), STATE: optimizer.state}


def _is_fact(held: Any) -> bool:
    if isinstance(held, torch.Tensor):
        return held.numel() == 1
    return all(isinstance(v, _SIMPLE) for v in held) if isinstance(held, tuple) else isinstance(held, _SIMPLE)


def restore_facts(optimizer: optim.Optimizer, facts: Facts) -> None:
    """Sets the optimizer's facts to `facts`, and deletes newer ones."""
    mappings = _mappings(optimizer)
    for owner, key in facts_of(optimizer).keys() - facts.keys():
        del mappings[owner][key]
    for (owner, key), fact in facts.items():
        mappings[owner][key] = fact.held
        if isinstance(fact.held, torch.Tensor):
            fact.held.detach().copy_(fact.value)


def _changed(before: Facts, after: Facts) -> Facts:
    return {key: fact for key, fact in after.items() if key not in before or not fact.equals(before[key])}


def follow_facts(optimizer: optim.Optimizer, before: Facts, after: Facts) -> None:
    """Applies changes by another optimizer, which started with `before`, except to facts that were changed here too."""
    if type(optimizer) in ELEMENTWISE:
        return
    current = facts_of(optimizer)
    changed_here = _changed(before, current)
    news = {key: fact for key, fact in _changed(before, after).items() if key not in changed_here}
    for key, fact in news.items():
        if key in current and isinstance(current[key].held, torch.Tensor):
            news[key] = Fact(current[key].held, fact.value)
    restore_facts(optimizer, current | news)


class FactsOfParts:
    """An update in parts, each of which starts with the same facts; changes by any part are in effect at the end.
    torch's own optimizers change no facts, and are skipped.
    """

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._may_change = type(optimizer) not in ELEMENTWISE
        self._changes: Facts = {}
        self._before: Facts = {}

    def begin(self) -> None:
        """Starts the first part."""
        if self._may_change:
            self._before = facts_of(self._optimizer)

    def end_part(self) -> None:
        """Ends a part, before another. Raises RuntimeError if two parts disagree."""
        if not self._may_change:
            return
        for key, fact in _changed(self._before, facts_of(self._optimizer)).items():
            first = self._changes.setdefault(key, fact)
            if not first.equals(fact):
                raise RuntimeError(
                    f"optimizer: {type(self._optimizer).__name__} changed {key[1]!r} to {first.value} by some"
                    f" parameters and to {fact.value} by others; an update that mixes parameters cannot be sharded"
                )
        restore_facts(self._optimizer, self._before)

    def end(self) -> None:
        """Ends the last part."""
        self.end_part()
        if self._may_change:
            restore_facts(self._optimizer, self._before | self._changes)
