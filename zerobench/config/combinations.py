"""The axes of a cell together: what of them makes no sense, and what the engine hears."""

from __future__ import annotations

from typing import Any

from . import zero_r
from .cell import CellConfig


def validate(cell: CellConfig) -> list[str]:
    """Returns sentences on what of a cell's axes makes no sense, alone or together."""
    problems = cell.activation.validate(cell) + zero_r.problems_of_arena(cell) + cell.buffers.validate(cell)
    problems += cell.optimizer.validate(cell)
    return problems + cell.offload.validate(cell) + cell.topology.validate(cell) + cell.zeropp.validate(cell)


def engine_options(cell: CellConfig, folder: str | None = None) -> dict[str, Any]:
    """Returns keyword arguments for our engine: what differs from its defaults.

    `folder`: for files, where the config names none.
    """
    options: dict[str, Any] = {"arena": True} if cell.arena else {}
    for axis in (cell.offload, cell.topology, cell.zeropp):
        options |= axis.engine_options(cell, folder)
    return options
