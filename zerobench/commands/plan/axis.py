"""Axes of the search: one number of a cell: its layers, its micro-batch, the number of GPUs.

axis        its values, in the order in which they fill the device, and a coordinate in which the load is about a line
bracket     the last value that fits and the first that does not; the search ends when they are neighbors
probe       a value whose load is known, since a cell with it was executed

Bytes are lines in layers and micro-batch and in 1/N, up to buckets and padding, so the line through the last two
probes meets 1 close to the answer; the two neighbors of the answer are executed, whatever the line says.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

from ...config.cell import Cell
from ...config.schema import Gpt

MOST_GUESSES = 6
"""Guesses by a line; after these the bracket is halved."""

DEEPEST, WIDEST_BATCH = 512, 65536
"""Ends of the axes: a cell of 512 blocks takes minutes to execute."""


@dataclass(frozen=True)
class Axis:
    """`values`: from the emptiest to the fullest device. `coordinate`: of a value, rising along them."""

    name: str
    values: Sequence[int]
    first: tuple[int, ...]
    """Places in `values` of the first probes, in order."""
    changed: Callable[[Cell, int], Cell]
    coordinate: Callable[[int], float] = float
    in_states: bool = False
    """True where the states change along it, so that theory's states are a better coordinate."""


def with_layers(cell: Cell, layers: int) -> Cell:
    """Returns the cell with so many blocks."""
    assert isinstance(cell.config.model, Gpt)
    return cell.changed(model=replace(cell.config.model, layers=layers))


def with_micro_batch(cell: Cell, sequences: int) -> Cell:
    """Returns the cell with so many sequences per rank and micro-batch."""
    config = cell.config
    return cell.changed(micro_batch=sequences, batch=sequences * config.accumulation * config.world_size)


def with_gpus(cell: Cell, ranks: int) -> Cell:
    """Returns the cell in a world of so many ranks, each with the same micro-batch."""
    config = cell.config
    return cell.changed(world_size=ranks, batch=config.micro_batch * config.accumulation * ranks)


def layers_axis() -> Axis:
    """Returns the axis of layers, which starts with models that execute in a moment."""
    return Axis("layers", range(1, DEEPEST + 1), (1, 3), with_layers, in_states=True)


def micro_batch_axis() -> Axis:
    """Returns the axis of sequences per rank."""
    return Axis("micro_batch", range(1, WIDEST_BATCH + 1), (0, 1), with_micro_batch)


def gpus_axis(most: int) -> Axis:
    """Returns the axis of GPUs, from `most` down to 1."""
    return Axis("gpus", range(most, 0, -1), (0,), with_gpus, lambda ranks: 1.0 / ranks, in_states=True)


def fixed_axis() -> Axis:
    """Returns the axis of a cell that is taken as it is."""
    return Axis("", (0,), (0,), lambda cell, _: cell)


def walk(axis: Axis, end: int) -> Generator[int, float, int | None]:
    """Yields places of the axis whose load is wanted; returns the last that fits, None where the first does not.

    `end`: the first place that is known not to fit, or the number of values.
    """
    loads: dict[int, float] = {}
    low, high = -1, min(end, len(axis.values))
    for place in axis.first:
        if low < place < high:
            loads[place] = yield place
            low, high = (place, high) if loads[place] <= 1 else (low, place)
    while high - low > 1:
        place = _guess(axis, loads, low, high)
        loads[place] = yield place
        low, high = (place, high) if loads[place] <= 1 else (low, place)
    return None if low < 0 else low


def _guess(axis: Axis, loads: dict[int, float], low: int, high: int) -> int:
    """Returns a place between low and high: where the line through the two nearest probes meets a load of 1."""
    if low < 0 or len(loads) - len(axis.first) >= MOST_GUESSES or len(loads) < 2:
        return (low + high) // 2 if high <= len(axis.values) - 1 or low < 0 else min(2 * low + 1, high - 1)
    one, other = sorted(loads, key=lambda place: abs(loads[place] - 1))[:2]
    # states that are all on the host or in files stand still on the device
    still = axis.coordinate(axis.values[one]) == axis.coordinate(axis.values[other])

    def at(place: int) -> float:
        return float(place) if still else axis.coordinate(axis.values[place])

    slope = (loads[one] - loads[other]) / (at(one) - at(other))
    if slope <= 0:
        return (low + high) // 2
    wanted = at(one) + (1 - loads[one]) / slope
    return min(max(bisect_right(range(len(axis.values)), wanted, key=at) - 1, low + 1), high - 1)
