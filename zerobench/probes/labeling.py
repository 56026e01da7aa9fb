"""Labels for gradients, states and parameters that are not plain tensors, or not yet summed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..zero import labels
from .dtensor import parts_of


def label_parts(tensor: torch.Tensor, category: str, name: str, tier: str | None = None) -> None:
    """Labels the plain tensors that hold the values."""
    for part in parts_of(tensor):
        labels.label(part, category, name, tier)


def label_contributions(loss: torch.Tensor, tied: Mapping[torch.Tensor, str]) -> None:
    """Hooks the graph of `loss`: each use of a `tied` parameter makes a gradient, kept until they are summed."""
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
