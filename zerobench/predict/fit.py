"""Compares a cell's predicted states with the available memory before it runs.

A run needs at least its states, plus activations and processes: a cell whose states do not fit runs out of memory, and
on a CPU so do other processes. In a simulated world only one rank runs, and fake tensors need no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ..config.cell import Cell, CellConfig
from ..host.environment import FAKE, SIMULATED, gpu_bytes, machine_bytes
from ..sizes import show_bytes
from .estimate import held_bytes


@dataclass(frozen=True)
class Fit:
    """`memory_bytes` of memory of `owner`, and the states in it: at most `rank_bytes` for each of `ranks` ranks."""

    owner: str
    memory_bytes: int
    ranks: int
    rank_bytes: int

    @property
    def share(self) -> float:
        """The fraction of the memory that the states fill; above 1 if they do not fit."""
        return self.ranks * self.rank_bytes / self.memory_bytes

    @property
    def text(self) -> str:
        """Describes the needed and the available memory."""
        together = f", {show_bytes(self.ranks * self.rank_bytes)} for {self.ranks} ranks" if self.ranks > 1 else ""
        memory = f"{self.owner} has {show_bytes(self.memory_bytes)}"
        return f"its states need {show_bytes(self.rank_bytes)} per rank{together}, and {memory}"


def fit_of(config: CellConfig) -> Fit | None:
    """Returns the local memory that a resolved cell's states fill most; None if they cannot be predicted or need none.
    A GPU has its own memory; without one, states in host memory and on the device share the machine's memory.
    """
    if config.tensors == FAKE:
        return None
    try:
        held = held_bytes(config)
    except Exception:  # a user's builder may do things that a model without memory cannot
        return None
    if held is None:
        return None
    device, host = held
    ranks = 1 if config.backend == SIMULATED else ceil(config.world_size / config.nodes)
    if config.device != "cuda":
        return Fit("this machine", machine_bytes(), ranks, device + host)
    fits = (
        Fit("a GPU here", gpu_bytes(), config.ranks_per_gpu, device),
        Fit("this machine", machine_bytes(), ranks, host),
    )
    return max(fits, key=lambda fit: fit.share)


def refuse_unfit(cell: Cell) -> Cell:
    """Returns the cell, with a problem if its states do not fit into memory here, unless launch.check_memory is off."""
    if cell.problems or not cell.config.launch.check_memory:
        return cell
    fit = fit_of(cell.config)
    if fit is None or fit.share <= 1:
        return cell
    problem = f"model={cell.config.model_name}: {fit.text}; launch.check_memory=false runs it all the same"
    return Cell(cell.config, (problem,))
