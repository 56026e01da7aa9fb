"""Tensors that hold others (DTensor): the probes count what they hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def holds_others(types: Iterable[type]) -> bool:
    """Whether one of an operator's arguments is such a tensor: it then sees to it that the operator comes again."""
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that hold the values: the tensor itself, as a rule."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for held in (getattr(tensor, name) for name in names):
        if isinstance(held, torch.Tensor):  # a DTensor also names its mesh
            yield from parts_of(held)
