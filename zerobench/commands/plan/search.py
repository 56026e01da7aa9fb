"""One row's search: which cells it wants executed, one after the other, and what it found.

A search is a generator: it yields a cell and is sent what the cell used, or the sentence that says why it did not run.
So one driver runs many of them side by side (driver.py), and tests run one without executing anything.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

from ...config.cell import Cell
from .axis import Axis, walk
from .bound import by_states, first_too_large, least_load, states_of
from .candidates import Candidate
from .capacity import Capacity, Used

Search = Generator[Cell, "Used | str", "Row"]


@dataclass(frozen=True)
class Probe:
    """An executed cell: its value on the axis, and what it used."""

    value: int
    cell: Cell
    used: Used


@dataclass(frozen=True)
class Row:
    """Findings for one candidate. `best`: the executed cell that fits and goes furthest; None where none fits.

    `beyond`: the next value's execution, which does not fit, or the least that was tried. `problem`: why it was not
    executed. `at_end`: the axis has no further value.
    """

    candidate: Candidate
    best: Probe | None = None
    beyond: Probe | None = None
    problem: str = ""
    bound_bytes: int | None = None
    at_end: bool = False
    probes: tuple[Probe, ...] = field(default=(), repr=False)


class NotExecutedError(Exception):
    """A cell could not be executed; the message says why."""


def search_row(candidate: Candidate, cell: Cell, axis: Axis, capacity: Capacity) -> Search:
    """Looks for the furthest value of the axis that fits. Yields cells, and is sent what they used."""
    if cell.problems:
        return Row(candidate, problem=cell.problems[0])
    end = first_too_large(cell, axis, capacity)
    if end == 0:
        return _only_states(candidate, axis.changed(cell, axis.values[0]), capacity)
    probes: dict[int, Probe] = {}
    places, load = walk(by_states(cell, axis, capacity), end), None
    try:
        while True:
            place = places.send(load) if load is not None else next(places)
            changed = axis.changed(cell, axis.values[place])
            used = yield changed
            if isinstance(used, str):
                raise NotExecutedError(used)
            probes[place] = Probe(axis.values[place], changed, used)
            load = capacity.load(used)
    except StopIteration as stop:
        found = stop.value
    except NotExecutedError as error:
        return Row(candidate, problem=str(error), probes=tuple(probes.values()))
    beyond = [place for place in sorted(probes) if found is None or place > found]
    return Row(
        candidate, best=None if found is None else probes[found], beyond=probes[beyond[0]] if beyond else None,
        at_end=found == len(axis.values) - 1, probes=tuple(probes.values()),
    )  # fmt: skip


def _only_states(candidate: Candidate, cell: Cell, capacity: Capacity) -> Row:
    """Returns the row of a candidate whose states alone are too large, which needs no execution."""
    found = states_of(cell)
    assert found is not None
    assert found.states_bytes is not None
    tier = "device" if found.states_bytes > capacity.usable_bytes else "host or disk"
    words = f"states alone are {least_load(cell, capacity):.2f} times what is usable ({tier})"
    return Row(candidate, problem=words, bound_bytes=found.states_bytes)
