"""torch's ZeroRedundancyOptimizer over DistributedDataParallel: 4ψ parameters + 4ψ gradients + about 8ψ/N Adam states.

Whole parameters are assigned to ranks, the largest first to the rank with the fewest elements. DDP all-reduces the
gradients (2ψ), each rank updates its parameters and broadcasts them (1ψ), one after another or, as bucket views, all
together. Its overlap with DDP is not offered: torch does not support it on gloo.
"""

from __future__ import annotations

from typing import Any

from torch import nn, optim
from torch.distributed.optim import ZeroRedundancyOptimizer

from ..zero import labels
from .ddp import DdpEngine
from .peer_engine import options_of


class ZeroRedundancyEngine(DdpEngine):
    """DDP whose optimizer states are distributed over the ranks, parameter by parameter."""

    def __init__(
        self, module: nn.Module, optimizer: optim.Optimizer, bucket_bytes: int, gradient_as_bucket_view: bool,
        parameters_as_bucket_view: bool, tuned: bool = False,
    ) -> None:  # fmt: skip
        shared = ZeroRedundancyOptimizer(
            optimizer.param_groups,
            type(optimizer),
            parameters_as_bucket_view=parameters_as_bucket_view,
            **options_of(optimizer),
        )
        views: dict[str, Any] = {"gradient_as_bucket_view": gradient_as_bucket_view}
        super().__init__(module, shared, bucket_cap_mb=bucket_bytes / 2**20, **views)
        for name, parameter in module.named_parameters():
            labels.label(parameter, labels.PARAMETERS, name)  # as bucket views they have moved
