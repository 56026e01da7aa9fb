"""Control traffic of a step, payload bytes on each rank: all that is neither parameters nor gradients.

    flags      4 bytes per trained parameter: which had a gradient on any rank                   our stages
               the same, per reduction: which were used                                          DDP, if asked for
    norm       8 bytes, fp64, where a step takes the gradients' norm (clipping, overflow)        our stages
    buffers    the module's, broadcast from rank 0 before a forward that is reduced              all

Under DDP every rank has whole gradients and takes their norm alone.
"""

from __future__ import annotations

from .shapes import Schedule
from .strategy import StrategyShape

FLAG_BYTES, NORM_BYTES = 4, 8


def predict_control(strategy: StrategyShape, schedule: Schedule, world_size: int, norms: int, buffer_bytes: int) -> int:
    """Returns the control traffic of DDP or of our stages. `norms`: how often a step takes the gradients' norm."""
    if world_size == 1:
        return 0
    reductions, flags = strategy.reductions(schedule.micro_batches), flags_bytes(schedule)
    if not strategy.theory.optimizer:
        return reductions * (buffer_bytes + flags * strategy.find_unused_parameters)
    return reductions * buffer_bytes + flags + NORM_BYTES * norms


def flags_bytes(schedule: Schedule) -> int:
    """Bytes of a 32-bit flag per trained parameter."""
    return FLAG_BYTES * sum(shape.trainable for shape in schedule.shapes)
