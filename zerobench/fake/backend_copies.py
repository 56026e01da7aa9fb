"""Copies that a backend makes of the tensors which a collective is given, where the fake process group makes none.

gloo's reduce-scatter sums in a copy of its input, which lives until the sum has been written to the output. Our engines
launch sends and receives instead, and NCCL copies nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed  # registers the operators of c10d

COPIED: dict[str, dict[Any, int]] = {"cpu": {torch.ops.c10d._reduce_scatter_base_.default: 1}}
"""Type of device -> operator -> the place of the argument that its backend copies."""


def copied_by_backend(func: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
    """Returns a new tensor in place of the copy that the backend makes for an operator, None where it makes none."""
    place = COPIED["cpu"].get(func)
    return None if place is None else torch.empty_like(args[place])
