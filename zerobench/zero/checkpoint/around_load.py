"""Steps before and after an engine's masters are overwritten: pending updates are dropped, parameters refreshed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..strategy import Strategy


def before_load(engine: Strategy, steps: int = 0) -> None:
    """Drops pending updates and waits for transfers, before masters are overwritten. `steps`: taken so far."""
    engine.schedule.restart(steps)
    engine.placement.wait()


def put(place: torch.Tensor, values: torch.Tensor) -> None:
    """Copies `values` to `place`. A buffer that was made in inference mode can be written to only there."""
    with torch.inference_mode(place.is_inference()), torch.no_grad():
        place.copy_(values)


def after_load(engine: Strategy) -> None:
    """Refreshes the parameter shards, and from them the parameters of all ranks, after masters were overwritten."""
    with torch.no_grad():
        engine.placement.round_masters()
        engine.placement.settle()
        engine.after_update()
        engine.comm.forget()
        engine.settle()
    for parameter in engine.trainable:  # makes a backward through an earlier forward raise, as in torch
        torch.autograd.graph.increment_version(parameter)
    engine.writes.note_values()
    engine.writes.note()
