"""The norm of gradients as the harness measures it, for every strategy alike: from the tensors, not from an engine's
value.

Each rank sums the squares of its gradients between backward and update, in fp64; nothing is sent. The sum over the
ranks, without the duplicates of replicas, is the square of the norm, and is computed at the end (aggregate.py). The
order of the sum differs between strategies, which in fp64 changes it by about 1e-15.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ..zero.gradients.reduced import reduced_gradients, replicas
from ..zero.precision import sum_of_powers
from ..zero.strategy import Strategy
from .dtensor import parts_of


def squares(engine: Any, scale: torch.Tensor | float) -> torch.Tensor | None:
    """Returns Σ g² over this rank's part of the reduced gradients, unscaled, 0-dim fp64 on the device; None for an
    engine whose gradients are not accessible. `scale`: the factor of the loss.
    """
    total: torch.Tensor | None = None
    with torch.no_grad():
        for gradient in _gradients(engine):
            part = sum_of_powers([gradient.reshape(-1)], 2.0, gradient.device)
            total = part if total is None else total + part.to(total.device)
    return None if total is None else total / scale / scale


def holders(engine: Any) -> int:
    """Returns the number of ranks that hold the same part of the gradients: under DDP all of them."""
    if isinstance(engine, Strategy):
        return replicas(engine)
    return 1 if getattr(engine, "shares_gradients", False) else dist.get_world_size()


def _gradients(engine: Any) -> Iterator[torch.Tensor]:
    if isinstance(engine, Strategy):
        yield from reduced_gradients(engine)
        return
    for parameter in [] if getattr(engine, "hides_gradients", False) else engine.module.parameters():
        if parameter.grad is not None:
            yield from parts_of(parameter.grad)  # this rank's shard of a DTensor
