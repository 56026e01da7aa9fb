"""A backward that the program starts itself, as plain torch does: loss.backward() or torch.autograd.backward().

    begin    a gradient comes to an output of the module's forward, or to a parameter, and parameters will get theirs
    finish   called by autograd at the end of the graph task, before loss.backward() returns
    abandon  the graph task was freed without that call: an exception has ended it

torch.autograd.grad gives no parameter a gradient, and begins nothing. `engine.backward` begins and ends by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from ..engine import ShardedEngine
from ..modules.wrapping import NO_TASK, graph_task
from ..parameters.absent import as_they_are

SCALED = (
    "call engine.backward(loss), not loss.backward(): the engine scales losses (loss_scaling=), and this one is not"
    " scaled"
)

SECOND_ORDER = (
    "loss.backward(create_graph=True): the engine's gradients have no graph; use torch.autograd.grad(create_graph=True)"
    " for a penalty, and then loss.backward()"
)

OTHERS = (
    "engine.backward of another engine came to this one's parameters: call loss.backward(), which trains both, or"
    " freeze this one's model by requires_grad_(False)"
)


class PlainBackward:
    """The present backward of this kind, if any.

    `_end`     autograd's call at its end, which lives as long as the graph task; None if none runs
    `_judged`  the last graph task that came to the engine's graph
    """

    called = 0
    """Running calls of `engine.backward`, of all engines."""

    def __init__(self, engine: ShardedEngine) -> None:
        self._engine = engine
        self._end: weakref.ref[Callable[[], None]] | None = None
        self._judged = NO_TASK

    @property
    def is_running(self) -> bool:
        """True from `begin` to the end, also an early one."""
        return self._end is not None

    def begin(self) -> None:
        """Begins a backward, if the running graph task gives parameters their gradients. Raises RuntimeError for one
        that the engine cannot follow.
        """
        task, self._judged = self._judged, graph_task()
        if task == self._judged or not will_accumulate(self._engine.trainable):
            return
        if self.called:
            raise RuntimeError(OTHERS)
        if self._engine.update.scaling.scaler.policy is not None:
            raise RuntimeError(SCALED)
        if torch.is_grad_enabled():
            raise RuntimeError(SECOND_ORDER)
        self._engine.begin_backward()
        end = partial(self._finish)
        self._end = weakref.ref(end, self._abandon)
        torch.autograd.Variable._execution_engine.queue_callback(end)  # keeps it alone (torch-private, tested)

    def _finish(self) -> None:
        self._end = None
        try:
            self._engine.finish_backward()
        except BaseException:
            self._engine.abandon_backward()
            raise

    def _abandon(self, end: Any) -> None:
        if end is self._end:
            self._end = None
            self._engine.abandon_backward()


def will_accumulate(parameters: Iterable[nn.Parameter]) -> bool:
    """Returns True if the running graph task adds to the `.grad` of any of `parameters`. (torch-private, tested.)"""
    with as_they_are():
        nodes = (get_gradient_edge(p).node for p in parameters if p.requires_grad)
        try:
            return any(torch._C._will_engine_execute_node(node) for node in nodes)
        except RuntimeError:  # torch.autograd.grad returns the gradient of one of them
            return False
        except AttributeError:  # inside of a transform of torch.func, which gives parameters no gradient
            return False
