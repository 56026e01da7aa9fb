"""Delayed parameter update (ZeRO-Offload, arXiv 2101.06840, section 5.2): the host updates while the device computes.

    step i       the update by the gradients of step i - 1 is waited for, its parameters go up and are gathered;
                 the gradients of step i, which are on the host, become *pending*
    forward      the update by the pending gradients begins, in a thread, over the masters
    backward     gradients arrive in host memory beside the pending ones: 2ψ/N bytes more

So a forward's parameters are one update older than without delay. The first `delayed_after` steps are not delayed, for
early training takes staleness badly. Learning rate and other options are those of the step that gave the gradients.

Between a step and the next forward the update has not begun: a checkpoint holds masters, states and pending gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import optim

from .. import labels
from ..offload.cpu import HostGradients
from ..precision import Share
from . import optimizer_state as facts
from .segments import OptimizerSegment
from .tiles import stand_in, step_without_update, update_silently
from .update import Update


class PendingShare(Share):
    """A segment with the gradient that its next update is to take, in host memory."""

    def __init__(self, segment: OptimizerSegment, gradient: torch.Tensor | None) -> None:
        self.tensor, self.tier = segment.tensor, segment.tier
        self.segment = segment
        self._gradient = gradient

    def gradient(self) -> torch.Tensor | None:
        return self._gradient


@dataclass
class Pending:
    """An update that is still to be made. `optimizer`: one that has the options of then; `before`: its facts then."""

    tiles: Sequence[Sequence[PendingShare]]
    coefficient: torch.Tensor | float | None
    optimizer: optim.Optimizer
    before: facts.Facts
    thread: threading.Thread | None = None
    error: BaseException | None = None

    def run(self, begin: Callable[[], None]) -> None:
        """Updates the masters after `begin`; what goes wrong is kept for whoever waits."""
        try:
            with torch.no_grad():
                begin()
                update_silently(self.optimizer, self.tiles, self.coefficient)
        except BaseException as error:
            self.error = error

    @property
    def options(self) -> list[dict[str, Any]]:
        """Of each parameter group, as they were."""
        return [_options(group) for group in self.optimizer.param_groups]


class DelayedUpdate(Update):
    """See above. `pending`: None where nothing is still to be made."""

    pending: Pending | None = None
    delayed_after = 0
    _steps = 0

    def run(self) -> bool:
        """Finishes the update before, and makes the present gradients the pending ones."""
        self._steps += 1
        if self._steps <= self.delayed_after:
            return super().run()
        self.agree()
        self._check_held()
        self._check_groups()
        finished = self.finish()
        self._running = self._stepped = True
        try:
            step_without_update(self.optimizer, self._put_aside)
        finally:
            self._running = False
        return finished

    def launch(self) -> None:
        """A forward begins, and with it the pending update."""
        pending = self.pending
        if pending is not None and pending.thread is None:
            pending.thread = labels.EngineThread(target=pending.run, args=(self._begin,), name="delayed update")
            self._running = True
            pending.thread.start()

    def finish(self) -> bool:
        """No update is pending: masters and parameters are as if there were no delay. Returns whether one was."""
        pending, self.pending = self.pending, None
        if pending is None:
            return False
        if pending.thread is None:
            pending.run(self._begin)
        else:
            pending.thread.join()
            self._running = False
        if pending.error is not None:
            raise pending.error
        facts.follow(self.optimizer, pending.before, facts.read(pending.optimizer))
        for unit in self.units:
            unit.round_masters()
        return True

    def forget(self) -> None:
        """The gradients are gone; those that an update in the background is at are not these."""
        if self.pending is None or self.pending.thread is None:
            super().forget()
            return
        self._forget_use()

    def _begin(self) -> None:
        """What the last update sent up is there: the masters may change."""
        for places in {unit.places for unit in self.units}:
            places.wait()

    def _put_aside(self) -> None:
        for unit in self.units:
            assert isinstance(unit.gradients.sink, HostGradients)
            unit.gradients.sink.settle()
        tiles = [[PendingShare(s, s.gradient()) for s in tile] for tile in self.tiles]
        for unit in self.units:
            assert isinstance(unit.gradients.sink, HostGradients)
            unit.gradients.sink.put_aside()
        coefficient = self.scaling.coefficient
        if isinstance(coefficient, torch.Tensor):  # the host has just waited for gradients that came after it
            coefficient = float(coefficient)
        self.pending = self._new_pending(tiles, coefficient, [_options(group) for group in self.optimizer.param_groups])

    def _new_pending(
        self, tiles: list[list[PendingShare]], coefficient: float | None, options: list[dict[str, Any]]
    ) -> Pending:
        """With the options of then, on the optimizer's states: what a scheduler does from now on is for the next."""
        groups = [{**group, **one} for group, one in zip(self.optimizer.param_groups, options, strict=True)]
        then = stand_in(self.optimizer, groups)
        return Pending(tiles, coefficient, then, facts.read(then))

    # -- in checkpoints ------------------------------------------------------------------------------------------

    def check_saveable(self) -> None:
        """Raises ValueError while the pending update is being made."""
        if self.pending is not None and self.pending.thread is not None:
            raise ValueError("save: a delayed update is running since the last forward; save between step and forward")

    def check_writable(self, name: str) -> None:
        """Raises RuntimeError while the pending update is being made."""
        if self.pending is not None and self.pending.thread is not None:
            raise RuntimeError(
                f"{name}: it was written to while a delayed update runs, which would undo that; write between step and"
                " forward"
            )

    def pending_gradients(self) -> list[tuple[OptimizerSegment, torch.Tensor]]:
        """Of each segment that has one."""
        shares = [share for tile in self.pending.tiles for share in tile] if self.pending else []
        return [(share.segment, g) for share in shares if (g := share.gradient()) is not None]

    def describe_pending(self) -> dict[str, Any]:
        """What a checkpoint must know beside the gradients, as JSON: steps so far; and of the pending update."""
        if self.pending is None:
            return {"steps": self._steps}
        coefficient = None if self.pending.coefficient is None else float(self.pending.coefficient)
        pending = {"coefficient": coefficient, "options": [_plain(one) for one in self.pending.options]}
        return {"steps": self._steps, "pending": pending}

    def restart(self, steps: int) -> None:
        """What is pending here belongs to weights that go."""
        pending, self.pending = self.pending, None
        if pending is not None and pending.thread is not None:
            pending.thread.join()
            self._running = False
        self._steps = steps

    def restore_pending(self, gradients: dict[OptimizerSegment, torch.Tensor], described: dict[str, Any]) -> None:
        """An update of these gradients is pending; a step that was delayed has been taken."""
        self._steps = max(self._steps, self.delayed_after)
        tiles = [[PendingShare(s, gradients.get(s)) for s in tile] for tile in self.tiles]
        options = [_tuples(one) for one in described["options"]]
        self.pending = self._new_pending(tiles, described["coefficient"], options)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in kept.items()}


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in options.items()}


def _tuples(options: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
