"""Tensors that contain others, such as DTensors, of which the probes count and label the contents; nested tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..zero import labels


def holds_others(types: Iterable[type]) -> bool:
    """Returns True if an argument contains other tensors: the operator is dispatched again on them."""
    return any(map(_flattens, types))


@cache
def _flattens(kind: type) -> bool:
    return hasattr(kind, "__tensor_flatten__")


def contains_others(tensor: torch.Tensor) -> bool:
    """Returns True for a tensor that contains others, or has no storage of its own."""
    return tensor.layout is not torch.strided or (_flattens(type(tensor)) and is_traceable_wrapper_subclass(tensor))


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the plain tensors with the values: usually the tensor itself; none if its layout is opaque (oneDNN's)."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for content in (getattr(tensor, name) for name in names):
            if isinstance(content, torch.Tensor):  # a DTensor also names its mesh
                yield from parts_of(content)
    elif tensor.layout is torch.strided:
        yield tensor
    elif tensor.is_sparse:
        yield from (tensor._values(), tensor._indices())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.values(), tensor.crow_indices(), tensor.col_indices())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.values(), tensor.ccol_indices(), tensor.row_indices())


def label_parts(tensor: torch.Tensor, category: str, name: str, tier: str | None = None) -> None:
    """Labels the plain tensors with the values."""
    for part in parts_of(tensor):
        labels.label(part, category, name, tier)


def tensors_in(values: Any, depth: int = 99) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested tuples, lists and dicts, of at most `depth` levels."""
    if isinstance(values, torch.Tensor):
        yield values
    elif depth and isinstance(values, dict | tuple | list):
        for value in values.values() if isinstance(values, dict) else values:
            yield from tensors_in(value, depth - 1)


def plain_tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yields the plain tensors with the values of all tensors in nested tuples, lists and dicts."""
    for tensor in (values,) if isinstance(values, torch.Tensor) else tensors_in(values):
        yield from parts_of(tensor) if contains_others(tensor) else (tensor,)


def has_storage(tensor: torch.Tensor) -> bool:
    """Returns False for a tensor of torch.func, which stands for others."""
    try:
        tensor.untyped_storage()
    except NotImplementedError:
        return False
    return True
