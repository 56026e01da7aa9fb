"""Theory's states as a bound: no execution holds less at its peak than its states alone, so what they exceed is not
executed. Strategies that theory has no schedule for have no bound. Theory replays gloo's exchange; on a GPU buffers in
flight differ a little from that, so what is pruned has to exceed the limit by SURE.
"""

from __future__ import annotations

from dataclasses import replace

from ...config.cell import Cell
from ...predict.estimate import Estimate, estimate
from .axis import Axis, walk
from .capacity import Capacity

SURE = 1.02
"""Times the limit that theory's states must be, for a cell not to be executed."""

_ESTIMATES: dict[str, Estimate | None] = {}
"""Identity -> the prediction, for a search comes back to a cell."""


def states_of(cell: Cell) -> Estimate | None:
    """Returns theory's prediction for a cell, None where the model cannot be built for it."""
    if cell.cell_id not in _ESTIMATES:
        try:
            _ESTIMATES[cell.cell_id] = estimate(cell.config)
        except Exception:  # a user's builder may do what a model without memory cannot; its execution will tell
            _ESTIMATES[cell.cell_id] = None
    return _ESTIMATES[cell.cell_id]


def least_load(cell: Cell, capacity: Capacity) -> float:
    """Returns a load that the cell's execution cannot be below; 0 where theory says nothing."""
    found = states_of(cell)
    if found is None or found.states_bytes is None:
        return 0.0
    tiers = {"device": found.states_bytes, "host": found.host_bytes or 0, "nvme": found.file_bytes or 0}
    return max(held / capacity.limit_of(tier) for tier, held in tiers.items())


def by_states(cell: Cell, axis: Axis, capacity: Capacity) -> Axis:
    """Returns the axis with theory's states as its coordinate, in which the load is a line of slope 1 but for
    activations; the axis itself where the states do not change along it, or theory says nothing.
    """
    if not axis.in_states or least_load(axis.changed(cell, axis.values[0]), capacity) == 0:
        return axis
    return replace(axis, coordinate=lambda value: least_load(axis.changed(cell, value), capacity))


def first_too_large(cell: Cell, axis: Axis, capacity: Capacity) -> int:
    """Returns the first place of the axis whose states alone do not fit; the number of values where all do."""
    search, load = walk(axis, len(axis.values)), None
    try:
        while True:
            place = search.send(load) if load is not None else next(search)
            load = least_load(axis.changed(cell, axis.values[place]), capacity) / SURE
    except StopIteration as stop:
        return 0 if stop.value is None else stop.value + 1
