"""The search for the largest fit of each candidate, along one number of a cell: its layers, its micro-batch, or the
number of GPUs.

capacity   bytes of a GPU, and of host memory and disk per GPU. Of the device a fraction is left for memory that torch's
           allocator does not count: CUDA's context, libraries, NCCL
load       the largest of the ratios held / usable over these tiers: 1 is full. On a GPU the bytes that its allocator
           reserves must fit, which are more than its peak of allocated bytes
axis       its values, from the emptiest to the fullest device, and a coordinate in which the load is roughly linear
bracket    the last value that fits and the first that does not; the search ends when they are neighbors. It is found
           with few blocks; then both values are simulated with all blocks, which gives a factor for the loads found
           with few, and the search continues if that moves the bracket. Under goal fastest the load of few blocks is
           that of their peak, a lower bound of the reserved bytes, so only the last value is simulated with all blocks
bound      the closed form of the states; for another library, that of the stage that partitions the same states. No
           simulated peak is lower, so a row is not simulated if the bound of its first cell exceeds the device's memory
chain      rows of a strategy with a fixed cell, the cheapest first. It ends with the first that fits: the others cost
           more and cannot be recommended; they are shown with their bounds
queue      one call simulates the cells of all rows: a row adds its next one as soon as its last is done

Bytes are linear in layers, in micro-batch and in 1/N, up to buckets and padding, so the line through the last two
loads meets 1 close to the answer.

ZeRO's own family of GPTs is an axis, too: shapes ordered by their parameters. The hidden sizes are the paper's (arXiv
1910.02054v3, appendix, tables 4 to 8), each with up to the most layers that it has there; the last is that of its
trillion-parameter model (ZeRO-Infinity, arXiv 2104.07857, table 1).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ...config.cell import Cell
from ...predict.build import facts_if_any
from ...predict.estimate import closed_form
from ...simulation.costs import GpuCosts
from ...simulation.execute import Execution
from ..simulated import SimulatedCell, Work, run_works
from .candidates import AXES, Candidate

MOST_GUESSES = 6
"""Guesses by linear interpolation; after these the bracket is halved."""

USUAL_PROBES = 3
"""Simulations with few blocks that a search of several values usually takes."""

DEEPEST, WIDEST_BATCH, WIDEST_TIMED = 512, 65536, 64
"""Ends of the axes: a cell of 512 blocks takes half a minute to simulate. WIDEST_TIMED: of goal fastest."""


RESERVE = 0.08
"""Fraction of the device that is kept from the allocator by default; the GPU suite leaves as much."""


@dataclass(frozen=True)
class Capacity:
    """Bytes for one GPU. `reserve`: fraction of the device that is left free."""

    device_bytes: int
    reserve: float = RESERVE
    host_bytes: int | None = None
    disk_bytes: int | None = None

    @property
    def usable_bytes(self) -> int:
        """Bytes that the device's allocator may take."""
        return int(self.device_bytes * (1 - self.reserve))

    def fullest(self, held: Mapping[str, int]) -> tuple[str, float]:
        """Returns the fullest tier of those with bytes `held`, and its load; above 1 they do not fit."""
        limits = {"device": self.usable_bytes, "host": self.host_bytes, "nvme": self.disk_bytes}
        loads = {tier: 0.0 if (limit := limits[tier]) is None else size / max(limit, 1) for tier, size in held.items()}
        return max(loads.items(), key=lambda item: item[1], default=("device", 0.0))

    def load(self, held: Mapping[str, int]) -> float:
        """Returns the load of the fullest tier."""
        return self.fullest(held)[1]


# -- axes ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanAxis:
    """`values`: ordered from the emptiest to the fullest device. `changed`: returns a cell with another value.
    `coordinate`: maps a value to a number that increases along the axis. `in_states`: the states change along the axis.
    """

    values: Sequence[int]
    first: tuple[int, ...]
    """Indices in `values` of the first probes, in order."""
    changed: Callable[[Cell, int], Cell]
    coordinate: Callable[[int], float] = float
    in_states: bool = False


def with_micro_batch(cell: Cell, samples: int) -> Cell:
    """Returns the cell with `samples` samples per rank and micro-batch."""
    config = cell.config
    return cell.changed(micro_batch=samples, batch=samples * config.accumulation * config.data_ranks)


def with_model(cell: Cell, **changes: Any) -> Cell:
    """Returns the cell with a changed model."""
    return cell.changed(model=replace(cell.config.model, **changes))


LAYERS = PlanAxis(range(1, DEEPEST + 1), (1, 3), lambda cell, layers: with_model(cell, layers=layers), in_states=True)
"""Layers, from models that are simulated quickly."""

MICRO_BATCHES = PlanAxis(range(1, WIDEST_BATCH + 1), (1,), with_micro_batch)

FIXED = PlanAxis((0,), (0,), lambda cell, _: cell)
"""One value: the cell is taken unchanged."""


def timed_axis(cell: Cell, batch: int | None = None) -> PlanAxis:
    """Returns the micro-batches of goal fastest: powers of two or, with a given `batch` over all GPUs, divisors of a
    rank's part of it, each with as many micro-batches as that takes.
    """
    if batch is None:
        return PlanAxis(tuple(2**power for power in range(WIDEST_TIMED.bit_length())), (3,), with_micro_batch)
    own = batch // cell.config.data_ranks  # a rank's part

    def changed(cell: Cell, size: int) -> Cell:
        return cell.changed(micro_batch=size, accumulation=own // size, batch=batch)

    return PlanAxis(tuple(size for size in range(1, WIDEST_TIMED + 1) if own % size == 0), (3,), changed)


def gpus_axis(cell: Cell) -> PlanAxis:
    """Returns the axis of GPUs, each with the same micro-batch, from the cell's own down to 1."""

    def with_gpus(cell: Cell, ranks: int) -> Cell:
        config = cell.config
        batch = config.micro_batch * config.accumulation * ranks // config.tensor_parallel
        return cell.changed(world_size=ranks, batch=batch)

    ranks = cell.config.world_size
    first = (0, ranks - -(-ranks // 4))  # all, and a quarter of them
    return PlanAxis(range(ranks, 0, -1), first, with_gpus, lambda ranks: 1.0 / ranks, in_states=True)


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
    sizes: list[GptSize] = []
    for deepest in WIDTHS:
        before = sizes[-1].numel if sizes else 0
        of_width = (deepest._replace(layers=layers) for layers in range(1, deepest.layers + 1))
        sizes += [shape for shape in of_width if shape.numel > before]
    return sizes


def family_axis(_: Cell) -> PlanAxis:
    """Returns the axis of the family: indices in `shapes`; the load is roughly linear in the number of parameters."""
    family = shapes()

    def changed(cell: Cell, index: int) -> Cell:
        return with_model(cell, **family[index]._asdict())

    return PlanAxis(range(len(family)), (1, 3), changed, lambda index: float(family[index].numel), in_states=True)


# -- a row and its search --------------------------------------------------------------------------


INTERRUPTED = "the plan was interrupted"

DOMINATED = "fits without it"

TOO_LARGE = "its states alone are too large"


@dataclass
class PlanRow:
    """The search of a candidate for the furthest value of the axis that fits.

    `problem`: why it was not simulated. `bound_bytes`: bound of the first value. `over`: the search has ended. `timed`:
    also predict the step of the last value that fits. `exact`: finally simulate the ends of the bracket with all
    blocks. `like`: a row whose load grows alike along the axis; this search waits for that row's first simulation and
    then begins close to its own answer. `loads`, `probes`: loads and simulated cells by index in the axis. `index`:
    index of the cell that is being simulated. `all_over_few`: ratio of the load with all blocks to the load with few,
    if both are known. `ran`: number of simulations so far.
    """

    candidate: Candidate
    cell: Cell
    axis: PlanAxis
    problem: str = ""
    bound_bytes: int = 0
    over: bool = False
    timed: bool = False
    exact: bool = True
    like: PlanRow | None = field(default=None, repr=False)
    loads: dict[int, float] = field(default_factory=dict, repr=False)
    probes: dict[int, SimulatedCell] = field(default_factory=dict, repr=False)
    index: int = 0
    all_over_few: float = 1.0
    ran: int = 0

    @property
    def best(self) -> SimulatedCell | None:
        """The furthest cell that fits, once the search is over; None if there is none."""
        return self.probes.get(self.last) if self.over and not self.problem else None

    @property
    def fit(self) -> SimulatedCell:
        """The furthest cell that fits, of a row that is known to fit."""
        return self.probes[self.last]

    @property
    def beyond(self) -> SimulatedCell | None:
        """The first cell that was simulated and does not fit, once the search is over."""
        first = min((index for index in self.probes if self.loads[index] > 1), default=-1)
        return self.probes.get(first) if self.over and not self.problem else None

    @property
    def reason(self) -> str:
        """Why the row was not simulated, or not to its end."""
        return self.problem if self.over else INTERRUPTED

    @property
    def last(self) -> int:
        """The last index that fits; -1 if none is known to."""
        return max((index for index, load in self.loads.items() if load <= 1), default=-1)

    @property
    def at_end(self) -> bool:
        """True if the axis has no further value."""
        return self.last == len(self.axis.values) - 1

    @property
    def due(self) -> int:
        """The number of its simulations that usually remain."""
        if self.over:
            return 0
        probes = 1 if len(self.axis.values) == 1 else USUAL_PROBES + 2 * (self.exact and not self.timed)
        return max(1, probes - self.ran)

    @property
    def may_begin(self) -> bool:
        """True unless the row that it is like has no load yet."""
        return self.like is None or self.like.over or bool(self.like.loads)

    def origin(self, capacity: Capacity) -> float | None:
        """Returns the load at the coordinate 0: of the states, unless they change along the axis."""
        return None if self.axis.in_states else self.bound_bytes / capacity.usable_bytes

    def begin_like(self, capacity: Capacity) -> None:
        """Sets the first probe to where the load reaches 1 if, apart from the states, it equals the load of `like`."""
        if self.like is None or not (loads := self.like.loads) or self.loads:
            return
        index = min(loads, key=lambda index: abs(loads[index] - 1))
        origin, its_origin = (row.origin(capacity) or 0.0 for row in (self, self.like))
        axis = replace(self.axis, first=())
        guess = next_index(axis, {index: loads[index] - its_origin + origin}, origin)
        self.axis = replace(axis, first=(index if guess is None else guess,))

    def advance(self, capacity: Capacity) -> Work | None:
        """Returns the next simulation; None if the search is over. First the bracket is found, then its ends are
        simulated with all blocks, if `exact`, and then the step of the last value that fits, if `timed`.
        """
        index = None
        if not self.problem:
            self.begin_like(capacity)
            index = next_index(self.axis, self.loads, self.origin(capacity))
            if index is None and self.exact:
                ends = (max(self.last, 0),) if self.timed else (self.last, self.last + 1)
                index = next((end for end in ends if end in self.probes and not self.probes[end].whole), None)
        if index is not None:
            self.index = index
            # with all blocks, if there is no bracket to find with few, or if these moved it to here
            whole = (self.exact and (self.timed or len(self.axis.values) == 1)) or index in self.probes
            return Work.of(self.at(index), whole, with_step=self.timed)
        if not self.problem and self.timed and self.last >= 0:
            self.index = self.last
            if self.last not in self.probes or self.fit.step is None:
                return Work.of_step(self.at(self.last))
        self.over = True
        return None

    def at(self, index: int) -> Cell:
        """Returns the cell at an index of the axis."""
        return self.axis.changed(self.cell, self.axis.values[index])

    def take(self, answer: SimulatedCell, capacity: Capacity) -> None:
        """Takes the last simulation that `advance` returned."""
        self.ran += 1
        if answer.problem:
            self.problem = answer.problem
            return
        if (before := self.probes.get(self.index)) is not None:
            memory, timed = (answer, before) if answer.step is None else (before, answer)
            answer = replace(memory, step=timed.step)
        if self.timed and not answer.whole:
            answer = replace(answer, reserved_low_bytes=None, reserved_high_bytes=None)
        load = capacity.load(answer.bytes_in)
        if not self.timed and answer.whole and before is not None and not before.whole:
            # The load with few blocks is off by about the same factor at every index.
            lacking = load / self.loads[self.index]
            self.all_over_few *= lacking
            self.loads = {i: held if self.probes[i].whole else held * lacking for i, held in self.loads.items()}
        self.probes[self.index], self.loads[self.index] = answer, load * (1.0 if answer.whole else self.all_over_few)


def bound_of(cell: Cell) -> int:
    """Returns the least bytes that a cell's peak can have: its states, in closed form; 0 if theory has none, or the
    model cannot be built without memory.
    """
    facts = facts_if_any(cell.config)
    return (facts and closed_form(cell.config, facts)) or 0


def next_index(axis: PlanAxis, loads: Mapping[int, float], origin: float | None = None) -> int | None:
    """Returns the index of the axis whose load is needed next; None if the last that fits is known, or none fits. It is
    where the line through the nearest probes on both sides of a load of 1, or the two nearest, meets it. `origin`: load
    at the coordinate 0, for want of a second probe.
    """
    low = max((index for index, load in loads.items() if load <= 1), default=-1)
    high = min((index for index, load in loads.items() if load > 1), default=len(axis.values))
    if high - low <= 1:
        return None
    if first := [index for index in axis.first if low < index < high]:
        return first[0]
    near = [low, high] if {low, high} <= {*loads} else sorted(loads, key=lambda index: abs(loads[index] - 1))[:2]
    points = [(axis.coordinate(axis.values[index]), loads[index]) for index in near]
    if origin is not None and len(points) == 1:
        points.append((0.0, origin))
    halves = (low + high) // 2 if high < len(axis.values) else max(0, min(2 * low + 1, high - 1))
    if len(points) < 2 or (low < 0 and origin is None) or len(loads) - len(axis.first) >= MOST_GUESSES:
        return halves
    (x, load), (other, its_load) = points
    slope = (load - its_load) / (x - other)
    if slope <= 0:
        return halves
    index = bisect_right(axis.values, x + (1 - load) / slope, key=axis.coordinate) - 1
    return min(max(index, low + 1), high - 1)


# -- a plan: all searches, in parallel -------------------------------------------------------------


@dataclass
class Plan:
    """The question, the answer and the progress of a plan.

    question   `execute`: runs all cells. `costs`: of the cluster of goal fastest; `price`: dollars per GPU
               hour. `overrides`: of all cells; `named`: keys of AXES that the user gave
    answer     `rows` are filled by `search` and `simulate`; goal fastest (fastest.py) adds `larger`: its leaders on
               more GPUs, by the id of their cell; `notes`: on rows that were left out; `turns`: sentences on what would
               change the answer
    progress   `report` takes the plan and a row whose search has ended, or None before the first simulation and after
               each. `due`: number of rows of which a cell is simulated first. `ran`: number of simulations so far;
               `left`: how many usually remain, without `later`: those of steps of the plan that follow
    """

    goal: str
    capacity: Capacity
    execute: Callable[..., list[Execution]]
    costs: GpuCosts | None = None
    price: float | None = None
    device: str = "cuda"
    overrides: Sequence[str] = ()
    named: Collection[str] = ()

    rows: dict[Candidate, PlanRow] = field(default_factory=dict)
    larger: dict[str, PlanRow] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    interrupted: bool = False

    report: Callable[[Plan, PlanRow | None], None] = lambda *_: None
    due: int = 0
    ran: int = 0
    left: int = 0
    later: int = 0

    @property
    def fitting(self) -> list[PlanRow]:
        """The rows that fit."""
        return [row for row in self.rows.values() if row.best is not None]

    @property
    def ranked(self) -> list[PlanRow]:
        """The rows that fit, the fastest first; those with few blocks fit by their peak."""
        timed = (row for row in self.fitting if row.fit.step is not None)
        return sorted(timed, key=lambda row: -row.fit.timed.rate())

    @property
    def least(self) -> tuple[SimulatedCell, PlanRow] | None:
        """The cell that is closest to fitting, and its row; None if none was simulated."""
        tried = [(probe, row) for row in self.rows.values() for probe in row.probes.values()]
        load = self.capacity.load
        return min(tried, key=lambda pair: (load(pair[0].bytes_in), pair[0].held_bytes), default=None)

    def search(
        self, cells: Mapping[Candidate, Cell], axis_of: Callable[[Cell], PlanAxis], others: Sequence[PlanRow] = ()
    ) -> None:
        """Adds a row per candidate, in their order, and searches them, and `others` at the same time. If the bounds
        exclude all rows, the one with the least is simulated after all, so that the plan can name a device that would
        do. Rows with the same activations differ in their states alone: with steps, those with the least are simulated
        first, and show the others where to begin.
        """
        timed, limit = self.costs is not None, self.capacity.usable_bytes
        rows = [PlanRow(row, cell, axis_of(cell), timed=timed, exact=not timed) for row, cell in cells.items()]
        for row in rows:
            if not (problems := row.cell.problems):
                row.bound_bytes = bound_of(row.at(0))
            row.problem = problems[0] if problems else TOO_LARGE if row.bound_bytes > limit else ""
        self.rows |= {row.candidate: row for row in rows}
        too_large = [row for row in rows if row.problem == TOO_LARGE]
        if too_large and all(row.problem for row in self.rows.values()):
            min(too_large, key=lambda row: row.bound_bytes).problem = ""
        alike: dict[str, list[PlanRow]] = {}
        for row in rows:
            if timed and not row.problem and len(row.axis.values) > 2:
                alike.setdefault(row.candidate.activation, []).append(row)
        for several in alike.values():
            least = min(several, key=lambda row: row.bound_bytes)
            for row in several:
                row.like = least if row is not least else None
        chains: dict[tuple[str, ...], list[PlanRow]] = {}
        for row in sorted(rows, key=lambda row: (row.candidate.offloads, row.candidate.recomputes)):
            # with a fixed cell, rows of a strategy are in one chain, unless the user named the rest
            fixed = row.exact and len(row.axis.values) == 1
            keys = [key for key in AXES if not fixed or key == "strategy" or key in self.named]
            chains.setdefault((*(getattr(row.candidate, key) for key in keys), *row.candidate.more), []).append(row)
        self.simulate([*([row] for row in others), *chains.values()])

    def simulate(self, chains: Sequence[list[PlanRow]]) -> None:
        """Searches chains of rows: of each chain one row after the other, until one fits."""
        works, owners, waiting = list[Work](), list[list[PlanRow]](), [*chains]

        def advance(chain: list[PlanRow]) -> None:
            while chain:
                if (due := chain[0].advance(self.capacity)) is not None:
                    works.append(due)
                    owners.append(chain)
                    return
                row = chain.pop(0)
                while row.best and chain:
                    other = chain.pop()
                    other.problem, other.over = DOMINATED, True
                if self.rows.get(row.candidate) is row:
                    self.report(self, row)

        def begin() -> None:
            ready = [chain for chain in waiting if not chain or chain[0].may_begin]
            waiting[:] = [chain for chain in waiting if chain and not chain[0].may_begin]
            for chain in ready:
                advance(chain)

        def take(index: int, cell: SimulatedCell) -> None:
            owners[index][0].take(cell, self.capacity)
            advance(owners[index])
            begin()
            self.ran, self.left = self.ran + 1, sum(chain[0].due for chain in chains if chain)
            self.report(self, None)

        begin()
        if works and not any(row.probes for row in self.rows.values()):
            self.due = sum(map(bool, chains))
            self.report(self, None)
        run_works(works, self.execute, take, self.costs)
