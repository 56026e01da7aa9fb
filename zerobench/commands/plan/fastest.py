"""Goal `fastest`: of what fits, the predicted step on a cluster decides.

rows       strategies x activation policies, then variants of the leading strategies: prefetch, shards, nodes, shard
           groups, ZeRO++. What a variant changes is communication, or casts before it: if the step without any were not
           shorter by more than the interval, none is simulated, and the answer says so
verified   rows are simulated with few blocks; the row that is recommended, and its next micro-batch, with all of them
turn       the network, or the number of GPUs, at which another row would be ahead: schedules are laid out again for
           every network, and the leading strategies are simulated again on more GPUs with the same micro-batches
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from ...config import combinations
from ...config.cell import Cell
from ...config.keys import problems_of
from ...config.schema_memory import CHOICES
from ...records import EventRow
from ...strategies import built_in
from ...timing.costs import GpuCosts, Transfer
from ...zero.options import MASTERS
from .candidates import Candidate
from .search import FIXED, Plan, PlanAxis, PlanRow, timed_axis

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
"""Factors on the number of GPUs at which the leading strategies are simulated again."""


def find_fastest(
    plan: Plan, costs: GpuCosts, cells: Mapping[Candidate, Cell], batch: int | None, given: Collection[str]
) -> None:
    """Searches the rows, then variants of the leading strategies; the first is simulated whole. `batch`: samples of a
    step over all GPUs, or None; `given`: keys that the user set.
    """
    axis_of = partial(timed_axis, batch=batch)

    def axis_of_variant(cell: Cell) -> PlanAxis:
        """Returns the leader's micro-batch and, if that does not fit, the next smaller one."""
        axis = axis_of(cell)
        sizes = tuple(size for size in axis.values if size <= cell.config.micro_batch)[-2:]
        return replace(axis, values=sizes, first=(len(sizes) - 1,))

    plan.search(cells, axis_of)
    free = FreeCosts(replace(costs.device, contention=1.0), costs.cluster)
    more: dict[Candidate, Cell] = {}
    for row in _leaders(plan.ranked):
        step = row.fit.timed
        part = 1 - step.rate() / step.rate(free)
        if part >= 1 - step.interval.low:
            more |= _variants(row, costs, given)
            continue
        plan.notes.append(
            f"{row.candidate.name}: without any communication its step would be {part:.1%} shorter, less than the "
            "interval, so that prefetch, shards, groups and ZeRO++ were not varied"
        )
    plan.search(more, axis_of_variant)
    while plan.ranked and not plan.ranked[0].exact:  # if it does not fit with all its blocks, the next is the first
        first = plan.ranked[0]
        first.exact = True
        plan.simulate([[first], *([row] for row in on_more_gpus(plan))])
    plan.simulate([[row] for row in on_more_gpus(plan)])
    if plan.ranked:
        plan.turns = [turn_of_network(plan.ranked, costs), turn_of_gpus(plan)]


def _variants(row: PlanRow, costs: GpuCosts, given: Collection[str]) -> dict[Candidate, Cell]:
    """Returns the variants of a row that are valid and that the user's keys leave open."""
    cell, per_node = row.fit.cell, costs.cluster.devices_per_node
    config, strategy, known = cell.config, cell.config.strategy, built_in()
    composes = known[strategy.name].composes if strategy.name in known else None
    wanted: list[tuple[tuple[str, ...], dict[str, Any]]] = []
    others: list[dict[str, Any]] = []
    if (prefetch := getattr(strategy, "prefetch", None)) is not None:
        others += [{"prefetch": number} for number in PREFETCHES if number != prefetch]
    if getattr(strategy, "shards", None) == MASTERS and config.precision.name != "fp32":
        others += [{"shards": "parameters"}]
    for other in others:
        words = tuple(f"strategy.{key}={value}" for key, value in other.items())
        wanted.append((words, {"strategy": replace(strategy, **other)}))
    if config.world_size > per_node and composes is not None and composes.groups:
        nodes, word = {"node_size": per_node}, f"node_size={per_node}"
        wanted += [((word,), nodes), ((f"shard_group={per_node}",), {"shard_group": per_node})]
        if composes.zeropp:
            made = {name: make() for name, make in CHOICES.items() if name in ZEROPP}
            wanted += [((word, f"zeropp={name}"), nodes | {"zeropp": value}) for name, value in made.items()]
    found: dict[Candidate, Cell] = {}
    for words, changes in wanted:
        changed = cell.changed(**changes)
        if not {word.partition("=")[0] for word in words} & set(given) and not combinations.validate(changed.config):
            found[replace(row.candidate, more=words)] = changed
    return found


def _leaders(ranked: Sequence[PlanRow]) -> list[PlanRow]:
    """Returns the fastest row of each leading strategy."""
    best: dict[str, PlanRow] = {}
    for row in ranked:
        best.setdefault(row.candidate.strategy, row)
    return list(best.values())[:LEADERS]


class FreeCosts(GpuCosts):
    """Costs on GPUs whose collectives take no time but their launch."""

    def transfer(self, event: EventRow) -> Transfer:
        """Returns the cost of a collective: its launch."""
        return replace(super().transfer(event), wire_s=0.0)


# -- where another row is ahead --------------------------------------------------------------------


def turn_of_network(ranked: Sequence[PlanRow], costs: GpuCosts) -> str:
    """Returns a sentence on the nearest network at which another row is ahead."""
    network = costs.cluster.node_gbit_s
    if all(row.fit.cell.config.world_size <= costs.cluster.devices_per_node for row in ranked):
        return "All ranks are on one node, so that the network between nodes does not matter."
    best_at = partial(_best_at, ranked, costs)
    for words, factors in (("Below", SLOWER), ("Above", FASTER)):
        near = 1.0
        for far in factors:
            if best_at(far) is ranked[0]:
                near = far
                continue
            for _ in range(4):  # the edge, within a few percent
                middle = (near * far) ** 0.5
                near, far = (middle, far) if best_at(middle) is ranked[0] else (near, middle)
            return f"{words} {_rounded(network * far)} Gbit/s per node {best_at(far).candidate.name} is ahead."
    least, most = _rounded(network * SLOWER[-1]), _rounded(network * FASTER[-1])
    return f"No network from {least} to {most} Gbit/s per node changes that."


def _rounded(gbit_s: float) -> str:
    """Returns Gbit/s with two or three digits."""
    return f"{gbit_s:.2g}" if gbit_s < 100 else f"{round(gbit_s, -1):,.0f}"


def _best_at(ranked: Sequence[PlanRow], costs: GpuCosts, factor: float) -> PlanRow:
    """Returns the fastest on a network so many times as fast; the first, unless another is ahead of it."""
    other = GpuCosts(costs.device, replace(costs.cluster, node_gbit_s=costs.cluster.node_gbit_s * factor))
    first, *others = ranked
    least = AHEAD * first.fit.timed.rate(other)
    able = [row for row in others if factor > 1 or row.fit.timed.rate() > least]  # no step is shorter on a slower one
    rates = [row.fit.timed.rate(other) for row in able]
    return able[rates.index(max(rates))] if rates and max(rates) > least else first


def _larger(row: PlanRow, factor: int) -> Cell:
    """Returns the cell of a row that fits on so many times as many GPUs, with the same micro-batch."""
    cell, config = row.fit.cell, row.fit.cell.config
    return cell.changed(world_size=config.world_size * factor, batch=config.batch and config.batch * factor)


def on_more_gpus(plan: Plan) -> list[PlanRow]:
    """Returns new rows: the leaders on more GPUs, up to the most ranks of a world, unless their cells are known."""
    leaders, new = _leaders(plan.ranked), list[PlanRow]()
    for row, factor in product(leaders if len(leaders) > 1 else (), MORE_GPUS):
        cell = _larger(row, factor)
        if cell.config.cell_id not in plan.larger and not problems_of(cell.config):
            new.append(PlanRow(row.candidate, cell, FIXED, exact=False))
            plan.larger[cell.config.cell_id] = new[-1]
    return new


def turn_of_gpus(plan: Plan) -> str:
    """Returns a sentence on the first larger number of GPUs at which another strategy is ahead; empty if no other
    strategy fits, or no larger world may be simulated.
    """
    leaders, tried = _leaders(plan.ranked), list[str]()
    for factor in MORE_GPUS:
        cells = [_larger(row, factor).config for row in leaders]
        rows = [plan.larger[config.cell_id] for config in cells if config.cell_id in plan.larger]
        if len(rows) < LEADERS:
            break
        gpus = f"On {cells[0].world_size:,} GPUs"
        if problem := next((row.problem for row in rows if row.problem), ""):
            return f"{gpus} nothing is predicted: {problem}."
        rates = [row.probes[0].timed.rate() for row in rows]
        best = leaders[rates.index(max(rates))]
        if max(rates) > AHEAD * rates[0]:
            return f"{gpus} with the same micro-batches {best.candidate.name} is ahead."
        tried.append(f"{cells[0].world_size:,}")
    if not tried:
        return ""
    return f"On {' and '.join(tried)} GPUs with the same micro-batches {leaders[0].candidate.name} stays ahead."
