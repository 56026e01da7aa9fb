"""The search for the largest fit of each candidate, along one number of a cell: its layers, its micro-batch, or the
number of GPUs.

axis       its values, from the emptiest to the fullest device, and a coordinate in which the load is roughly linear
bracket    the last value that fits and the first that does not; the search ends when they are neighbors
bound      theory's states: no simulation has less memory at its peak, so a cell whose states exceed a limit is not
           simulated. Strategies for which theory has no schedule have no bound. Theory replays gloo's exchange; on a
           GPU the buffers in flight differ a little, so states must exceed the limit by SURE
row        a search is a generator: it yields a cell and is sent its simulation, or the error message if it failed.
           So one loop runs the searches of all candidates in parallel

Bytes are linear in layers, in micro-batch and in 1/N, up to buckets and padding, so the line through the last two
loads meets 1 close to the answer; the answer's two neighbors are always simulated.

ZeRO's own family of GPTs is an axis, too: shapes ordered by their parameters. The hidden sizes are the paper's (arXiv
1910.02054v3, appendix, tables 4 to 8), each with up to the most layers that it has there; the last is that of its
trillion-parameter model (ZeRO-Infinity, arXiv 2104.07857, table 1).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ...config.cell import Cell
from ...predict.estimate import estimate
from ...timing.costs import GpuCosts
from .candidates import Candidate
from .memory import Capacity, Execute, Simulated, simulate

MOST_GUESSES = 6
"""Guesses by linear interpolation; after these the bracket is halved."""

DEEPEST, WIDEST_BATCH, WIDEST_TIMED = 512, 65536, 64
"""Ends of the axes: a cell of 512 blocks takes minutes to simulate. WIDEST_TIMED: of goal fastest."""

PILOT = 4
"""The second micro-batch that goal fastest simulates, after 1: the line through both gives the next."""


# -- axes ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanAxis:
    """`values`: from the emptiest to the fullest device. `changed`: the cell with a value. `coordinate`: of a value,
    increasing along them. `in_states`: states change along it. `convex`: so is the load, and a line through two values
    that fit is below it beyond them: a value that the line puts beyond the device is not simulated.
    """

    values: Sequence[int]
    first: tuple[int, ...]
    """Places in `values` of the first probes, in order."""
    changed: Callable[[Cell, int], Cell]
    coordinate: Callable[[int], float] = float
    in_states: bool = False
    convex: bool = False

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


def layers_axis(_: Cell) -> PlanAxis:
    """Returns the axis of layers, which starts with models that are simulated quickly."""
    return PlanAxis(range(1, DEEPEST + 1), (1, 3), lambda cell, layers: with_model(cell, layers=layers), in_states=True)


def micro_batch_axis(_: Cell) -> PlanAxis:
    """Returns the axis of samples per rank."""
    return PlanAxis(range(1, WIDEST_BATCH + 1), (0, 1), with_micro_batch)


def timed_axis(cell: Cell, batch: int | None = None) -> PlanAxis:
    """Returns the micro-batches of goal fastest: powers of two or, with a given `batch` over all GPUs, divisors of a
    rank's part of it, each with as many micro-batches as that takes.
    """
    ranks = cell.config.data_ranks
    if batch is None:
        sizes = tuple(2**power for power in range(WIDEST_TIMED.bit_length()))
        return PlanAxis(sizes, (0, bisect_right(sizes, PILOT) - 1), with_micro_batch, convex=True)
    sizes = tuple(size for size in range(1, WIDEST_TIMED + 1) if batch // ranks % size == 0)

    def changed(cell: Cell, size: int) -> Cell:
        return cell.changed(micro_batch=size, accumulation=batch // (size * ranks), batch=batch)

    return PlanAxis(sizes, (0, bisect_right(sizes, PILOT) - 1), changed, convex=True)


def gpus_axis(cell: Cell) -> PlanAxis:
    """Returns the axis of GPUs, each with the same micro-batch, from the cell's own down to 1."""

    def with_gpus(cell: Cell, ranks: int) -> Cell:
        config = cell.config
        batch = config.micro_batch * config.accumulation * ranks // config.tensor_parallel
        return cell.changed(world_size=ranks, batch=batch)

    return PlanAxis(range(cell.config.world_size, 0, -1), (0,), with_gpus, lambda ranks: 1.0 / ranks, in_states=True)


def fixed_axis(_: Cell) -> PlanAxis:
    """Returns an axis of one value, for a cell that is taken unchanged."""
    return PlanAxis((0,), (0,), lambda cell, _: cell)


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


SURE = 1.02
"""A cell is not simulated if theory's states exceed the limit by this factor."""

INTERRUPTED = "the plan was interrupted"


@dataclass(frozen=True)
class PlanRow:
    """Findings for one candidate. `best`: the furthest simulated cell that fits; None if none fits.

    `beyond`: the next value's cell, which does not fit, or the least that was tried. `problem`: why it was not
    simulated. `bound_bytes`: theory's states, if these alone are too large. `at_end`: the axis has no further value.
    """

    candidate: Candidate
    best: Simulated | None = None
    beyond: Simulated | None = None
    problem: str = ""
    bound_bytes: int | None = None
    at_end: bool = False
    probes: tuple[Simulated, ...] = field(default=(), repr=False)

    @property
    def fit(self) -> Simulated:
        """The best cell of a row that fits."""
        assert self.best is not None
        return self.best


class NotSimulatedError(Exception):
    """A cell could not be simulated; the message says why."""


Answer = TypeVar("Answer")
Search = Generator[Cell, Simulated | str, Answer]
"""Yields cells, and is sent their simulations or why there is none."""


def search_row(
    candidate: Candidate, cell: Cell, axis: PlanAxis, capacity: Capacity, sure: float = SURE
) -> Search[PlanRow]:
    """Searches for the furthest value of the axis that fits. `sure`: factor by which states must exceed a limit."""
    if cell.problems:
        return PlanRow(candidate, problem=cell.problems[0])
    probes: dict[int, Simulated] = {}
    states = states_of(cell)

    def load_at(place: int) -> Search[float]:
        nonlocal states
        changed = axis.changed(cell, axis.values[place])
        states = states_of(changed) if axis.in_states else states
        if (bound := capacity.load(states) / sure) > 1:
            return bound
        simulated = yield changed
        if isinstance(simulated, str):
            raise NotSimulatedError(simulated)
        probes[place] = simulated
        return capacity.load(simulated.bytes_in)

    try:
        last = yield from walk(axis, load_at)
    except NotSimulatedError as error:
        return PlanRow(candidate, problem=str(error), probes=tuple(probes.values()))
    if not probes:  # the emptiest value, which was asked for last, has too large states
        tier = "device" if states["device"] > capacity.usable_bytes else "host or disk"
        words = f"states alone are {capacity.load(states):.2f} times the usable memory ({tier})"
        return PlanRow(candidate, problem=words, bound_bytes=states["device"])
    best = None if last is None else probes[last]
    beyond = min((place for place in probes if last is None or place > last), default=None)
    return PlanRow(
        candidate, best, None if beyond is None else probes[beyond], at_end=last == len(axis.values) - 1,
        probes=tuple(probes.values()),
    )  # fmt: skip


def states_of(cell: Cell) -> dict[str, int]:
    """Returns tier -> bytes of the states; empty if theory has no prediction, or the model cannot be built for it."""
    try:
        found = estimate(cell.config)
    except Exception:  # a user's builder may do what a model without memory cannot; its simulation reports the error
        return {}
    if found.states_bytes is None:
        return {}
    return {"device": found.states_bytes, "host": found.host_bytes or 0, "nvme": found.file_bytes or 0}


def walk(axis: PlanAxis, load_at: Callable[[int], Search[float]]) -> Search[int | None]:
    """Returns the last place of the axis that fits, None if the first does not."""
    loads: dict[int, float] = {}
    low, high, first = -1, len(axis.values), iter(axis.first)
    while high - low > 1 and not (axis.convex and _is_last(axis, loads)):
        place = next((place for place in first if low < place < high), None)
        if place is None:
            place = _guess(axis, loads, low, high)
        loads[place] = yield from load_at(place)
        low, high = (place, high) if loads[place] <= 1 else (low, place)
    return None if low < 0 else low


def _guess(axis: PlanAxis, loads: Mapping[int, float], low: int, high: int) -> int:
    """Returns a place between low and high, where the line through the two nearest probes meets a load of 1."""
    middle = (low + high) // 2 if high < len(axis.values) else min(2 * low + 1, high - 1)
    if low < 0 or len(loads) < 2 or len(loads) - len(axis.first) >= MOST_GUESSES:
        return middle
    near, far = sorted(loads, key=lambda place: abs(loads[place] - 1))[:2]
    slope = (loads[near] - loads[far]) / (axis.at(near) - axis.at(far))
    if slope <= 0:
        return middle
    place = bisect_right(axis.values, axis.at(near) + (1 - loads[near]) / slope, key=axis.coordinate) - 1
    return min(max(place, low + 1), high - 1)


def _is_last(axis: PlanAxis, loads: Mapping[int, float]) -> bool:
    """Returns True if the line through the last two values that fit puts the next value beyond the device."""
    fitting = sorted(place for place, load in loads.items() if load <= 1)
    if len(fitting) < 2 or fitting[-1] + 1 == len(axis.values):
        return False
    *_, before, last = fitting
    slope = (loads[last] - loads[before]) / (axis.at(last) - axis.at(before))
    return loads[last] + slope * (axis.at(last + 1) - axis.at(last)) > 1


# -- a plan: all searches, in parallel -------------------------------------------------------------


@dataclass
class Plan:
    """A goal by name, and the rows that are found for it; rows of searches that have not ended say INTERRUPTED.

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
        self.rows |= {candidate: PlanRow(candidate, problem=INTERRUPTED) for candidate in cells}
        wanted: dict[Candidate, tuple[Search[PlanRow], Cell]] = {}
        running: list[tuple[Candidate, tuple[Search[PlanRow], Cell]]] = []

        def advance(candidate: Candidate, search: Search[PlanRow], resume: Callable[[], Cell]) -> None:
            try:
                wanted[candidate] = search, resume()
            except StopIteration as stop:
                self.rows[candidate] = stop.value
                self.tell(self, stop.value)

        def done(place: int, answer: Simulated | str) -> None:
            candidate, (search, _) = running[place]
            advance(candidate, search, partial(search.send, answer))

        for candidate, cell in cells.items():
            search = search_row(candidate, cell, axis_of(cell), self.capacity, sure)
            advance(candidate, search, partial(next, search))
        while wanted:
            running[:] = wanted.items()
            wanted.clear()
            self.simulate([cell for _, (_, cell) in running], done)
        pruned = {row.bound_bytes: row.candidate for row in self.rows.values() if row.bound_bytes is not None}
        if pruned and not any(row.probes for row in self.rows.values()):
            least = pruned[min(pruned)]
            self.search({least: cells[least]}, axis_of, math.inf)

    def simulate(
        self, cells: Sequence[Cell], done: Callable[[int, Simulated | str], None] = lambda *_: None, whole: bool = False
    ) -> list[Simulated | str]:
        """Simulates cells, all in one call; passes each to `done` with its place, or why it could not be simulated.
        `whole`: with all blocks though their steps are predicted.
        """
        return simulate(cells, done, self.execute, None if whole else self.costs)
