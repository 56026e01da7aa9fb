"""What precedes a write to an engine's masters."""

from __future__ import annotations

import torch

from ..engine import ShardedEngine


def before_load(engine: ShardedEngine, steps: int = 0) -> None:
    """Drops pending updates and waits for transfers, before masters are overwritten. `steps`: taken so far."""
    engine.schedule.restart(steps)
    engine.placement.wait()


def put(place: torch.Tensor, values: torch.Tensor) -> None:
    """Copies `values` to `place`. A buffer that was made in inference mode can be written to only there."""
    with torch.inference_mode(place.is_inference()), torch.no_grad():
        place.copy_(values)
