"""Before and after an engine's masters are written from elsewhere: pending updates stop, parameters follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..strategy import Strategy


def before_load(engine: Strategy, steps: int = 0) -> None:
    """Masters are about to be written: no update is at them, and none is still going up. `steps` were taken so far."""
    engine.update.restart(steps)
    engine.places.wait()


def after_load(engine: Strategy) -> None:
    """The segments hold values from elsewhere: so do the parameter shards, and then the parameters of all ranks."""
    with torch.no_grad():
        for unit in engine.units:
            unit.round_masters()
        engine.places.settle()
        engine.after_update()
        engine.settle()
    for parameter in engine.trainable:  # a backward through an older forward must be an error, as in torch
        torch.autograd.graph.increment_version(parameter)
    engine.writes.note()
