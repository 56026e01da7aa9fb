"""Tiers: where a shard's states live and gradients go: device, host memory (ZeRO-Offload), files (ZeRO-Infinity).

`placement_for` goes from a policy to the mechanism that carries it out.
"""

from __future__ import annotations

import torch

from .cpu import HostPlacement
from .nvme import FilePlacement
from .placement import Placement
from .policy import NvmeOffload, Offload


def placement_for(policy: Offload | None, device: torch.device) -> Placement:
    """Where an engine on `device` keeps its part of the model states."""
    if policy is None:
        return Placement()
    if isinstance(policy, NvmeOffload):
        return FilePlacement(policy, device)
    return HostPlacement(policy, device)
