"""The search for the largest fit of each row of the table, along one number of a cell: its layers, its micro-batch, or
the number of GPUs.

axis        its values, from the emptiest to the fullest device, and a coordinate in which the load is roughly linear
bracket     the last value that fits and the first that does not; the search ends when they are neighbors
executed    a value whose load is known from a simulated cell
bound       theory's states: no simulation has less memory at its peak, so a candidate whose states exceed a limit is
            skipped. Strategies for which theory has no schedule have no bound. Theory replays gloo's exchange; on a
            GPU the buffers in flight differ a little, so states must exceed the limit by SURE to be skipped
row         a search is a generator: it yields a cell and is sent what the cell used, or the error message if it failed.
            So one driver runs many searches side by side, and tests run one without simulating anything

Bytes are linear in layers, in micro-batch and in 1/N, up to buckets and padding, so the line through the last two
loads meets 1 close to the answer; the answer's two neighbors are always simulated.

ZeRO's own family of GPTs is an axis, too: shapes ordered by their parameters. The hidden sizes are the paper's (arXiv
1910.02054v3, appendix, tables 4 to 8), each with up to the most layers that it has there; the last is that of its
trillion-parameter model (ZeRO-Infinity, arXiv 2104.07857, table 1).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace

from ...config.cell import Cell
from ...config.schema import Gpt
from ...fake_execution import Execution
from ...predict.estimate import Estimate, estimate
from ...timing.prediction import StepSchedule
from .candidates import Candidate, Capacity, Used, used_of

MOST_GUESSES = 6
"""Guesses by linear interpolation; after these the bracket is halved."""

DEEPEST, WIDEST_BATCH = 512, 65536
"""Ends of the axes: a cell of 512 blocks takes minutes to simulate."""


@dataclass(frozen=True)
class PlanAxis:
    """`values`: from the emptiest to the fullest device. `coordinate`: of a value, increasing along them."""

    name: str
    values: Sequence[int]
    first: tuple[int, ...]
    """Places in `values` of the first probes, in order."""
    changed: Callable[[Cell, int], Cell]
    coordinate: Callable[[int], float] = float
    in_states: bool = False
    """True if the states change along it, so that theory's states are a better coordinate."""


def with_micro_batch(cell: Cell, samples: int) -> Cell:
    """Returns the cell with `samples` samples per rank and micro-batch."""
    config = cell.config
    return cell.changed(micro_batch=samples, batch=samples * config.accumulation * config.data_ranks)


def layers_axis() -> PlanAxis:
    """Returns the axis of layers, which starts with models that are simulated quickly."""

    def with_layers(cell: Cell, layers: int) -> Cell:
        assert isinstance(cell.config.model, Gpt)
        return cell.changed(model=replace(cell.config.model, layers=layers))

    return PlanAxis("layers", range(1, DEEPEST + 1), (1, 3), with_layers, in_states=True)


def micro_batch_axis() -> PlanAxis:
    """Returns the axis of samples per rank."""
    return PlanAxis("micro_batch", range(1, WIDEST_BATCH + 1), (0, 1), with_micro_batch)


def gpus_axis(most: int) -> PlanAxis:
    """Returns the axis of GPUs, each with the same micro-batch, from `most` down to 1."""

    def with_gpus(cell: Cell, ranks: int) -> Cell:
        config = cell.config
        return cell.changed(
            world_size=ranks, batch=config.micro_batch * config.accumulation * ranks // config.tensor_parallel
        )

    return PlanAxis("gpus", range(most, 0, -1), (0,), with_gpus, lambda ranks: 1.0 / ranks, in_states=True)


def fixed_axis() -> PlanAxis:
    """Returns an axis of one value, for a cell that is taken unchanged."""
    return PlanAxis("", (0,), (0,), lambda cell, _: cell)


def walk(axis: PlanAxis, end: int) -> Generator[int, float, int | None]:
    """Yields the places of the axis whose load is needed; returns the last that fits, None if the first does not.

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


def _guess(axis: PlanAxis, loads: dict[int, float], low: int, high: int) -> int:
    """Returns a place between low and high, where the line through the two nearest probes meets a load of 1."""
    if low < 0 or len(loads) - len(axis.first) >= MOST_GUESSES or len(loads) < 2:
        return (low + high) // 2 if high <= len(axis.values) - 1 or low < 0 else min(2 * low + 1, high - 1)
    one, other = sorted(loads, key=lambda place: abs(loads[place] - 1))[:2]
    # states that are entirely on the host or in files do not change on the device
    still = axis.coordinate(axis.values[one]) == axis.coordinate(axis.values[other])

    def at(place: int) -> float:
        return float(place) if still else axis.coordinate(axis.values[place])

    slope = (loads[one] - loads[other]) / (at(one) - at(other))
    if slope <= 0:
        return (low + high) // 2
    wanted = at(one) + (1 - loads[one]) / slope
    return min(max(bisect_right(range(len(axis.values)), wanted, key=at) - 1, low + 1), high - 1)


# -- ZeRO's family ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class GptSize:
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
        same_width = (replace(deepest, layers=layers) for layers in range(1, deepest.layers + 1))
        found += [shape for shape in same_width if shape.numel > before]
    return found


def family_axis() -> PlanAxis:
    """Returns the axis of the family: places in `shapes`; the load is roughly linear in the number of parameters."""
    family = shapes()

    def changed(cell: Cell, place: int) -> Cell:
        one, model = family[place], cell.config.model
        assert isinstance(model, Gpt)
        return cell.changed(model=replace(model, layers=one.layers, hidden=one.hidden, heads=one.heads))

    return PlanAxis(
        "shape", range(len(family)), (1, 3), changed, lambda place: float(family[place].numel), in_states=True
    )


# -- theory's bound --------------------------------------------------------------------------------


SURE = 1.02
"""A cell is not simulated if theory's states exceed the limit by this factor."""

_ESTIMATES: dict[str, Estimate | None] = {}
"""Cell id -> its prediction, since searches return to the same cells."""


def states_of(cell: Cell) -> Estimate | None:
    """Returns theory's prediction for a cell; None if the model cannot be built for it."""
    if cell.cell_id not in _ESTIMATES:
        try:
            _ESTIMATES[cell.cell_id] = estimate(cell.config)
        except Exception:  # a user's builder may do what a model without memory cannot; its execution will tell
            _ESTIMATES[cell.cell_id] = None
    return _ESTIMATES[cell.cell_id]


def least_load(cell: Cell, capacity: Capacity) -> float:
    """Returns a lower bound of the cell's load; 0 if theory has none."""
    found = states_of(cell)
    if found is None or found.states_bytes is None:
        return 0.0
    tiers = {"device": found.states_bytes, "host": found.host_bytes or 0, "nvme": found.file_bytes or 0}
    return max(held / capacity.limit_of(tier) for tier, held in tiers.items())


def by_states(cell: Cell, axis: PlanAxis, capacity: Capacity) -> PlanAxis:
    """Returns the axis with theory's states as its coordinate: except for activations, the load is linear in it with
    slope 1. Returns the axis unchanged if the states do not change along it, or theory has no prediction.
    """
    if not axis.in_states or least_load(axis.changed(cell, axis.values[0]), capacity) == 0:
        return axis
    return replace(axis, coordinate=lambda value: least_load(axis.changed(cell, value), capacity))


def first_too_large(cell: Cell, axis: PlanAxis, capacity: Capacity) -> int:
    """Returns the first place of the axis whose states alone do not fit; the number of values if all fit."""
    search, load = walk(axis, len(axis.values)), None
    try:
        while True:
            place = search.send(load) if load is not None else next(search)
            load = least_load(axis.changed(cell, axis.values[place]), capacity) / SURE
    except StopIteration as stop:
        return 0 if stop.value is None else stop.value + 1


# -- a row's search --------------------------------------------------------------------------------


Search = Generator[Cell, "Used | str", "PlanRow"]


@dataclass(frozen=True)
class ExecutedCell:
    """A simulated cell: its value on the axis, its memory and traffic, and under goal fastest its schedule."""

    value: int
    cell: Cell
    used: Used
    schedule: StepSchedule | None = None


@dataclass(frozen=True)
class PlanRow:
    """Findings for one candidate. `best`: the furthest simulated cell that fits; None if none fits.

    `beyond`: the next value's cell, which does not fit, or the least that was tried. `problem`: why it was not
    simulated. `at_end`: the axis has no further value.
    """

    candidate: Candidate
    best: ExecutedCell | None = None
    beyond: ExecutedCell | None = None
    problem: str = ""
    bound_bytes: int | None = None
    at_end: bool = False
    probes: tuple[ExecutedCell, ...] = field(default=(), repr=False)


class NotExecutedError(Exception):
    """A cell could not be simulated; the message says why."""


def search_row(candidate: Candidate, cell: Cell, axis: PlanAxis, capacity: Capacity) -> Search:
    """Searches for the furthest value of the axis that fits. Yields cells, and is sent what they used."""
    if cell.problems:
        return PlanRow(candidate, problem=cell.problems[0])
    end = first_too_large(cell, axis, capacity)
    if end == 0:
        return _only_states(candidate, axis.changed(cell, axis.values[0]), capacity)
    probes: dict[int, ExecutedCell] = {}
    places, load = walk(by_states(cell, axis, capacity), end), None
    try:
        while True:
            place = places.send(load) if load is not None else next(places)
            changed = axis.changed(cell, axis.values[place])
            used = yield changed
            if isinstance(used, str):
                raise NotExecutedError(used)
            probes[place] = ExecutedCell(axis.values[place], changed, used)
            load = capacity.load(used)
    except StopIteration as stop:
        found = stop.value
    except NotExecutedError as error:
        return PlanRow(candidate, problem=str(error), probes=tuple(probes.values()))
    beyond = [place for place in sorted(probes) if found is None or place > found]
    return PlanRow(
        candidate, best=None if found is None else probes[found], beyond=probes[beyond[0]] if beyond else None,
        at_end=found == len(axis.values) - 1, probes=tuple(probes.values()),
    )  # fmt: skip


def pruned_by_states(candidate: Candidate, cell: Cell, capacity: Capacity) -> PlanRow | None:
    """Returns the row of a cell whose states alone are too large; None if they fit or theory has no prediction."""
    return _only_states(candidate, cell, capacity) if least_load(cell, capacity) / SURE > 1 else None


def _only_states(candidate: Candidate, cell: Cell, capacity: Capacity) -> PlanRow:
    """Returns the row of a candidate whose states alone are too large, which needs no simulation."""
    found = states_of(cell)
    assert found is not None
    assert found.states_bytes is not None
    tier = "device" if found.states_bytes > capacity.usable_bytes else "host or disk"
    words = f"states alone are {least_load(cell, capacity):.2f} times the usable memory ({tier})"
    return PlanRow(candidate, problem=words, bound_bytes=found.states_bytes)


# -- all searches, side by side --------------------------------------------------------------------


Execute = Callable[..., list[Execution]]
"""Simulates configs and, as each is done, passes its place and its execution to `tell` (fake_execution/many.py)."""

Tell = Callable[[int, int, "PlanRow | None"], None]
"""Takes the number of simulated cells, the number of open searches, and a row whose search has ended."""

INTERRUPTED = "the plan was interrupted"


def run_searches(
    cells: dict[Candidate, Cell], axis: PlanAxis, capacity: Capacity, execute: Execute, tell: Tell = lambda *_: None
) -> list[PlanRow]:
    """Returns a row per candidate, in their order. If the user interrupts, rows of open searches say so."""
    known: dict[str, Used | str] = {}
    rows: dict[Candidate, PlanRow] = {}
    wanted: dict[Candidate, tuple[Search, Cell]] = {}

    def advance(one: Candidate, search: Search, answer: Used | str | None) -> None:
        try:
            cell = next(search) if answer is None else search.send(answer)
            while cell.cell_id in known:
                cell = search.send(known[cell.cell_id])
            wanted[one] = search, cell
        except StopIteration as stop:
            rows[one] = stop.value
        tell(len(known), len(cells) - len(rows), rows.get(one))

    try:
        for one, cell in cells.items():
            advance(one, search_row(one, cell, axis, capacity), None)
        while wanted:
            new = list({cell.cell_id: cell for _, cell in wanted.values()}.values())

            def heard(number: int, news: object, new: Sequence[Cell] = new) -> None:
                if isinstance(news, Execution):
                    used = known[new[number].cell_id] = news.problem or used_by(new[number], news)
                    for one, (search, cell) in list(wanted.items()):
                        if cell.cell_id == new[number].cell_id:
                            del wanted[one]
                            advance(one, search, used)

            execute([cell.config for cell in new], tell=heard)
        if not any(row.probes for row in rows.values()):
            rows |= _with_least(rows, cells, axis, execute)
    except KeyboardInterrupt:
        pass
    return [rows.get(one, PlanRow(one, problem=INTERRUPTED)) for one in cells]


def _with_least(
    rows: dict[Candidate, PlanRow], cells: dict[Candidate, Cell], axis: PlanAxis, execute: Execute
) -> dict[Candidate, PlanRow]:
    """Returns the row with the least states, simulated at its emptiest value, so that a plan whose rows theory has all
    pruned can still name a device that would do.
    """
    pruned = [row for row in rows.values() if row.bound_bytes is not None]
    if not pruned:
        return {}
    least = min(pruned, key=lambda row: row.bound_bytes or 0)
    cell = axis.changed(cells[least.candidate], axis.values[0])
    (execution,) = execute([cell.config])
    if execution.problem:
        return {least.candidate: replace(least, problem=execution.problem, bound_bytes=None)}
    probe = ExecutedCell(axis.values[0], cell, used_by(cell, execution))
    return {least.candidate: replace(least, problem="", beyond=probe, probes=(probe,))}


def used_by(cell: Cell, execution: Execution) -> Used:
    """Returns the memory and traffic of a cell that was simulated."""
    predicted = states_of(cell)
    return used_of(execution, *((predicted.psi, predicted.frozen) if predicted is not None else (0,)))
