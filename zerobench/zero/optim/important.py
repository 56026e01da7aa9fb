"""Important gradients are updated on time, the rest one step late (ZenFlow, arXiv 2505.12242).

The largest elements of each segment's gradient, a given fraction, are important. (ZenFlow selects columns of matrices;
blocks of 8 to 64 elements of flat shards were little better than as many random elements.)::

    step i       important elements: master and states are updated by the gradient of step i, which becomes NaN there
                 to mark them as done
    later        the pending update of step i changes all other elements (optim/delayed_update.py)

So each element uses every gradient once, in order. A gradient that is NaN is important, so that it is not silently
mistaken for a mark. A segment whose optimizer states do not exist yet is late as a whole.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import optim

from ..precision import Share
from .step_by_tiles import raw_step, stand_in


def important(gradient: torch.Tensor, fraction: float) -> torch.Tensor:
    """Returns the indices of the important elements of a gradient, (numel,)."""
    size = gradient.detach().abs().float()
    return torch.topk(size, math.ceil(len(size) * fraction), sorted=False).indices


def update_important(
    optimizer: optim.Optimizer, tile: Sequence[Share], coefficient: float | None, fraction: float
) -> None:
    """Updates the important elements of a tile, using copies, and marks them."""
    number = {id(p): n for n, group in enumerate(optimizer.param_groups) for p in group["params"]}
    groups: list[dict[str, Any]] = [{**group, "params": []} for group in optimizer.param_groups]
    states: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    taken = []
    for share in tile:
        gradient = share.gradient()
        if gradient is None or id(share.tensor) not in number:
            continue
        where = important(gradient, fraction)
        few = share.tensor.detach().view(-1)[where]
        few.grad = gradient[where].to(few.dtype)
        if coefficient is not None:
            few.grad.mul_(coefficient)
        states[few] = {
            key: value.view(-1)[where] if _is_elementwise(value, share.tensor) else _copied(value)
            for key, value in optimizer.state.get(share.tensor, {}).items()
        }
        groups[number[id(share.tensor)]]["params"].append(few)
        taken.append((share, gradient, where, few))
    part = stand_in(optimizer, groups)
    part.state = states
    raw_step(part)
    for share, gradient, where, few in taken:
        old = optimizer.state.get(share.tensor, {})
        new = {key: value for key, value in states[few].items() if _is_elementwise(value, few)}
        if new.keys() <= old.keys():
            for place, values in [(_values(share.tensor), few), *((old[key], value) for key, value in new.items())]:
                place.view(-1)[where] = values
            gradient[where] = torch.nan


@contextmanager
def others_alone(optimizer: optim.Optimizer, tile: Sequence[Share]) -> Iterator[None]:
    """Prevents an update of a tile inside from changing elements whose gradients are marked."""
    kept = []
    for share in tile:
        gradient = share.tensor.grad
        if gradient is not None:
            done = gradient.isnan()
            gradient.masked_fill_(done, 0)
            states = optimizer.state.get(share.tensor, {}).values()
            places = [_values(share.tensor), *(value for value in states if _is_elementwise(value, share.tensor))]
            kept += [(place, done, place.clone()) for place in places]
    yield
    for place, done, values in kept:
        place.copy_(torch.where(done, values, place))


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view whose writes do not increment the version counter, like those of fused updates."""
    view: torch.Tensor = torch.Tensor.data.__get__(tensor)  # type: ignore[attr-defined]
    return view


def _is_elementwise(value: Any, tensor: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == tensor.shape


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
