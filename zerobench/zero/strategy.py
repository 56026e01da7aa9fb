"""The engine's familiar face, and the events of a unit that the stages fill in.

[Note: the life of a unit]

    adopt                 the stage cuts the parameters into units and hands the optimizer its segments
    before forward        the unit's full parameters must be there                       (stage 3: unshard)
    after forward         nobody reads them for a while                                  (stage 3: reshard)
    before backward       they must be there again                                       (stage 3: unshard)
    gradient arrived      autograd has finished one parameter's gradient: it moves into the unit
    gradients ready       the unit has them all: reduce over the ranks, each keeps its shard
    after update          the shards hold new parameters                        (stages 1 and 2: all-gather)

A training step is `loss = engine(*inputs)`, `engine.backward(loss)`, `engine.step()`. Gradients are
means over the ranks. `step` consumes them; `zero_grad` drops any that are left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn, optim

from . import labels
from .comm import Comm
from .layout import Piece
from .segments import OptimizerSegment, swap_parameters
from .state import StateFace
from .unit import Unit

REDUCTIONS_IN_FLIGHT = 1
"""Reductions that may run while the next unit fills."""


@dataclass(frozen=True)
class Options:
    """What a caller may choose. Bytes are of the parameters' own dtype.

    `bucket_bytes`       size of a unit in stages 1 and 2 (parameters may straddle units)
    `prefetch`           units gathered ahead in stage 3
    `units`              stage 3: the modules that are units; default: the elements of every outermost
                         nn.ModuleList, the rest is the root unit
    `broadcast_buffers`  copy rank 0's buffers to all ranks before each forward, as DDP does
    `elementwise`        vouches for an optimizer that is not torch's
    """

    bucket_bytes: int = 25 * 2**20
    prefetch: int = 1
    units: tuple[nn.Module, ...] | None = field(default=None, compare=False)
    broadcast_buffers: bool = True
    elementwise: bool = False


class Strategy(StateFace):
    """A model and its optimizer under one ZeRO stage. Made by `zerobench.initialize`."""

    stage = 0

    def __init__(self, module: nn.Module, optimizer: optim.Optimizer, comm: Comm, options: Options) -> None:
        self.module = module
        self.optimizer = optimizer
        self.comm = comm
        self.options = options
        named = {p: name for name, p in module.named_parameters()}
        self.names = [name for p, name in named.items() if p.requires_grad]
        self.trainable = [p for p in named if p.requires_grad]
        self.frozen = [p for p in named if not p.requires_grad]
        self.units: list[Unit] = []
        self.places: list[list[tuple[Unit, Piece]]] = [[] for _ in self.trainable]
        self.segments: list[OptimizerSegment] = []
        self.used: set[int] = set()
        # One tensor for life: a thread of gloo's may let go of what it sent whenever it likes, and memory would vary.
        device = self.trainable[0].device if self.trainable else None
        self._used_flags = torch.zeros(len(self.trainable), dtype=torch.int32, device=device)
        self._in_flight: deque[Unit] = deque()
        self._synchronising = True
        self._in_backward = False
        self._in_step = False
        self._buffers_due = True
        with torch.no_grad():
            for buffer in module.buffers():
                comm.broadcast(buffer)
            self.adopt()
        self._attach()

    # -- the events: what a stage is ------------------------------------------------------------------

    def adopt(self) -> None:
        """Builds `self.units` from the parameters and fills them with rank 0's values."""
        raise NotImplementedError

    def open_gradients(self, unit: Unit) -> None:
        """Makes `unit.full_gradients` writable; called before the first write since the last reduction."""
        raise NotImplementedError

    def close_gradients(self, unit: Unit) -> None:
        """The own slice of `unit.full_gradients` is reduced: puts it where the optimizer looks."""
        raise NotImplementedError

    def gradients_written(self, unit: Unit) -> None:
        """A gradient was written into `unit`; a stage may start its reduction."""

    def finish_reductions(self) -> None:
        """The backward is over: starts every reduction that is still due, in an order equal on all ranks."""
        raise NotImplementedError

    def after_update(self) -> None:
        """The shards hold new parameters."""

    def forget(self) -> None:
        """Gradients are dropped: so is what a stage knows of them beside the units."""

    def holders(self) -> list[Unit]:
        """The units whose parameters must be made whole before they can be read."""
        return []

    @contextmanager
    def whole(self, unit: Unit) -> Iterator[None]:
        """`unit.full_parameters` is there inside, on every rank."""
        yield

    # -- the face -------------------------------------------------------------------------------------

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        """The module's forward. Buffers become rank 0's when DDP would do it: after a forward that is reduced."""
        if self.options.broadcast_buffers and self._buffers_due:
            with torch.no_grad():
                for buffer in self.module.buffers():
                    self.comm.broadcast(buffer)
        self._buffers_due = torch.is_grad_enabled() and self._synchronising
        return self.module(*inputs, **named_inputs)

    def backward(self, loss: torch.Tensor) -> None:
        """Backpropagates `loss` (a scalar) and reduces the gradients over the ranks."""
        self._in_backward = True
        try:
            loss.backward()
        finally:
            self._in_backward = False
        self._finish_backward()

    def step(self) -> None:
        """One update. Consumes the gradients. Raises RuntimeError for gradients that were never reduced."""
        if self.comm.size > 1 and any(unit.filled for unit in self.units):
            raise RuntimeError("step: the last backward was under no_sync; run one outside it before step()")
        # 1 agree on which parameters have a gradient anywhere
        used = self._agree_on_used()
        # 2 show the optimizer its segments of the gradients
        for segment in self.segments:
            segment.hand_gradient(used=segment.segment.parameter in used)
        # 3 update the shards
        self._in_step = True
        try:
            self.optimizer.step()
        finally:
            self._in_step = False
        # 4 let everyone have the new parameters, if they hold them whole
        with torch.no_grad():
            self.after_update()
        for parameter in self.trainable:  # a backward through an older forward must be an error, as in torch
            torch.autograd.graph.increment_version(parameter)
        # 5 consume
        self.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients that `step` has not consumed. `set_to_none` is there for the likeness to torch."""
        self._wait_for_reductions()
        for unit in self.units:
            unit.forget_gradients()
        for segment in self.segments:
            segment.tensor.grad = None
        self.used.clear()
        self.forget()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep their gradients on this rank; the next one outside reduces their sum."""
        before, self._synchronising = self._synchronising, False
        try:
            yield
        finally:
            self._synchronising = before

    def train(self, mode: bool = True) -> Strategy:
        """The module's `train`."""
        self.module.train(mode)
        return self

    def eval(self) -> Strategy:
        """The module's `eval`."""
        return self.train(False)

    # -- shared by the stages -------------------------------------------------------------------------

    def parameters_of(self, unit: Unit) -> list[nn.Parameter]:
        """The trainable parameters with a piece in `unit`, in order."""
        return list({self.trainable[piece.parameter]: None for piece in unit.layout.pieces})

    def reduce(self, unit: Unit) -> None:
        """Launches the reduction of `unit`'s gradients; waits for the oldest if too many are in flight."""
        if self.comm.size == 1:  # full and shard are one tensor, and gradients stay in it until `step`
            return
        if not unit.filled:
            self.open_gradients(unit)
        while len(self._in_flight) >= REDUCTIONS_IN_FLIGHT:
            self._wait_for_oldest()
        unit.zero_missing_gradients()
        assert unit.full_gradients is not None
        unit.reduction = self.comm.reduce_scatter(unit.full_gradients, unit.name)
        self._in_flight.append(unit)

    def _attach(self) -> None:
        index = {p: i for i, p in enumerate(self.trainable)}
        for unit in self.units:
            for piece in unit.layout.pieces:
                self.places[piece.parameter].append((unit, piece))
            self.segments += [OptimizerSegment(unit, s) for s in unit.layout.segments(self.comm.rank)]
        swap_parameters(self.optimizer, index, self.segments)
        for parameter, i in index.items():
            parameter.register_post_accumulate_grad_hook(partial(self._gradient_arrived, i))
        self.optimizer.register_step_pre_hook(self._check_step)

    def _check_step(self, *_: Any) -> None:
        if not self._in_step:
            raise RuntimeError("call engine.step(), not optimizer.step(): the parameters must be exchanged")

    def _gradient_arrived(self, i: int, parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if gradient.is_sparse:
            raise ValueError(f"{self.names[i]}: its gradient is sparse, which flat buffers do not hold")
        if not self._in_backward:
            raise RuntimeError("call engine.backward(loss), not loss.backward(): the gradients must be reduced")
        self.used.add(i)
        flat = gradient.reshape(-1)
        for unit, piece in self.places[i]:
            if unit.reduction is not None:  # a second gradient, after the unit was sent: it goes in a round of its own
                self._wait_for_reductions()
            if not unit.filled:
                self.open_gradients(unit)
            unit.write_gradient(piece, flat[piece.start : piece.stop], 1 / self.comm.size)
            if self._synchronising:
                self.gradients_written(unit)

    def _finish_backward(self) -> None:
        if self._synchronising:
            self.finish_reductions()
            self._wait_for_reductions()
        for unit in self.units:
            unit.arrived.clear()

    def _wait_for_reductions(self) -> None:
        while self._in_flight:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        unit = self._in_flight.popleft()
        assert unit.reduction is not None
        unit.reduction.wait()
        unit.reduction = None
        self.close_gradients(unit)
        unit.filled.clear()
        unit.reduced = True

    def _agree_on_used(self) -> set[int]:
        """Parameters that got a gradient on any rank; on all ranks unused ones keep grad None, as under DDP."""
        if self.comm.size == 1:
            return set(self.used)
        mine = torch.zeros(len(self.trainable), dtype=torch.int32)
        mine[list(self.used)] = 1
        self._used_flags.copy_(mine)
        self.comm.maximum(self._used_flags)
        return set(self._used_flags.nonzero().flatten().tolist())

    def label_units(self) -> None:
        """Names the units' tensors for whoever measures."""
        for unit in self.units:
            labels.label(unit.full_parameters, labels.PARAMETERS, unit.name)
            labels.label(unit.parameter_shard, labels.PARAMETERS, unit.name)
            labels.label(unit.gradient_shard, labels.GRADIENTS, unit.name)
