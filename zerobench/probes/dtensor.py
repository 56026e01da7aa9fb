"""Tensors that contain others (DTensor): the probes count their contents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def holds_others(types: Iterable[type]) -> bool:
    """Returns True where an operator's argument is such a tensor, which then dispatches the operator again on its
    contents.
    """
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


def contains_others(tensor: torch.Tensor) -> bool:
    """Returns True for such a tensor."""
    return is_traceable_wrapper_subclass(tensor)


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the plain tensors that hold the values: usually the tensor itself."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for held in (getattr(tensor, name) for name in names):
        if isinstance(held, torch.Tensor):  # a DTensor also names its mesh
            yield from parts_of(held)
