"""Probe: the interface between one rank's loop and its instrument, and the results of the steps.

Values of a step (loss, norms, loss scale, skipped or not) are read on a GPU when the steps are over. The harness
measures the norm of gradients in the same way for every strategy: each rank sums the squares of its gradients between
backward and update, in fp64; nothing is sent. The sum over the ranks, without the duplicates of replicas, is the square
of the norm, and is computed at the end (sweep/aggregate.py). The order of the sum differs between strategies, which in
fp64 changes it by about 1e-15.

Saves of a checkpoint in the measured steps: how long each holds the loop, and how long until the next may begin. A save
is the last phase of a step. An asynchronous one copies this rank's states to host memory, and a thread writes them
while the next steps run; a save that finds the one before unfinished waits for it. The first comes after the last step
of the warm-up: it makes the ranks' group for checkpoints, and is not measured. The checkpoint lies in the run's folder
while the steps run, each save replaces the one before, and the last is removed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import nn

from ..records import EventRow, LineRow, MemoryRow, TensorRow, TimelineRow, TrafficRow
from ..strategies.engine import Engine
from ..zero.precision import sum_of_powers
from .energy import GpuState
from .intervals import SAVE
from .labeling import parts_of


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

    def may_read_gradients(self, measured: bool) -> bool:
        """Returns True if gradients may be read before the update."""

    @property
    def peak_bytes(self) -> int | None:
        """The largest memory so far, if it is known without asking the device."""

    def end_steps(self) -> None:
        """Called after the last step, when its transfers have completed."""
        return

    def records(self, rank: int, folder: Path) -> PassRecords:
        """Returns all results, after the pass has ended. `folder`: the run's, for results that are not tables."""


class StepResult(NamedTuple):
    """Values of one step on one rank, as in StepRow."""

    loss: float
    clip_norm: float | None
    loss_scale: float
    skipped: bool
    grad_squares: float | None


def read_step(
    loss: torch.Tensor, clip_norm: torch.Tensor | None, loss_scale: torch.Tensor | float,
    skipped: torch.Tensor | float, grad_squares: torch.Tensor | None,
) -> StepResult:  # fmt: skip
    """Returns a step's values as numbers, after waiting for the device."""
    norm, squares = (None if value is None else value.item() for value in (clip_norm, grad_squares))
    return StepResult(loss.item(), norm, float(loss_scale), bool(skipped), squares)


def current_scale(engine: Engine) -> torch.Tensor | float:
    """Returns the factor of an engine's next loss; a copy, because it changes in place."""
    scale = engine.scaler.scale
    return scale.clone() if isinstance(scale, torch.Tensor) else scale


def squares(gradients: Iterable[torch.Tensor], scale: torch.Tensor | float) -> torch.Tensor | None:
    """Returns Σ g² over this rank's part of the reduced gradients, unscaled, 0-dim fp64 on the device; None if there
    are none. `scale`: the factor of the loss.
    """
    total: torch.Tensor | None = None
    with torch.no_grad():
        for gradient in gradients:
            for part in parts_of(gradient):  # of a DTensor this rank's shard
                square = sum_of_powers([part.reshape(-1)], 2.0, part.device)
                total = square if total is None else total + square.to(total.device)
    return None if total is None else total / scale / scale


NONE, ASYNCHRONOUS = "none", "asynchronous"

SAVES = "saves"
"""Folder of the checkpoint in a run's; a rank that is killed leaves it."""


class Saves:
    """The saves of one rank. `how`: a value of the key measure.save; `every`: measured steps from one save to the next.
    `begun`: numbers of the steps that end with a save; `in_flight`: of those in which one is copied or written.
    """

    def __init__(self, how: str, every: int, warmup: int, folder: Path, rank: int) -> None:
        self._how, self._every, self._warmup, self._rank = how, every, warmup, rank
        self._path = folder / SAVES / "checkpoint"
        self.begun: list[int] = []
        self.in_flight: set[int] = set()
        self.checkpoint_bytes: int | None = None
        """Size of the last checkpoint's files, on rank 0."""
        self._returned: dict[int, tuple[float, Any]] = {}
        self._last: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Waits for the last save, unless the steps failed, and removes the checkpoint."""
        if error[0] is None and self._last is not None:
            self._last.wait()
        if self._rank == 0 and self.begun:
            files = self._path.glob("*")
            self.checkpoint_bytes = sum(file.stat().st_size for file in files) if error[0] is None else None
            shutil.rmtree(self._path.parent, ignore_errors=True)

    def after_update(self, number: int, engine: Any, probe: Probe) -> None:
        """Saves, if it is due after step `number`. Collective."""
        measured = number - self._warmup + 1
        if self._how != NONE and measured >= 0 and measured % self._every == 0:
            self.begun.append(number)
            self.in_flight.add(number)
            with probe.phase(SAVE):
                self._last = engine.save(self._path, asynchronous=self._how == ASYNCHRONOUS)
            self._returned[number] = time.perf_counter(), self._last
        if self._last is not None and not self._last.done():
            self.in_flight.add(number + 1)

    def written_s(self, number: int) -> float:
        """Returns the seconds for which a thread went on writing a step's save after the loop had continued."""
        returned, handle = self._returned[number]
        return 0.0 if handle is None else max(0.0, handle.ended - returned)
