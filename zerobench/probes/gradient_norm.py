"""The norm of gradients as the harness measures it, for every strategy alike: from the tensors, not from an engine's
value.

Each rank sums the squares of its gradients between backward and update, in fp64; nothing is sent. The sum over the
ranks, without the duplicates of replicas, is the square of the norm, and is computed at the end (aggregate.py). The
order of the sum differs between strategies, which in fp64 changes it by about 1e-15.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..zero.precision import sum_of_powers
from .dtensor import parts_of


def squares(gradients: Iterable[torch.Tensor], scale: torch.Tensor | float) -> torch.Tensor | None:
    """Returns Σ g² over this rank's part of the reduced gradients, unscaled, 0-dim fp64 on the device; None where there
    are none. `scale`: the factor of the loss.
    """
    total: torch.Tensor | None = None
    with torch.no_grad():
        for gradient in gradients:
            for held in parts_of(gradient):  # of a DTensor this rank's shard
                part = sum_of_powers([held.reshape(-1)], 2.0, held.device)
                total = part if total is None else total + part.to(total.device)
    return None if total is None else total / scale / scale
