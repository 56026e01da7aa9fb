"""Where shards live, how bytes travel and what becomes of activations: choices that compose with a stage.

Each is a group of its own, with an axis per choice (axis.py).
"""

from __future__ import annotations

from .activations import (
    Activation,
    Buffers,
    CheckpointActivations,
    CheckpointOffloadActivations,
    FusedBuffers,
    OffloadActivations,
    SelectiveActivations,
)
from .offload import CpuOffload, NvmeOffload, Offload
from .zeropp import CHOICES, AllOfZeropp, Hpz, PartsOfZeropp, Qgz, Qwz, Zeropp

__all__ = [
    "SCHEMAS", "Activation", "AllOfZeropp", "Buffers", "CheckpointActivations", "CheckpointOffloadActivations",
    "CpuOffload", "FusedBuffers", "Hpz", "NvmeOffload", "Offload", "OffloadActivations", "PartsOfZeropp", "Qgz", "Qwz",
    "Zeropp",
]  # fmt: skip

SCHEMAS: dict[str, dict[str, type]] = {
    "offload": {"none": Offload, "cpu": CpuOffload, "nvme": NvmeOffload},
    "activation": {
        "none": Activation,
        "checkpoint": CheckpointActivations,
        "selective": SelectiveActivations,
        "offload": OffloadActivations,
        "checkpoint_offload": CheckpointOffloadActivations,
    },
    "buffers": {"constant": Buffers, "fused": FusedBuffers},
    "zeropp": CHOICES,
}
"""Group -> choice -> dataclass, the default choice first."""
