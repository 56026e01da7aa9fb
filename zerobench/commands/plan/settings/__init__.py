"""A chosen cell in other systems' words: files for FSDP2, DeepSpeed, Megatron, accelerate, and notes.

Each is a pure function of the resolved cell. A system that has no counterpart of a strategy gets its closest one, and a
note says so: its memory is then not what was executed.
"""

from __future__ import annotations

from collections.abc import Callable

from ....config.cell import CellConfig
from .accelerate import accelerate
from .base import Settings
from .deepspeed import deepspeed
from .fsdp2 import fsdp2
from .megatron import megatron

__all__ = ["SYSTEMS", "Settings", "settings_of"]

_FUNCTIONS: dict[str, Callable[[CellConfig], Settings]] = {
    "fsdp2": fsdp2, "deepspeed": deepspeed, "megatron": megatron, "accelerate": accelerate,
}  # fmt: skip

SYSTEMS = tuple(_FUNCTIONS)
"""Systems whose settings there are."""


def settings_of(system: str, config: CellConfig) -> Settings:
    """Returns the settings of one of SYSTEMS for a resolved cell."""
    return _FUNCTIONS[system](config)
