"""Probe: the interface between one rank's loop and its instrument, and the results after the steps."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import nn

from ..records import EventRow, LineRow, MemoryRow, TensorRow, TimelineRow, TrafficRow
from .nvml import GpuState


@dataclass(frozen=True)
class EventOrder:
    """The order of events in a step. `arrivals`: parameters by number, in the order in which their gradients came.
    `modules_run`: modules in forward order, each with True if backward returns to it.
    """

    arrivals: tuple[int, ...]
    modules_run: tuple[tuple[str, bool], ...]


@dataclass(kw_only=True)
class PassRecords:
    """All results of a pass on one rank. Each kind of pass fills its own part."""

    process_memory: dict[str, int | None]
    memory: list[MemoryRow] = field(default_factory=list)
    tensors: list[TensorRow] = field(default_factory=list)
    lines: list[LineRow] = field(default_factory=list)
    traffic: list[TrafficRow] = field(default_factory=list)
    timeline: list[TimelineRow] = field(default_factory=list)
    events: list[EventRow] = field(default_factory=list)
    gpu_states: list[GpuState] = field(default_factory=list)
    energy_j: float | None = None
    """Joules of this rank's GPU, or of its machine's CPUs, in the measured steps; None if no counter can be read."""
    kept: str = ""
    """A description of the largest storage of kept_bytes."""
    witness: str = ""
    """Source of the allocator's total in the accounted pass (probes/allocator.py)."""
    wall_s: float | None = None
    """Seconds from the beginning of the first measured step to the end of the last; None in a pass without times."""
    times: list[dict[str, float]] = field(default_factory=list)
    """Seconds of each phase, per step; empty in a pass without times."""
    order: EventOrder | None = None
    """Events of the last step, if the pass records them."""


class Probe(Protocol):
    """An instrument over one rank, entered before the model is built. It changes nothing that the rank computes. A pass
    overrides only the events that it needs.
    """

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def adopt(self, model: nn.Module) -> None:
        """Called when the model is built, before a strategy wraps it."""
        return

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Wraps a phase of a step, or "init"."""

    def step(self, measured: bool) -> AbstractContextManager[None]:
        """Wraps one whole step."""

    def inputs(self, *tensors: torch.Tensor) -> None:
        """Called with the step's inputs."""
        return

    def before_backward(self, loss: torch.Tensor) -> None:
        """Called when the loss is computed."""
        return

    def after_backward(self, model: nn.Module) -> None:
        """Called when the gradients are computed."""
        return

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Called when the optimizer states exist."""
        return

    @property
    def may_wait(self) -> bool:
        """True if the device may be asked for a value between steps."""

    def may_look(self, measured: bool) -> bool:
        """Returns True if gradients may be read before the update."""

    @property
    def peak_bytes(self) -> int | None:
        """The largest memory so far, if it is known without asking the device."""

    def end_steps(self) -> None:
        """Called after the last step, when its transfers have completed."""
        return

    def found(self, rank: int, folder: Path) -> PassRecords:
        """Returns all results, after the pass has ended. `folder`: the run's, for results that are not tables."""
