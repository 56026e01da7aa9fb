"""Tiers: where a shard's states and gradients are stored: device, host memory (ZeRO-Offload), files (ZeRO-Infinity).

`placement_for` returns the mechanism that implements a policy.
"""

from __future__ import annotations

import torch

from .cpu import HostPlacement
from .nvme import FilePlacement
from .placement import NvmeOffload, Offload, Placement


def placement_for(policy: Offload | None, device: torch.device) -> Placement:
    """Returns the placement of the model states of an engine on `device`."""
    if policy is None:
        return Placement()
    if isinstance(policy, NvmeOffload):
        return FilePlacement(policy, device)
    return HostPlacement(policy, device)
