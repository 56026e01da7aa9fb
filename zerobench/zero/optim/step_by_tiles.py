"""One step of an optimizer over several tiles, which looks from outside like a single step.

    hooks     the user's, before and after a step, run once around all tiles, like wrappers of `optimizer.step`
    facts     an optimizer's values besides the states of parameters, in its groups and attributes, such as a step
              count. Every tile starts with the same facts, and all tiles must change them in the same way

torch's own optimizers have no such facts. Gradients that need no cast and no copy are visible to the hooks before a
step only if there is one tile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import optim
from torch.optim.optimizer import _global_optimizer_post_hooks

from .. import labels
from ..arena import Heap
from ..parameters.access import Versions
from ..precision import Share, shaped_as
from .segments import FactsOfParts

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
    done = Versions([share.tensor for tile in tiles[:-1] for share in tile])
    with closing(_each_ready(tiles, coefficient, buffers, visit)) as parts:
        if len(tiles) < 2:
            next(parts, None)  # before the step, whose hooks so find the gradients
            optimizer.step()
        else:
            facts, update = FactsOfParts(optimizer), update_of(optimizer)

            # The last tile is updated by `optimizer.step` itself, so that the caller's hooks run once around all
            # tiles; the others run right before it, after the hooks that may still change learning rates.
            def all_but_the_last() -> None:
                facts.begin()
                for tile in tiles[:-1]:
                    next(parts)
                    update(tile)
                    facts.end_part()
                next(parts)
                done.note()

            step_with(optimizer, all_but_the_last)
            facts.end()
        next(parts, None)  # the last tile's visit ends
    return done.have_moved


def update_silently(
    optimizer: optim.Optimizer, tiles: Sequence[Sequence[Share]], coefficient: torch.Tensor | float | None
) -> None:
    """Runs update_tiles without hooks: in a thread, after the step that they belonged to."""
    facts, update = FactsOfParts(optimizer), update_of(optimizer)
    facts.begin()
    ready = _each_ready(tiles, coefficient, TileBuffers(tiles), lambda _: nullcontext())
    for tile, _ in zip(tiles, ready, strict=True):
        update(tile)
        facts.end_part()
    facts.end()


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


def step_without_update(optimizer: optim.Optimizer, instead: Callable[[], None]) -> None:
    """Calls `optimizer.step()` with all hooks, but runs `instead` in place of the update."""

    def leave() -> None:
        instead()
        raise _Instead

    with suppress(_Instead):
        step_with(optimizer, leave)
    for hook in [*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()]:
        hook(optimizer, (optimizer,), {})


class _Instead(Exception):
    """Raised to skip the update in this step."""


def raw_step(optimizer: optim.Optimizer) -> None:
    """Updates parameters with gradients, without hooks. (`__wrapped__`, names of hooks: torch-private, tested.)"""
    step = type(optimizer).step
    with _without_hooks(optimizer):
        getattr(step, "__wrapped__", step)(optimizer) if getattr(step, "hooked", False) else step(optimizer)


@contextmanager
def _without_hooks(optimizer: optim.Optimizer) -> Iterator[None]:
    """Suspends an optimizer's hooks, which a step that calls its parent's step would run again."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    kept = {name: getattr(optimizer, name) for name in names}
    vars(optimizer).update({name: OrderedDict() for name in names})
    try:
        yield
    finally:
        vars(optimizer).update(kept)


def stand_in(optimizer: optim.Optimizer, groups: list[dict[str, Any]]) -> optim.Optimizer:
    """Returns another optimizer of the same class, with the same states and attributes and its own parameter groups."""
    other: optim.Optimizer = object.__new__(type(optimizer))
    copied = {
        name: value.clone() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for name, value in vars(optimizer).items()
        if name not in ("step", "zero_grad")  # bound to the other one
    }
    vars(other).update(copied, param_groups=groups)
    return other


def _each_ready(
    tiles: Sequence[Sequence[Share]], coefficient: torch.Tensor | float | None, buffers: TileBuffers, visit: Visit
) -> Generator[None, None, None]:
    """Yields at each tile, once its gradients are where the optimizer looks."""
    with buffers.present():
        for tile in tiles:
            with visit(tile):
                for share, gradient in zip(tile, buffers.ready(tile), strict=True):
                    if gradient is not None and coefficient is not None:
                        gradient.mul_(_beside(coefficient, gradient))
                    share.tensor.grad = None if gradient is None else shaped_as(share.tensor, gradient)
                labels.updates([share for share in tile if share.tensor.grad is not None])
                yield
                for share in tile:
                    share.tensor.grad = None


def update_of(optimizer: optim.Optimizer) -> Callable[[Sequence[Share]], None]:
    """Returns a function that runs the optimizer's step, without hooks, over a tile.

    torch's optimizers go through all parameters of their groups, which over many tiles is quadratic: they get groups
    with the tile's alone. Others keep their groups whole: they may have more values in the order of the parameters.
    """
    if not type(optimizer).__module__.startswith(("torch.optim.", f"{__package__}.muon")):
        return lambda _: raw_step(optimizer)
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}

    def update(tile: Sequence[Share]) -> None:
        groups: dict[int, dict[str, Any]] = {}
        for share in tile:
            if (group := group_of.get(id(share.tensor))) is not None:
                groups.setdefault(id(group), group | {"params": []})["params"].append(share.tensor)
        raw_step(stand_in(optimizer, list(groups.values())))

    return update


class TileBuffers:
    """Gradients on their way to the optimizer: one buffer of the largest tile's size per tier and dtype.

    A buffer is a permanent tensor with permanent views, and has memory during an update alone.
    """

    def __init__(self, tiles: Sequence[Sequence[Share]]) -> None:
        self._most = max((sum(share.tensor.numel() for share in tile) for tile in tiles), default=0)
        self._made: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._offsets: dict[tuple[str, torch.dtype], int] = {}
        self._views: dict[tuple[Share, torch.dtype, int], torch.Tensor] = {}

    @contextmanager
    def present(self) -> Iterator[None]:
        """Frees the buffers' memory at the end; those that exist have memory inside."""
        for (tier, _), buffer in self._made.items():
            Heap().restore(labels.label(buffer, labels.GRADIENTS, "tile", tier=tier))
        try:
            yield
        finally:
            for buffer in self._made.values():
                Heap().release(buffer)

    def ready(self, tile: Sequence[Share]) -> list[torch.Tensor | None]:
        """Returns gradients of a tile's shares, in their masters' tier and dtype, in the memory of the last tile's."""
        self._offsets.clear()
        found = [share.gradient() for share in tile]
        casts, sources = list[torch.Tensor](), list[torch.Tensor]()
        for number, (share, gradient) in enumerate(zip(tile, found, strict=True)):
            # 1 to the other tier, in its own dtype: a half gradient is sent as 2 bytes, not as 4
            if gradient is not None and share.crosses:
                gradient = self._place(share, gradient.dtype, pinned=gradient.is_cuda).copy_(gradient)
            # 2 a cast, in the one buffer that all tiles share in turn
            if gradient is not None and gradient.dtype != share.tensor.dtype:
                sources.append(gradient)
                casts.append(gradient := self._place(share, share.tensor.dtype))
            found[number] = gradient
        if len(casts) == 1:  # a GPU's kernel for lists keeps fewer of its threads busy
            casts[0].copy_(sources[0])
        elif casts:
            torch._foreach_copy_(casts, sources)
        return found

    def _place(self, share: Share, dtype: torch.dtype, pinned: bool = False) -> torch.Tensor:
        key, numel = (share.tier, dtype), share.tensor.numel()
        start = self._offsets.get(key, 0)
        self._offsets[key] = start + numel
        if (view := self._views.get((share, dtype, start))) is None:
            view = self._buffer(*key, share.tensor.device, pinned).narrow(0, start, numel)
            self._views[share, dtype, start] = view
        return view

    def _buffer(self, tier: str, dtype: torch.dtype, device: torch.device, pinned: bool = False) -> torch.Tensor:
        if (tier, dtype) not in self._made:
            made = torch.empty(self._most, dtype=dtype, device=device, pin_memory=pinned)
            self._made[tier, dtype] = labels.label(made, labels.GRADIENTS, "tile", tier=tier)
        return self._made[tier, dtype]


def _beside(coefficient: torch.Tensor | float, gradient: torch.Tensor) -> torch.Tensor | float:
    """Returns the coefficient on the gradient's device: for a gradient in host memory it is copied to the host."""
    return coefficient.to(gradient.device) if isinstance(coefficient, torch.Tensor) else coefficient
