"""The words of `zerobench estimate` become cells and the device that they are executed for.

keys       a sweep's own; what is left open is as in a sweep, but for DEFAULTS
device     of the question, not of this machine: it needs no GPU here
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...config.cell import Cell
from ...config.compose import RefusedError, compose_cells
from ...fake_execution import Target
from ...host.environment import FAKE, SIMULATED

DEFAULTS = {"strategy": "ddp,zero1,zero2,zero3,fsdp2", "world_size": "8", "data": "synthetic"}
"""Key -> its values where the command line says nothing of it."""

PLACED = {"device": "cpu", "backend": SIMULATED, "tensors": FAKE}
"""Keys that an estimate sets itself."""

DEVICE = "cuda"
"""The device that is asked for where nothing is said: memory is scarce there."""


@dataclass(frozen=True)
class Question:
    """`words`: the command line without options. `target`: the device that `cells` are executed for."""

    words: tuple[str, ...]
    cells: tuple[Cell, ...]
    target: Target


def ask(words: Sequence[str], device: str | None = None, attention: str | None = None) -> Question:
    """Returns the cells of a command line. Raises RefusedError, or ValueError with a sentence, where it is wrong."""
    said = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    for key in ("backend", "tensors"):
        if key in said:
            raise ValueError(f"{key}={said[key]}: an estimate runs no ranks; leave {key} out")
    if said.get("search.memory_limit"):
        raise ValueError("search.memory_limit: a search runs cells; zerobench plan searches over estimates")
    device = device or said.get("device") or DEVICE
    target = Target("cpu" if device == "auto" else device, attention)
    own = {} if "experiment" in said else {key: value for key, value in DEFAULTS.items() if key not in said}
    keys = [f"{key}={value}" for key, value in (own | PLACED).items()]
    kept = [word for word in words if not word.startswith("device=")]
    cells = compose_cells(["-m", *keys, *kept])
    if not cells:
        raise RefusedError(["these words make no cell; zerobench estimate --help shows some that do"])
    return Question(tuple(words), tuple(_on(cell, target) for cell in cells), target)


def _on(cell: Cell, target: Target) -> Cell:
    """Returns the cell with the defaults of the target, so that those which differ there alone are two cells."""
    return cell if cell.problems else replace(cell, config=target.defaults(cell.config))
