"""Chooses the Comm class of a process group by its backend and device."""

from __future__ import annotations

import torch
import torch.distributed as dist

from . import simulated
from .backends import FAKE, GroupComm, NcclComm, StagedComm, backend_for
from .base import Comm
from .gloo import GlooComm

KINDS: dict[tuple[str, str], type[GroupComm]] = {
    ("gloo", "cpu"): GlooComm,
    ("gloo", "cuda"): StagedComm,
    ("nccl", "cuda"): NcclComm,
}
"""(backend, device type) -> class."""


def kinds() -> dict[tuple[str, str], type[GroupComm]]:
    """Returns the classes by (backend, device type), with those of simulated worlds."""
    return KINDS | {(FAKE, device): kind for device, kind in simulated.KINDS.items()}


def connect(group: dist.ProcessGroup | None, device: torch.device) -> Comm:
    """Returns the Comm of `group`, by default torch's default group; without one, that of a world of one rank.

    Raises ValueError for a backend that the engine does not know.
    """
    if group is None:
        if not dist.is_initialized():
            return Comm()
        group = dist.group.WORLD
    assert group is not None
    if dist.get_rank(group) < 0:
        raise ValueError("group: this rank is not a member of the process group that it was given")
    if dist.get_world_size(group) == 1:
        return Comm()
    backend = backend_for(device.type, group) or str(dist.get_backend(group))
    kind = kinds().get((backend, device.type))
    if kind is None:
        known = ", ".join(f"{b} on {d}" for b, d in KINDS)
        raise ValueError(f"group: backend {backend!r} on {device.type} is not supported; use one of {known}")
    return kind(group)
