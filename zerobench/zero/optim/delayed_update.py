"""Delayed parameter update (ZeRO-Offload, arXiv 2101.06840, section 5.2): the host updates while the device computes.

    step i       the update by the gradients of step i - 1 is waited for, its parameters are copied up and gathered;
                 the gradients of step i, which are on the host, become *pending*
    forward      the update by the pending gradients starts, in a thread, on the masters
    backward     gradients arrive in host memory next to the pending ones: 2ψ/N bytes more

So a forward's parameters are one update older than without delay. The first `delayed_after` steps are not delayed,
because staleness harms early training. Learning rate and other options are those of the step that produced the
gradients.

Between a step and the next forward the update has not started: a checkpoint has masters, states and pending gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import optim
from torch.utils._pytree import tree_map_only

from .. import labels
from ..offload.cpu import HostPlacement
from ..precision import Share
from .segments import OptimizerSegment
from .step_by_tiles import Facts, facts_of, follow_facts, optimizer_over, step_without_update, update_silently
from .update import Update

Thread = labels.EngineThread
"""The class of the thread in which an update runs during the next step's forward."""


class PendingShare(Share):
    """A segment with the gradient for its next update, in host memory."""

    def __init__(self, segment: OptimizerSegment, gradient: torch.Tensor | None) -> None:
        self.tensor, self.tier, self.unit_name = segment.tensor, segment.tier, segment.unit_name
        self.segment, self._gradient = segment, gradient

    def gradient(self) -> torch.Tensor | None:
        return self._gradient


@dataclass
class Pending:
    """An update that is still to be made. `optimizer`: one with the options of its step; `before`: its facts then."""

    tiles: Sequence[Sequence[PendingShare]]
    coefficient: torch.Tensor | float | None
    optimizer: optim.Optimizer
    before: Facts
    thread: threading.Thread | None = None
    error: BaseException | None = None

    def run(self, wait: Callable[[], None]) -> None:
        """Updates the masters after `wait`; an error is kept, and raised when the update is waited for."""
        try:
            with torch.no_grad():
                wait()
                update_silently(self.optimizer, self.tiles, self.coefficient)
        except BaseException as error:
            self.error = error


class DelayedUpdate(Update):
    """Updates in `step` for the first `delayed_after` steps, and one step late from then on.

    `pending`   the update that is still to be made; None if there is none
    """

    def __init__(self, delayed_after: int, *given: Any) -> None:
        super().__init__(*given)
        self._delayed_after = delayed_after
        self._steps = 0
        self.pending: Pending | None = None

    def run(self) -> bool:
        """Makes this step's update; if delayed, makes the previous step's, and postpones the present one."""
        self._steps += 1
        if self._steps <= self._delayed_after:
            return super().run()
        self.prepare()
        # 1 the masters become those of the step before, which checkpoints and hooks of this step will see
        completed = self.complete()
        # 2 the step keeps its gradients instead of updating, so that hooks and schedulers still run in their own step
        with self.running():
            step_without_update(self.optimizer, self._postpone)
        # 3 the parameters follow
        if completed:
            self._placement.round_masters()
        return completed

    def launch(self) -> None:
        pending = self.pending
        if pending is not None and pending.thread is None:
            pending.thread = Thread(target=pending.run, args=(self._placement.wait,), name="delayed update")
            self.is_running = True
            pending.thread.start()

    def complete(self) -> bool:
        """Makes or awaits the pending update, without updating parameters. Returns True if one was pending."""
        pending, self.pending = self.pending, None
        if pending is None:
            return False
        if pending.thread is None:
            pending.run(self._placement.wait)
        else:
            self._join(pending.thread)
        if pending.error is not None:
            raise pending.error
        follow_facts(self.optimizer, pending.before, facts_of(pending.optimizer))
        return True

    def forget(self) -> None:
        """Forgets the gradients, except those that an update in the background is using."""
        if self.is_at_work:
            self.forget_use()
        else:
            super().forget()

    @property
    def is_at_work(self) -> bool:  # type: ignore[override]
        """True while the pending update is running."""
        return self.pending is not None and self.pending.thread is not None

    def _join(self, thread: threading.Thread) -> None:
        thread.join()
        self.is_running = False

    def _postpone(self) -> None:
        assert isinstance(self._placement, HostPlacement)
        tiles = [[PendingShare(s, s.gradient()) for s in tile] for tile in self.tiles]
        self._placement.put_gradients_aside()
        coefficient = self.scaling.coefficient
        if isinstance(coefficient, torch.Tensor):  # the host has just waited for gradients that came after it
            coefficient = float(coefficient)
        options = [
            {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in _options(group).items()}
            for group in self.optimizer.param_groups
        ]
        self.pending = self._new_pending(tiles, coefficient, options)

    def _new_pending(
        self, tiles: list[list[PendingShare]], coefficient: float | None, options: list[dict[str, Any]]
    ) -> Pending:
        """Returns a pending update with these options and the optimizer's states; later changes do not affect it."""
        groups = [group | saved for group, saved in zip(self.optimizer.param_groups, options, strict=True)]
        snapshot = optimizer_over(self.optimizer, groups)
        return Pending(tiles, coefficient, snapshot, facts_of(snapshot))

    # -- writes and checkpoints ----------------------------------------------------------------------------------

    def check_saveable(self) -> None:
        if self.is_at_work:
            raise ValueError("save: a delayed update is running since the last forward; save between step and forward")

    def check_writable(self, name: str) -> None:
        if self.is_at_work:
            raise RuntimeError(
                f"{name}: it was written to while a delayed update runs, which would undo that; write between step and"
                " forward"
            )

    def pending_gradients(self) -> list[tuple[OptimizerSegment, torch.Tensor]]:
        shares = [share for tile in self.pending.tiles for share in tile] if self.pending else []
        return [(share.segment, g) for share in shares if (g := share.gradient()) is not None]

    def describe_pending(self) -> dict[str, Any]:
        if self.pending is None:
            return {"steps": self._steps}
        coefficient = None if self.pending.coefficient is None else float(self.pending.coefficient)
        added = self.optimizer.param_groups[len(self.pending.optimizer.param_groups) :]  # since that step
        options = [
            {key: tree_map_only(torch.Tensor, torch.Tensor.item, value) for key, value in _options(group).items()}
            for group in [*self.pending.optimizer.param_groups, *added]
        ]
        return {"steps": self._steps, "pending": {"coefficient": coefficient, "options": options}}

    def restart(self, steps: int) -> None:
        pending, self.pending = self.pending, None
        if pending is not None and pending.thread is not None:
            self._join(pending.thread)
        self._steps = steps

    def restore_pending(self, gradients: dict[OptimizerSegment, torch.Tensor], described: dict[str, Any]) -> None:
        self._steps = max(self._steps, self._delayed_after)  # a step that was delayed has been taken
        tiles = [[PendingShare(s, gradients.get(s)) for s in tile] for tile in self.tiles]
        options = [
            {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
            for group in described["options"]
        ]
        self.pending = self._new_pending(tiles, described["coefficient"], options)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
