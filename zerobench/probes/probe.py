"""Probe: the calls of one rank's loop to its instrument, and the results when the steps are over."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import nn

from ..records import EventRow, LineRow, MemoryRow, TensorRow, TimelineRow, TrafficRow
from .nvidia_smi import GpuState


@dataclass(frozen=True)
class EventOrder:
    """The order of events in a step: `arrivals`, parameters by number, in the order in which their gradients came;
    `modules_run`, in the order in which the forward ran them, each with True if backward comes back to it.
    """

    arrivals: tuple[int, ...]
    modules_run: tuple[tuple[str, bool], ...]


@dataclass(kw_only=True)
class PassRecords:
    """All that a pass has found out on one rank. Each kind of pass fills its own part."""

    process_memory: dict[str, int | None]
    memory: list[MemoryRow] = field(default_factory=list)
    tensors: list[TensorRow] = field(default_factory=list)
    lines: list[LineRow] = field(default_factory=list)
    traffic: list[TrafficRow] = field(default_factory=list)
    timeline: list[TimelineRow] = field(default_factory=list)
    events: list[EventRow] = field(default_factory=list)
    gpu_states: list[GpuState] = field(default_factory=list)
    kept: str = ""
    """The largest storage of kept_bytes, in words."""
    witness: str = ""
    """Source of the allocator's total in the accounted pass (probes/allocator.py)."""
    wall_s: float | None = None
    """From the beginning of the first measured step to the end of the last; None in a pass without times."""
    times: list[dict[str, float]] = field(default_factory=list)
    """Seconds of each phase, per step; empty in a pass without times."""
    order: EventOrder | None = None
    """Events of the last step, if the pass records them."""


class Probe(Protocol):
    """An instrument over one rank, entered before the model is built. It changes nothing that the rank computes. A
    pass leaves out what it does not need to hear.
    """

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def adopt(self, model: nn.Module) -> None:
        """The model is built, and no strategy has it yet."""
        return

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A phase of a step, or "init"."""

    def step(self, measured: bool) -> AbstractContextManager[None]:
        """One whole step."""

    def inputs(self, *tensors: torch.Tensor) -> None:
        """The step's inputs."""
        return

    def before_backward(self, loss: torch.Tensor) -> None:
        """The loss is there."""
        return

    def after_backward(self, model: nn.Module) -> None:
        """Gradients are there."""
        return

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Optimizer states are there."""
        return

    @property
    def may_wait(self) -> bool:
        """True if the device may be asked for a value between steps."""

    def may_look(self, measured: bool) -> bool:
        """True if gradients may be looked at before the update."""

    @property
    def peak_bytes(self) -> int | None:
        """The largest memory so far, where it is known without asking the device."""

    def end_steps(self) -> None:
        """The last step is over, and what it had on its way has come."""
        return

    def found(self, rank: int, folder: Path) -> PassRecords:
        """All that was found out, after the pass is left. `folder`: the run's, for what is no table."""
