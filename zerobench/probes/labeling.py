"""Labels for gradients, states and parameters that are not plain tensors, or not yet summed.

Tensors that contain others (DTensor): the probes count their contents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..zero import labels


def holds_others(types: Iterable[type]) -> bool:
    """Returns True if an operator has a tensor that contains others as an argument, and is then dispatched again on its
    contents.
    """
    return any(map(_flattens, types))


@cache
def _flattens(kind: type) -> bool:
    return hasattr(kind, "__tensor_flatten__")


def contains_others(tensor: torch.Tensor) -> bool:
    """Returns True for a tensor that contains others."""
    return tensor.is_sparse or (_flattens(type(tensor)) and is_traceable_wrapper_subclass(tensor))


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the plain tensors with the values: usually the tensor itself."""
    if tensor.is_sparse:
        yield from (tensor._values(), tensor._indices())
        return
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for held in (getattr(tensor, name) for name in names):
        if isinstance(held, torch.Tensor):  # a DTensor also names its mesh
            yield from parts_of(held)


def label_parts(tensor: torch.Tensor, category: str, name: str, tier: str | None = None) -> None:
    """Labels the plain tensors with the values."""
    for part in parts_of(tensor):
        labels.label(part, category, name, tier)


def label_contributions(loss: torch.Tensor, tied: Mapping[torch.Tensor, str]) -> None:
    """Hooks the graph of `loss`: each use of a `tied` parameter has a gradient, kept until they are summed."""
    seen: set[Any] = set()
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for place, (following, _) in enumerate(node.next_functions):
            leaf = getattr(following, "variable", None)
            if leaf is not None and leaf in tied:
                node.register_hook(partial(_label_contribution, place, tied[leaf]))
            nodes.append(following)


def _label_contribution(place: int, name: str, gradients: Sequence[torch.Tensor | None], _outputs: object) -> None:
    gradient = gradients[place]
    if gradient is not None:
        labels.label(gradient, labels.GRADIENTS, f"{name}, one place of use")


def has_storage(tensor: torch.Tensor) -> bool:
    """Returns False for a tensor of torch.func, which stands for others."""
    try:
        tensor.untyped_storage()
    except NotImplementedError:
        return False
    return True
