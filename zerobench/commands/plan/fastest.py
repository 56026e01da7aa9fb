"""Goal `fastest`: of what fits, the predicted step on a cluster decides.

rows          strategies x activation policies, then variants of the leading strategies: prefetch, nodes, shard groups,
              ZeRO++. What a variant changes is communication: if the step without any were not shorter by more than
              the interval, none is executed, and the answer says so
micro-batch   the largest power of two that fits; with a given `batch`, the largest that divides a rank's part of it,
              and as many micro-batches as that takes. It is guessed by a line through executed ones: the load is convex
              in the micro-batch, so that what a line from below puts beyond the device is beyond it
executed      a row once per micro-batch that is tried, with few blocks (timing/prediction.py): the same execution gives
              memory and schedule. The row that is recommended is executed with all its blocks
turn          the network, or the number of GPUs, at which another row would be ahead: schedules are laid out again for
              every network, and the leading strategies are executed again on more GPUs with the same micro-batches
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from ...config import combinations
from ...config.cell import Cell
from ...config.keys import problems_of
from ...config.schema_memory import CHOICES
from ...fake_execution import Execution
from ...results.grid import Grid
from ...sizes import counted, show_bytes
from ...strategies import built_in
from ...timing.costs import GpuCosts, Transfer
from ...timing.interval import StepInterval, interval_of
from ...timing.prediction import Reduced, StepSchedule, StepTime, reduced, schedule_of, step_time
from ..predict import show_time
from .candidates import Candidate, Capacity, Used
from .search import (
    INTERRUPTED,
    Execute,
    ExecutedCell,
    PlanRow,
    Tell,
    least_load,
    pruned_by_states,
    used_by,
    with_micro_batch,
)

WIDEST = 64
"""Largest micro-batch that is tried."""

PILOT = 4
"""Micro-batch that one row per activation policy is executed with besides 1, for the others' first guess."""

LEADERS = 2
"""Strategies whose variants are tried."""

PREFETCHES = (0, 2)
ZEROPP = ("hpz", "all")
"""Values that are tried; others are tried if the user gives them."""

AHEAD = 1.01
"""Times the rate of another row at which a row is ahead of it."""

SLOWER = (0.5, 0.25, 0.1, 0.05, 0.02, 0.01)
FASTER = (2.0, 4.0)
"""Factors on the network at which the ranking is asked for again."""

MORE_GPUS = (4, 16)
"""Factors on the number of GPUs at which the leading strategies are executed again."""

SHOWN = 10


@dataclass(frozen=True)
class Timed:
    """A row that fits, with its predicted step at the cluster's network."""

    candidate: Candidate
    cell: Cell
    used: Used
    schedule: StepSchedule
    time: StepTime
    interval: StepInterval

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second and GPU."""
        return self.rate(self.time)

    def rate(self, time: StepTime) -> float:
        """Returns the tokens per second and GPU of a step of this cell."""
        config = self.cell.config
        return config.micro_batch * config.accumulation * config.sequence / time.step_s


def batch_of(words: Sequence[str], gpus: int) -> tuple[list[str], int | None]:
    """Takes `batch=` out of a command's words. Raises ValueError if GPUs do not divide it."""
    batches = [word.partition("=")[2] for word in words if word.startswith("batch=")]
    if not batches:
        return list(words), None
    if not batches[-1].isdecimal() or int(batches[-1]) % gpus or not int(batches[-1]):
        raise ValueError(f"batch={batches[-1]}: samples of a step over all GPUs, a multiple of --gpus {gpus}")
    return [word for word in words if not word.startswith("batch=")], int(batches[-1])


# -- a row's micro-batch ---------------------------------------------------------------------------


def sizes_of(samples: int | None) -> tuple[int, ...]:
    """Returns the micro-batches to try: powers of two, or what divides the samples of a rank's part of a step."""
    if samples is None:
        return tuple(2**power for power in range(WIDEST.bit_length()))
    return tuple(size for size in range(1, WIDEST + 1) if samples % size == 0)


@dataclass
class TriedRow:
    """The search of one row. `slope`: load per sequence, as another row of this activation policy has it; `held`: the
    load without any sequence. `loads`: of the executed micro-batches, how full the fullest tier is."""

    candidate: Candidate
    cell: Cell
    sizes: tuple[int, ...]
    problem: str = ""
    bound_bytes: int | None = None
    held: float = 0.0
    slope: float | None = None
    probes: dict[int, ExecutedCell] = field(default_factory=dict)
    loads: dict[int, float] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """True if another micro-batch is to be executed."""
        return (size := self.wanted()) is not None and size not in self.probes

    @property
    def best(self) -> ExecutedCell | None:
        """The largest micro-batch that was executed and fits."""
        fitting = [size for size, load in self.loads.items() if load <= 1]
        return self.probes[max(fitting)] if fitting else None

    def wanted(self) -> int | None:
        """Returns the micro-batch to execute next; None if the search is over."""
        if self.problem:
            return None
        if not self.probes:
            return self._on_line(self.sizes, self.held, self.slope) if self.slope is not None else self.sizes[0]
        fitting = sorted(size for size, load in self.loads.items() if load <= 1)
        first = min((size for size in self.loads if size not in fitting), default=WIDEST + 1)
        below = [size for size in self.sizes if size < first]
        if not fitting:
            return self._on_line(below, self.held, (self.loads[first] - self.held) / first) if below else None
        best = fitting[-1]
        slope = self.slope or 0.0
        if len(fitting) > 1:
            slope = (self.loads[best] - self.loads[fitting[-2]]) / (best - fitting[-2])
        reached = [size for size in below if size > best and self.loads[best] + slope * (size - best) <= 1]
        return max(reached, default=None)

    @staticmethod
    def _on_line(sizes: Sequence[int], held: float, slope: float) -> int:
        """Returns the largest micro-batch that a line puts on the device; if there is none the smallest."""
        return max((size for size in sizes if held + slope * size <= 1), default=sizes[0])

    def as_plan(self) -> PlanRow:
        """Returns the row as other goals have it."""
        probes = tuple(self.probes[size] for size in sorted(self.probes))
        return PlanRow(self.candidate, self.best, None, self.problem, self.bound_bytes, probes=probes)


@dataclass(frozen=True)
class FastestSearch:
    """A search on a cluster. `batch`: samples of a step over all GPUs, or None; `given`: keys that the user set."""

    costs: GpuCosts
    capacity: Capacity
    batch: int | None
    given: frozenset[str]
    run: Execute
    tell: Tell

    def row(self, candidate: Candidate, cell: Cell) -> TriedRow:
        """Returns the search of a row, which is over if its states alone do not fit."""
        sizes = sizes_of(None if self.batch is None else self.batch // cell.config.data_ranks)
        problem = next(iter(cell.problems), "")
        pruned = None if problem else pruned_by_states(candidate, cell, self.capacity)
        if pruned is not None:
            return TriedRow(candidate, cell, sizes, pruned.problem, pruned.bound_bytes)
        return TriedRow(candidate, cell, sizes, problem)

    def execute(self, work: Sequence[tuple[TriedRow, int]], done: Callable[[], None] = lambda: None) -> None:
        """Executes rows, each with a micro-batch; calls `done` after each."""
        cells = [self._sized(row.cell, size) for row, size in work]

        def take(place: int, one: Reduced, mine: list[Execution]) -> None:
            (row, size), cell, schedule = work[place], cells[place], schedule_of(one, mine)
            row.problem = schedule.problem
            if not schedule.problem:
                used = whole_used(one, [used_by(cell, each) for each in mine])
                row.probes[size], row.loads[size] = ExecutedCell(size, cell, used, schedule), self.capacity.load(used)
            done()

        self._executed(cells, take)

    def _executed(self, cells: Sequence[Cell], take: Callable[[int, Reduced, list[Execution]], None]) -> None:
        """Executes cells with few blocks, all in one call, and passes each to `take` with its place once it is done."""
        small = [reduced(cell.config) for cell in cells]
        places = [(place, n) for place, one in enumerate(small) for n in range(len(one.configs))]
        found: list[dict[int, Execution]] = [{} for _ in small]

        def tell(number: int, news: object) -> None:
            place, n = places[number]
            if isinstance(news, Execution):
                found[place][n] = news
                if len(found[place]) == len(small[place].configs):
                    take(place, small[place], [found[place][n] for n in sorted(found[place])])

        self.run([config for one in small for config in one.configs], tell=tell)

    def schedules(self, cells: Sequence[Cell]) -> list[StepSchedule]:
        """Executes cells, and returns their schedules."""
        found: dict[int, StepSchedule] = {}
        self._executed(cells, lambda place, one, mine: found.update({place: schedule_of(one, mine)}))
        return [found[place] for place in range(len(cells))]

    def _sized(self, cell: Cell, size: int) -> Cell:
        """Returns the cell with a micro-batch, and with as many of them as the batch takes."""
        if self.batch is None:
            return with_micro_batch(cell, size)
        accumulation = self.batch // (size * cell.config.data_ranks)
        return cell.changed(micro_batch=size, accumulation=accumulation, batch=self.batch)

    def all_sizes(self, rows: Sequence[TriedRow]) -> None:
        """Executes rows until each has the largest micro-batch that fits."""
        due = list(rows)

        def tell_ended() -> None:
            for row in [row for row in due if not row.is_open]:
                due.remove(row)
                self.tell(sum(len(one.probes) for one in rows), len(due), row.as_plan())

        tell_ended()
        while due:
            self.execute([(row, row.wanted() or 0) for row in due], tell_ended)

    def pilots(self, rows: Sequence[TriedRow]) -> None:
        """Executes one row of each activation policy twice, and tells the others its line."""
        states = {id(row): least_load(row.cell, self.capacity) for row in rows if not row.problem}
        known = sorted((row for row in rows if id(row) in states), key=lambda row: states[id(row)] > 0)
        last = {row.candidate.activation: row for row in known}
        sizes = {name: {1, max(size for size in row.sizes if size <= PILOT)} for name, row in last.items()}
        self.execute([(last[name], size) for name, mine in sizes.items() for size in sorted(mine)])
        for row in known:
            pilot = last[row.candidate.activation]
            if len(pilot.probes) > 1:
                (one, low), (other, high) = sorted(pilot.loads.items())
                row.slope = max(0.0, (high - low) / (other - one))
                more = states[id(row)] - states[id(pilot)] if states[id(row)] else 0.0
                row.held = max(0.0, low - one * row.slope + more)

    def timed(self, row: TriedRow) -> Timed | None:
        """Returns a row that fits with its step."""
        best = row.best
        if best is None or best.schedule is None:
            return None
        time = step_time(best.schedule, self.costs)
        interval = interval_of(self.costs, best.cell.config, best.schedule.without_formula)
        return Timed(row.candidate, best.cell, best.used, best.schedule, time, interval)

    def variants(self, one: Timed) -> Iterator[tuple[Candidate, Cell]]:
        """Yields the variants of a row that are valid and that the user's keys leave open."""
        config, per_node = one.cell.config, self.costs.cluster.devices_per_node
        known = built_in()
        composes = known[config.strategy.name].composes if config.strategy.name in known else None
        wanted: list[tuple[tuple[str, ...], dict[str, Any]]] = []
        if hasattr(config.strategy, "prefetch"):
            strategy: Any = config.strategy
            others = [number for number in PREFETCHES if number != strategy.prefetch]
            wanted += [((f"strategy.prefetch={n}",), {"strategy": replace(strategy, prefetch=n)}) for n in others]
        if config.world_size > per_node and composes is not None and composes.groups:
            nodes = {"node_size": per_node}
            wanted += [((f"node_size={per_node}",), nodes), ((f"shard_group={per_node}",), {"shard_group": per_node})]
            if composes.zeropp:
                wanted += [
                    ((f"node_size={per_node}", f"zeropp={name}"), nodes | {"zeropp": make()})
                    for name, make in CHOICES.items() if name in ZEROPP
                ]  # fmt: skip
        for words, changes in wanted:
            cell = one.cell.changed(**changes)
            if not self.given & {word.partition("=")[0] for word in words} and not combinations.validate(cell.config):
                yield replace(one.candidate, more=words), cell


def whole_used(cell: Reduced, used: Sequence[Used]) -> Used:
    """Returns what a cell with all its blocks uses: blocks are alike, so that each adds as much as another."""
    if len(used) == 1:
        return used[0]
    (few, many), (least, most) = used, cell.blocks
    more = (cell.whole_blocks - most) / (most - least)

    def at(name: str) -> Any:
        low, high = getattr(few, name), getattr(many, name)
        return None if high is None else type(high)(high + more * (high - low))

    names = ("peak_bytes", "host_bytes", "file_bytes", "volume_psi", "wire_bytes", "reserved_bytes")
    at_peak = {key: int(many.at_peak[key] + more * (many.at_peak[key] - few.at_peak[key])) for key in many.at_peak}
    return replace(many, at_peak=at_peak, **{name: at(name) for name in names})


# -- the search ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FastestFound:
    """What was found, the fastest first. `notes`: rows that were not simulated, and why. `more_gpus`: a sentence on the
    number of GPUs at which another strategy is ahead. `interrupted`: by the user; `timed` has the rows that were done.
    """

    rows: list[PlanRow]
    timed: list[Timed]
    notes: list[str]
    more_gpus: str = ""
    interrupted: bool = False


def find(cells: dict[Candidate, Cell], search: FastestSearch) -> FastestFound:
    """Searches the rows, then variants of the leading strategies; the first is executed whole."""
    rows, notes = list[TriedRow](), list[str]()
    try:
        rows.extend(search.row(one, cell) for one, cell in cells.items())
        search.pilots(rows)
        search.all_sizes(rows)
        more = _variants(search, rows, notes)
        rows += more
        search.all_sizes(more)
        timed = _verified(_ranked(search, rows), search)
        return FastestFound([row.as_plan() for row in rows], timed, notes, turn_of_gpus(timed, search))
    except KeyboardInterrupt:
        timed = _ranked(search, [row for row in rows if not row.is_open])
        for row in rows:
            row.problem = INTERRUPTED if row.is_open else row.problem
        return FastestFound([row.as_plan() for row in rows], timed, notes, interrupted=True)


def _variants(search: FastestSearch, rows: Sequence[TriedRow], notes: list[str]) -> list[TriedRow]:
    """Returns rows for the variants of the leading strategies; notes why a strategy has none."""
    more = list[TriedRow]()
    for one in _leaders(_ranked(search, rows)):
        free = step_time(one.schedule, FreeCosts(search.costs)).step_s
        part = 1 - free / one.time.step_s
        if part < 1 - one.interval.low:
            notes.append(f"{one.candidate.name}: without any communication its step would be {part:.1%} shorter, less "
                         "than the interval, so that prefetch, groups and ZeRO++ were not varied")  # fmt: skip
            continue
        more += [search.row(candidate, cell) for candidate, cell in search.variants(one)]
    for row in more:  # begins with the leader's micro-batch; half of it if that does not fit
        row.sizes, row.slope = tuple(size for size in row.sizes if size <= row.cell.config.micro_batch)[-2:], 0.0
    return more


def _ranked(search: FastestSearch, rows: Sequence[TriedRow]) -> list[Timed]:
    found = [one for row in rows if (one := search.timed(row)) is not None]
    return sorted(found, key=lambda one: -one.tokens_per_s)


def _leaders(ranked: Sequence[Timed]) -> list[Timed]:
    """Returns the fastest row of each leading strategy."""
    best: dict[str, Timed] = {}
    for one in ranked:
        best.setdefault(one.candidate.strategy, one)
    return list(best.values())[:LEADERS]


def _verified(ranked: list[Timed], search: FastestSearch) -> list[Timed]:
    """Executes the first with all its blocks, and drops it if it does not fit; then the next."""
    while ranked:
        first = ranked[0]
        if len(first.schedule.cell.configs) == 1:
            return ranked
        config = first.schedule.cell.configs[-1]
        whole = first.cell.config
        found = search.run([replace(config, model=whole.model, huggingface=whole.huggingface)])[0]
        if found.problem:
            return ranked
        used = used_by(first.cell, found)
        if search.capacity.fits(used):
            return [replace(first, used=used), *ranked[1:]]
        ranked = ranked[1:]
    return ranked


@dataclass
class FreeCosts:
    """The costs of a device on which collectives take no time."""

    of: GpuCosts

    blocking = False
    contention = 1.0

    def __post_init__(self) -> None:
        self.host_s = self.of.host_s

    def compute(self, event: Any) -> float:
        """Seconds of an operator."""
        return self.of.compute(event)

    def transfer(self, event: Any) -> Transfer:
        """Nothing but the launch."""
        return Transfer(self.of.transfer(event).host_s, 0.0)

    def apart(self, seconds: float) -> float:
        """Nothing."""
        return 0.0


# -- the answer ------------------------------------------------------------------------------------


HEADER = ["", "micro-batch", "peak", "reserved", "step", "90 % interval", "tokens/s/GPU", "exposed", "host", "binds"]


def table_of(found: Sequence[Timed]) -> Grid:
    """Returns the table of the fastest."""
    header = [name.replace("tokens", counted(one.cell.config.sequence for one in found)) for name in HEADER]
    return Grid(header, [_line(one) for one in found[:SHOWN]], ("", "binds"))


def _line(one: Timed) -> list[str]:
    config, time = one.cell.config, one.time
    batch = f"{config.micro_batch}" + f" × {config.accumulation}" * (config.accumulation > 1)
    low, high = (show_time(time.step_s * factor) for factor in (one.interval.low, one.interval.high))
    return [
        one.candidate.name, batch, show_bytes(one.used.peak_bytes), show_bytes(one.used.reserved_bytes),
        show_time(time.step_s), f"{low} – {high}",
        f"{one.tokens_per_s:,.0f}", show_time(time.exposed_s), show_time(time.host_s), time.binds,
    ]  # fmt: skip


def sentence(answer: FastestFound, costs: GpuCosts) -> str:
    """Returns the recommendation: why the first wins, whether the interval says so, and when another would."""
    found = answer.timed
    first = found[0]
    said = f"Take {first.candidate.name} with micro_batch={first.cell.config.micro_batch}: {first.tokens_per_s:,.0f}"
    said += f" {counted([first.cell.config.sequence])}/s per GPU, its step bound by {first.time.binds}"
    if len(found) > 1:
        second = next((one for one in found if one.candidate.strategy != first.candidate.strategy), found[1])
        behind = first.tokens_per_s / second.tokens_per_s - 1
        tie = first.interval.high > 1 + behind
        said += f"; {second.candidate.name} is {behind:.1%} behind, because it {_why(first, second)}"
        said += "; that is within the interval: a tie" * tie
    parts = (f"{said}.", turn(found, costs), answer.more_gpus, f"The interval: {first.interval.words}.")
    return " ".join(part for part in parts if part)


def _why(first: Timed, second: Timed) -> str:
    """Returns what most of the difference in time per token is: computing, waiting for collectives, for the host."""

    def per_token(one: Timed) -> dict[str, float]:
        waits = {"waits longer for collectives": one.time.exposed_s, "waits longer for the host": one.time.host_s}
        parts = waits | {"computes longer": one.time.step_s - sum(waits.values())}
        return {name: seconds / one.time.step_s / one.tokens_per_s for name, seconds in parts.items()}

    here, there = per_token(first), per_token(second)
    return max(here, key=lambda name: there[name] - here[name])


def turn(found: Sequence[Timed], costs: GpuCosts) -> str:
    """Returns a sentence on the nearest network at which another row is ahead."""
    first, rate = found[0], costs.cluster.node_gbit_s
    if all(one.cell.config.world_size <= costs.cluster.devices_per_node for one in found):
        return "All ranks are on one node, so that the network between nodes does not matter."
    for words, factors in (("Below", SLOWER), ("Above", FASTER)):
        near = 1.0
        for factor in factors:
            if _best_at(found, costs, factor) is not first:
                at = _edge(partial(_best_at, found, costs), first, near, factor)
                name = _best_at(found, costs, at).candidate.name
                return f"{words} {_rounded(rate * at)} Gbit/s per node {name} is ahead."
            near = factor
    least, most = _rounded(rate * SLOWER[-1]), _rounded(rate * FASTER[-1])
    return f"No network from {least} to {most} Gbit/s per node changes that."


def _rounded(rate: float) -> str:
    """Returns Gbit/s with two or three digits: the edge is found within a few percent."""
    return f"{rate:.2g}" if rate < 100 else f"{round(rate, -1):,.0f}"


def turn_of_gpus(found: Sequence[Timed], search: FastestSearch) -> str:
    """Returns a sentence on the first larger number of GPUs at which another strategy is ahead; empty if no other
    strategy fits, or no larger world may be executed. It executes the leaders again."""
    leaders, tried = _leaders(found), list[str]()
    if len(leaders) < 2:
        return ""
    first = leaders[0]
    for factor in MORE_GPUS:
        larger = [_on_more_gpus(one.cell, factor) for one in leaders]
        if any(problems_of(cell.config) for cell in larger):  # more ranks than a world has at most
            break
        schedules, gpus = search.schedules(larger), larger[0].config.world_size
        if problem := next((one.problem for one in schedules if one.problem), ""):
            return f"On {gpus:,} GPUs nothing is predicted: {problem}."
        rates = [one.rate(step_time(schedule, search.costs)) for one, schedule in zip(leaders, schedules, strict=True)]
        best = leaders[rates.index(max(rates))]
        if max(rates) > AHEAD * rates[0]:
            return f"On {gpus:,} GPUs with the same micro-batches {best.candidate.name} is ahead."
        tried.append(f"{gpus:,}")
    if not tried:
        return ""
    return f"On {' and '.join(tried)} GPUs with the same micro-batches {first.candidate.name} stays ahead."


def _on_more_gpus(cell: Cell, factor: int) -> Cell:
    """Returns the cell on so many times as many GPUs, each rank with the same work."""
    config = cell.config
    batch = None if config.batch is None else config.batch * factor
    return cell.changed(world_size=config.world_size * factor, batch=batch)


def _best_at(found: Sequence[Timed], costs: GpuCosts, factor: float) -> Timed:
    """Returns the fastest on a network so many times as fast; the first, unless another is ahead of it."""
    other = GpuCosts(costs.device, replace(costs.cluster, node_gbit_s=costs.cluster.node_gbit_s * factor))
    rates = [one.rate(step_time(one.schedule, other)) for one in found]
    best = max(range(len(found)), key=lambda place: rates[place])
    return found[best] if rates[best] > AHEAD * rates[0] else found[0]


def _edge(best_at: Callable[[float], Timed], first: Timed, near: float, far: float) -> float:
    """Returns a factor at which another is ahead, within a few percent of the last at which `first` is."""
    for _ in range(4):
        middle = (near * far) ** 0.5
        near, far = (middle, far) if best_at(middle) is first else (near, middle)
    return far


def as_json(answer: FastestFound, costs: GpuCosts, none: str) -> dict[str, Any]:
    """Returns the plan as plain values: seconds, bytes, tokens per second and GPU. `none`: why none is recommended."""
    found = answer.timed
    return {
        "cluster": asdict(costs.cluster),
        "rows": [
            {"name": one.candidate.name, "micro_batch": one.cell.config.micro_batch,
             "accumulation": one.cell.config.accumulation, "peak_bytes": one.used.peak_bytes,
             "reserved_bytes": one.used.reserved_bytes,
             "step_s": one.time.step_s, "low_s": one.time.step_s * one.interval.low,
             "high_s": one.time.step_s * one.interval.high, "tokens_per_s_gpu": one.tokens_per_s,
             "exposed_s": one.time.exposed_s, "host_s": one.time.host_s, "binds": one.time.binds}
            for one in found
        ],
        "recommended": None if none else found[0].candidate.name, "sentence": none or sentence(answer, costs),
    }  # fmt: skip
