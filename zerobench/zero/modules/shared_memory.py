"""Tensors that share memory with a parameter before `initialize`, which moves parameters.

Weights that are tied by `.data`, a buffer that is `weight.data`, a view kept in an attribute: torch trains them as one
tensor. Under an engine the parameter gets other memory, and the rest would keep the old values. A parameter that stands
in several modules is one tensor, and is tied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)

Extent = tuple[int, int, int]
"""Storage, first byte, and the byte behind the last one."""


def check_memory(model: nn.Module, moves_frozen: bool) -> None:
    """Raises ValueError for the first parameter that is moved and whose memory another tensor of the model shares."""
    parameters = {p: name for name, p in model.named_parameters() if has_memory(p)}
    held = [(extent_of(p), name, moves_frozen or p.requires_grad) for p, name in parameters.items()]
    storages = {extent[0] for extent, *_ in held}
    others = ((extent_of(one), name, False) for name, one in _others(model) if one not in parameters)
    found = sorted([*held, *(one for one in others if one[0][0] in storages)])
    end: Extent = (0, 0, 0)
    last: tuple[str, bool] = ("", False)
    for extent, name, is_moved in found:
        overlaps = extent[0] == end[0] and extent[1] < end[2]
        if overlaps and (is_moved or last[1]):
            raise ValueError(
                f"{name}: its memory is also that of {last[0]}, and the engine moves parameters, which would part the"
                f" two; tie modules by one Parameter (`head.weight = embedding.weight`), and read {last[0]} or {name}"
                " in the forward instead of keeping a view of it"
            )
        if not overlaps or extent[2] > end[2]:
            end, last = extent, (name, is_moved)


def has_memory(tensor: torch.Tensor) -> bool:
    """Returns True for a plain tensor with elements in memory, which meta and fake ones have not."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and tensor.numel() > 0 and tensor.data_ptr() != 0


def extent_of(tensor: torch.Tensor) -> Extent:
    """Returns the bytes of memory between a tensor's first and last element."""
    length = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    first = tensor.data_ptr()
    return tensor.untyped_storage().data_ptr(), first, first + length * tensor.element_size()


def _others(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers, and tensors in the modules' attributes, by name."""
    for path, module in model.named_modules():
        # a weight that torch's spectral_norm computes from weight_orig is made anew before each forward
        attributes = {n: value for n, value in vars(module).items() if f"{n}_orig" not in module._parameters}
        values: dict[str, Any] = {**attributes, "_parameters": (), "_modules": (), "_buffers": (), **module._buffers}
        for name, value in values.items():
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, torch.Tensor) and has_memory(leaf):
                    yield f"{path}.{name}" if path else name, leaf
