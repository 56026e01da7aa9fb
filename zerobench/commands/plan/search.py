"""The search for the largest fit of each candidate, along one number of a cell: its layers, its micro-batch, or the
number of GPUs.

axis       its values, from the emptiest to the fullest device, and a coordinate in which the load is roughly linear
bracket    the last value that fits and the first that does not; the search ends when they are neighbors
bound      theory's states: no simulation has less memory at its peak, so a cell whose states exceed a limit is not
           simulated. Strategies for which theory has no schedule have no bound. Theory replays gloo's exchange; on a
           GPU the buffers in flight differ a little, so states must exceed the limit by SURE
row        the search of a candidate, which is over if no cell is due. One loop simulates the cells that are due in all
           rows, and each row names its next one as soon as its cell is done

Bytes are linear in layers, in micro-batch and in 1/N, up to buckets and padding, so the line through the last two
loads meets 1 close to the answer; the answer's two neighbors are always simulated.

ZeRO's own family of GPTs is an axis, too: shapes ordered by their parameters. The hidden sizes are the paper's (arXiv
1910.02054v3, appendix, tables 4 to 8), each with up to the most layers that it has there; the last is that of its
trillion-parameter model (ZeRO-Infinity, arXiv 2104.07857, table 1).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ...config.cell import Cell
from ...predict.estimate import estimate
from ...timing.costs import GpuCosts
from .candidates import Candidate
from .memory import Capacity, Execute, Simulated, simulate

MOST_GUESSES = 6
"""Guesses by linear interpolation; after these the bracket is halved."""

DEEPEST, WIDEST_BATCH, WIDEST_TIMED = 512, 65536, 64
"""Ends of the axes: a cell of 512 blocks takes minutes to simulate. WIDEST_TIMED: of goal fastest."""


# -- axes ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanAxis:
    """`values`: from the emptiest to the fullest device. `changed`: the cell with a value. `coordinate`: of a value,
    increasing along them. `in_states`: states change along it.
    """

    values: Sequence[int]
    first: tuple[int, ...]
    """Places in `values` of the first probes, in order."""
    changed: Callable[[Cell, int], Cell]
    coordinate: Callable[[int], float] = float
    in_states: bool = False

    def at(self, place: int) -> float:
        """Returns the coordinate of a place in `values`."""
        return self.coordinate(self.values[place])


def with_micro_batch(cell: Cell, samples: int) -> Cell:
    """Returns the cell with `samples` samples per rank and micro-batch."""
    config = cell.config
    return cell.changed(micro_batch=samples, batch=samples * config.accumulation * config.data_ranks)


def with_model(cell: Cell, **changes: Any) -> Cell:
    """Returns the cell with a changed model."""
    return cell.changed(model=replace(cell.config.model, **changes))


LAYERS = PlanAxis(range(1, DEEPEST + 1), (1, 3), lambda cell, layers: with_model(cell, layers=layers), in_states=True)
"""Layers, from models that are simulated quickly."""

MICRO_BATCHES = PlanAxis(range(1, WIDEST_BATCH + 1), (0, 1), with_micro_batch)

FIXED = PlanAxis((0,), (0,), lambda cell, _: cell)
"""One value: the cell is taken unchanged."""


def timed_axis(cell: Cell, batch: int | None = None) -> PlanAxis:
    """Returns the micro-batches of goal fastest: powers of two or, with a given `batch` over all GPUs, divisors of a
    rank's part of it, each with as many micro-batches as that takes.
    """
    ranks = cell.config.data_ranks
    if batch is None:
        sizes = tuple(2**power for power in range(WIDEST_TIMED.bit_length()))
        return PlanAxis(sizes, (0, 2), with_micro_batch)
    sizes = tuple(size for size in range(1, WIDEST_TIMED + 1) if batch // ranks % size == 0)

    def changed(cell: Cell, size: int) -> Cell:
        return cell.changed(micro_batch=size, accumulation=batch // (size * ranks), batch=batch)

    return PlanAxis(sizes, (0, 2), changed)


def gpus_axis(cell: Cell) -> PlanAxis:
    """Returns the axis of GPUs, each with the same micro-batch, from the cell's own down to 1."""

    def with_gpus(cell: Cell, ranks: int) -> Cell:
        config = cell.config
        batch = config.micro_batch * config.accumulation * ranks // config.tensor_parallel
        return cell.changed(world_size=ranks, batch=batch)

    return PlanAxis(range(cell.config.world_size, 0, -1), (0,), with_gpus, lambda ranks: 1.0 / ranks, in_states=True)


class GptSize(NamedTuple):
    """Blocks, their width, and heads."""

    layers: int
    hidden: int
    heads: int

    @property
    def numel(self) -> int:
        """Parameters of the blocks' matrices: 12 · layers · hidden²."""
        return 12 * self.layers * self.hidden**2


WIDTHS = (
    GptSize(54, 1920, 16), GptSize(64, 2304, 24), GptSize(72, 3072, 24), GptSize(62, 4096, 32), GptSize(132, 6144, 32),
    GptSize(212, 8192, 64), GptSize(128, 25600, 256),
)  # fmt: skip
"""Each width with the most layers that the papers use with it."""


def shapes() -> list[GptSize]:
    """Returns all shapes of the family by size: each width begins where the previous one ends."""
    found: list[GptSize] = []
    for deepest in WIDTHS:
        before = found[-1].numel if found else 0
        of_width = (deepest._replace(layers=layers) for layers in range(1, deepest.layers + 1))
        found += [shape for shape in of_width if shape.numel > before]
    return found


def family_axis(_: Cell) -> PlanAxis:
    """Returns the axis of the family: places in `shapes`; the load is roughly linear in the number of parameters."""
    family = shapes()

    def changed(cell: Cell, place: int) -> Cell:
        return with_model(cell, **family[place]._asdict())

    return PlanAxis(range(len(family)), (1, 3), changed, lambda place: float(family[place].numel), in_states=True)


# -- a row and its search --------------------------------------------------------------------------


INTERRUPTED = "the plan was interrupted"

SURE = 1.02
"""A cell is not simulated if theory's states exceed the limit by this factor."""


@dataclass
class PlanRow:
    """The search of a candidate for the furthest value of the axis that fits. `due`: the cell to simulate next, or the
    candidate's own until theory's bound is known.

    `problem`: why it was not simulated. `bound_bytes`: theory's states, if these alone are too large. `loads`,
    `probes`: by place in the axis; a place whose states are too large has their load, and no simulated cell.
    """

    candidate: Candidate
    cell: Cell
    axis: PlanAxis
    problem: str = ""
    bound_bytes: int | None = None
    due: Cell | None = None
    loads: dict[int, float] = field(default_factory=dict, repr=False)
    probes: dict[int, Simulated] = field(default_factory=dict, repr=False)

    @property
    def best(self) -> Simulated | None:
        """The furthest cell that fits, once the search is over; None if there is none."""
        return None if self.due or self.problem else self.probes.get(self.last)

    @property
    def fit(self) -> Simulated:
        """The furthest cell that fits, of a row that is known to fit."""
        return self.probes[self.last]

    @property
    def beyond(self) -> Simulated | None:
        """The first cell that was simulated and does not fit, once the search is over."""
        first = min((place for place in self.probes if self.loads[place] > 1), default=-1)
        return None if self.due or self.problem else self.probes.get(first)

    @property
    def reason(self) -> str:
        """Why the row was not simulated, or not to its end."""
        return INTERRUPTED if self.due else self.problem

    @property
    def last(self) -> int:
        """The last place that fits; -1 if none is known to."""
        return max((place for place, load in self.loads.items() if load <= 1), default=-1)

    @property
    def at_end(self) -> bool:
        """True if the axis has no further value."""
        return self.last == len(self.axis.values) - 1

    def advance(self, capacity: Capacity, sure: float) -> None:
        """Finds the cell that is due. `sure`: factor by which states must exceed a limit to be too large."""
        self.due, self.problem = None, self.problem or next(iter(self.cell.problems), "")
        while not self.problem and (place := next_place(self.axis, self.loads)) is not None:
            changed = self.axis.changed(self.cell, self.axis.values[place])
            bounded = sure < math.inf and (self.axis.in_states or not self.loads)
            states = states_of(changed) if bounded else {}
            load = capacity.load(states)
            if load <= sure:
                self.due = changed
                return
            self.loads[place] = load / sure
            if place == 0 and not self.probes:
                tier = "device" if states["device"] > capacity.usable_bytes else "host or disk"
                self.problem = f"states alone are {load:.2f} times the usable memory ({tier})"
                self.bound_bytes = states["device"]

    def take(self, answer: Simulated | str, capacity: Capacity) -> None:
        """Takes the simulation of the cell that was due, or why there is none."""
        place = next_place(self.axis, self.loads)
        assert place is not None
        if isinstance(answer, str):
            self.problem = answer
        else:
            self.probes[place], self.loads[place] = answer, capacity.load(answer.bytes_in)


def states_of(cell: Cell) -> dict[str, int]:
    """Returns tier -> bytes of the states; empty if theory has no prediction, or the model cannot be built for it."""
    try:
        found = estimate(cell.config)
    except Exception:  # a user's builder may do what a model without memory cannot; its simulation reports the error
        return {}
    if found.states_bytes is None:
        return {}
    return {"device": found.states_bytes, "host": found.host_bytes or 0, "nvme": found.file_bytes or 0}


def next_place(axis: PlanAxis, loads: Mapping[int, float]) -> int | None:
    """Returns the place of the axis whose load is needed next; None if the last that fits is known, or none fits. It is
    where the line through the two nearest probes meets a load of 1.
    """
    low = max((place for place, load in loads.items() if load <= 1), default=-1)
    high = min((place for place, load in loads.items() if load > 1), default=len(axis.values))
    if high - low <= 1:
        return None
    if first := [place for place in axis.first if low < place < high]:
        return first[0]
    middle = (low + high) // 2 if high < len(axis.values) else min(2 * low + 1, high - 1)
    if low < 0 or len(loads) < 2 or len(loads) - len(axis.first) >= MOST_GUESSES:
        return middle
    near, far = sorted(loads, key=lambda place: abs(loads[place] - 1))[:2]
    slope = (loads[near] - loads[far]) / (axis.at(near) - axis.at(far))
    if slope <= 0:
        return middle
    place = bisect_right(axis.values, axis.at(near) + (1 - loads[near]) / slope, key=axis.coordinate) - 1
    return min(max(place, low + 1), high - 1)


# -- a plan: all searches, in parallel -------------------------------------------------------------


@dataclass
class Plan:
    """A goal by name, and the rows that are found for it.

    `words`: overrides of all cells. `costs`: of the cluster of goal fastest. `tell` takes the plan and a row whose
    search has ended. `notes`: on rows that were left out; `turns`: sentences on what would change the answer.
    """

    goal: str
    capacity: Capacity
    execute: Execute
    costs: GpuCosts | None = None
    tell: Callable[[Plan, PlanRow], None] = lambda *_: None
    device: str = "cuda"
    words: Sequence[str] = ()
    rows: dict[Candidate, PlanRow] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def fitting(self) -> list[PlanRow]:
        """The rows that fit."""
        return [row for row in self.rows.values() if row.best is not None]

    @property
    def ranked(self) -> list[PlanRow]:
        """The rows that fit, the fastest first."""
        return sorted(self.fitting, key=lambda row: -row.fit.timed.rate())

    def search(self, cells: Mapping[Candidate, Cell], axis_of: Callable[[Cell], PlanAxis], sure: float = SURE) -> None:
        """Adds a row per candidate, in their order. If theory has pruned all rows, the one with the least states is
        simulated after all, so that the plan can name a device that would do.
        """
        rows = {candidate: PlanRow(candidate, cell, axis_of(cell), due=cell) for candidate, cell in cells.items()}
        self.rows |= rows
        running: list[PlanRow] = []

        def advance(row: PlanRow) -> None:
            row.advance(self.capacity, sure)
            if row.due is None:
                self.tell(self, row)

        def done(place: int, answer: Simulated | str) -> None:
            running[place].take(answer, self.capacity)
            advance(running[place])

        for row in rows.values():
            advance(row)
        while due := [row for row in rows.values() if row.due]:
            running[:] = due
            self.simulate([row.due for row in due if row.due], done)
        pruned = [row for row in self.rows.values() if row.bound_bytes is not None]
        if pruned and not any(row.probes for row in self.rows.values()):
            least = min(pruned, key=lambda row: row.bound_bytes or 0).candidate
            self.search({least: cells[least]}, axis_of, math.inf)

    def simulate(
        self, cells: Sequence[Cell], done: Callable[[int, Simulated | str], None] = lambda *_: None, whole: bool = False
    ) -> list[Simulated | str]:
        """Simulates cells, all in one call; passes each to `done` with its place, or why it could not be simulated.
        `whole`: with all blocks though their steps are predicted.
        """
        return simulate(cells, done, self.execute, None if whole else self.costs)
