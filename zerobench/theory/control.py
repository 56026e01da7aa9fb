"""Control traffic of a step, payload bytes on each rank: what is neither parameters nor gradients.

    flags      4 bytes a trained parameter: which had a gradient on any rank                     our stages
    norm       8 bytes, fp64, where a step takes the gradients' norm (clipping, overflow)        our stages
    buffers    the module's, which become rank 0's before a forward that is reduced              all

Under DDP every rank has whole gradients, and their norm travels nowhere.
"""

from __future__ import annotations

from typing import Any

from .shapes import Schedule

FLAG_BYTES, NORM_BYTES = 4, 8


def predict_control(
    strategy: dict[str, Any], schedule: Schedule, world_size: int, norms: int, buffer_bytes: int
) -> int:
    """Of DDP and our stages. `norms`: how often a step takes the gradients' norm; `strategy`: a resolved section."""
    if world_size == 1:
        return 0
    synchronized = schedule.micro_batches if strategy["accumulate"] == "every" else 1
    buffers = synchronized * buffer_bytes
    if strategy["name"] == "ddp":
        return buffers
    return buffers + FLAG_BYTES * sum(shape.trainable for shape in schedule.shapes) + NORM_BYTES * norms
