"""Goal `fastest`: of what fits, the predicted step on a cluster decides.

rows       strategies x activation policies, then variants of the leading strategies: prefetch, shards, nodes, shard
           groups, ZeRO++. A variant changes only communication, or casts before it: if a step without communication is
           not shorter by more than the interval, no variant is simulated, and the answer says so
judged     rows are searched with few blocks, by their peak, and timed at the largest micro-batch that fits so. Rows
           that can win are simulated again with all blocks and must fit with the allocator's reserved bytes. If this
           requires a smaller micro-batch, the rows are ranked again. The others are slower even with the larger one
shared     a simulation with few blocks gives both peak and step; rows with the same activations begin close to the
           answer of the first of them; simulations that need no earlier result run in parallel with judged rows
ahead      faster by more than the interval; anything else is a tie, in every sentence
turn       the network, or the number of GPUs, at which another row would be ahead: schedules are laid out again for
           every network, and the leading strategies are simulated again on more GPUs with the same micro-batches
trade      the first, with its blocks recomputed or kept, at the same micro-batch
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

from ...config import combinations
from ...config.cell import Cell
from ...config.keys import problems_of
from ...config.schema_memory import CHOICES
from ...records import EventRow
from ...simulation.costs import GpuCosts, Transfer
from ...sizes import show_bytes
from ...strategies import built_in
from ...zero.options import MASTERS
from ..simulated import Step
from .candidates import Candidate
from .search import FIXED, Capacity, Plan, PlanAxis, PlanRow, timed_axis

LEADERS = 2
"""Strategies whose variants are tried."""

PREFETCHES = (0, 2)
ZEROPP = ("hpz", "all")
"""Values that are tried; others are tried if the user gives them."""

SLOWER = (0.5, 0.25, 0.1, 0.05, 0.02, 0.01)
FASTER = (2.0, 4.0)
"""Factors on the network at which the ranking is asked for again."""

MORE_GPUS = (4, 16)
"""Factors on the number of GPUs at which the leading strategies are simulated again."""

LATER = LEADERS + LEADERS * len(MORE_GPUS) + 1
"""Simulations after the searches: rows that are judged, the leaders on more GPUs, and the trade; without variants."""


def find_fastest(
    plan: Plan, costs: GpuCosts, cells: Mapping[Candidate, Cell], batch: int | None, given: Collection[str]
) -> None:
    """Searches the rows, then variants of the leading strategies; judges those that the answer names. `batch`: samples
    of a step over all GPUs, or None; `given`: keys that the user set.
    """
    axis_of = partial(timed_axis, batch=batch)

    def axis_of_variant(cell: Cell) -> PlanAxis:
        """Returns the leader's micro-batch and, if that does not fit, the next smaller one."""
        axis = axis_of(cell)
        sizes = tuple(size for size in axis.values if size <= cell.config.micro_batch)[-2:]
        return replace(axis, values=sizes, first=(len(sizes) - 1,))

    def in_answer() -> list[PlanRow]:
        """Returns the rows that the answer calls ahead, on this cluster or another one, or tied with the first row."""
        if not plan.ranked:
            return []
        turns = [*turn_of_network(plan.ranked, costs)[1], *turn_of_gpus(plan)[1]]
        return [*that_can_win(plan.ranked), *turns]

    plan.later = LATER
    plan.search(cells, axis_of)
    free = FreeCosts(replace(costs.device, contention=1.0), costs.cluster)
    varied: set[Candidate] = set()
    trades: dict[str, list[PlanRow]] = {}
    while True:  # a leader is varied, or simulated on more GPUs, once it is judged, while others still are
        ranked = [row for row in plan.ranked if row.candidate in cells]
        due, variants, others = _unjudged(plan, that_can_win(ranked)), dict[Candidate, Cell](), list[PlanRow]()
        for row in _leaders(ranked):
            if row in due or row.candidate in varied:
                continue
            varied.add(row.candidate)
            step = row.fit.timed
            part = 1 - step.rate() / step.rate(free)
            if part >= 1 - step.interval.low:
                variants |= _variants(row, costs, given)
                continue
            plan.notes.append(
                f"{row.candidate.name}: without any communication its step would be {part:.1%} shorter, less than the "
                "interval, so that prefetch, shards, groups and ZeRO++ were not varied"
            )
        if not variants and plan.ranked:
            due = due or _unjudged(plan, in_answer())
            others = on_more_gpus(plan, due)
            if (first := plan.ranked[0]) not in due and first.fit.cell.cell_id not in trades:
                trades[first.fit.cell.cell_id] = recomputed_or_kept(first, cells)
                others += trades[first.fit.cell.cell_id]
        if not due and not variants and not others:
            break
        plan.search(variants, axis_of_variant, (*due, *others))
    plan.later = 0
    if not (ranked := plan.ranked):
        return
    trade = [trade_of(ranked[0], row, plan.capacity) for row in trades[ranked[0].fit.cell.cell_id]]
    plan.turns = [*trade, turn_of_network(ranked, costs)[0], turn_of_gpus(plan)[0]]


def that_can_win(ranked: Sequence[PlanRow]) -> list[PlanRow]:
    """Returns the first row, and the second one that the recommendation names unless the first is ahead of it."""
    return [row for row in leading(ranked) if row is ranked[0] or not ranked[0].fit.timed.is_ahead(row.fit.timed)]


def leading(ranked: Sequence[PlanRow]) -> list[PlanRow]:
    """Returns the rows that the recommendation names: the first, and the next of another strategy, if there is one."""
    return [*_leaders(ranked), *ranked[1:2]][:LEADERS]


def _unjudged(plan: Plan, rows: Sequence[PlanRow]) -> list[PlanRow]:
    """Returns the `rows` that are still to be simulated with all their blocks; if none fits, the closest to it, since
    the answer names the device that would do.
    """
    due = [row for row in rows if not row.fit.whole]
    if not plan.ranked and plan.least and not plan.least[0].whole and not plan.least[1].problem:
        due = [plan.least[1]]
    for row in due:
        row.exact = True
    return due


def _variants(row: PlanRow, costs: GpuCosts, given: Collection[str]) -> dict[Candidate, Cell]:
    """Returns the variants of a row that are valid and that the user's keys leave open."""
    cell, per_node = row.fit.cell, costs.cluster.devices_per_node
    config, strategy, registered = cell.config, cell.config.strategy, built_in()
    composes = registered[strategy.name].composes if strategy.name in registered else None
    options: list[tuple[str, Any]] = []
    if (prefetch := getattr(strategy, "prefetch", None)) is not None:
        options += [("prefetch", number) for number in PREFETCHES if number != prefetch]
    if getattr(strategy, "shards", None) == MASTERS and config.precision.name != "fp32":
        options += [("shards", "parameters")]
    changes: dict[tuple[str, ...], dict[str, Any]] = {
        (f"strategy.{key}={value}",): {"strategy": replace(strategy, **{key: value})} for key, value in options
    }
    if config.world_size > per_node and composes is not None and composes.groups:
        nodes = f"node_size={per_node}"
        changes[(nodes,)] = {"node_size": per_node}
        changes[(f"shard_group={per_node}",)] = {"shard_group": per_node}
        for name in (name for name in CHOICES if name in ZEROPP and composes.zeropp):
            changes[nodes, f"zeropp={name}"] = {"node_size": per_node, "zeropp": CHOICES[name]()}
    variants: dict[Candidate, Cell] = {}
    for overrides, changed in changes.items():
        variant, keys = cell.changed(**changed), {override.partition("=")[0] for override in overrides}
        if not keys & set(given) and not combinations.validate(variant.config):
            variants[replace(row.candidate, more=overrides)] = variant
    return variants


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


def _only_timed(candidate: Candidate, cell: Cell) -> PlanRow:
    """Returns a row whose step is predicted, whether it fits or not."""
    return PlanRow(candidate, cell, FIXED, timed=True, exact=False, loads={0: 0.0})


# -- the same micro-batch, recomputed or kept ------------------------------------------------------


def recomputed_or_kept(first: PlanRow, cells: Mapping[Candidate, Cell]) -> list[PlanRow]:
    """Returns a new row: the first's cell with its blocks recomputed or, if they are, with their activations kept; none
    unless `cells` has both.
    """
    own, cell = first.candidate, first.fit.cell
    others = [
        (other.activation, other_cell.config.activation)
        for other, other_cell in cells.items()
        if other.strategy == own.strategy and other.recomputes != own.recomputes and not other_cell.problems
    ]
    rows = (_only_timed(replace(own, activation=name), cell.changed(activation=policy)) for name, policy in others)
    return list(rows)[:1]


def trade_of(first: PlanRow, other: PlanRow, capacity: Capacity) -> str:
    """Returns a sentence on the time and the memory of recomputing at the first's micro-batch; empty if it failed."""
    if other.problem:
        return ""
    here, there = first.fit, other.probes[0]
    change = there.timed.time.step_s / here.timed.time.step_s - 1
    does, takes = ("Keeping the activations of", "less time")
    if other.candidate.recomputes:
        does, takes = "Recomputing", "longer"
    message = f"{does} its blocks at the same micro-batch takes {abs(change):.1%} {takes}, and its peak is "
    message += f"{show_bytes(there.device_peak_bytes)} instead of {show_bytes(here.device_peak_bytes)}"
    return f"{message}, which does not fit." if capacity.load(there.bytes_in) > 1 else f"{message}."


# -- where another row is ahead --------------------------------------------------------------------


def turn_of_network(ranked: Sequence[PlanRow], costs: GpuCosts) -> tuple[str, list[PlanRow]]:
    """Returns a sentence on the nearest network at which another row is ahead, and that row, if there is one."""
    network = costs.cluster.node_gbit_s
    if all(row.fit.config.world_size <= costs.cluster.devices_per_node for row in ranked):
        return "All ranks are on one node, so that the network between nodes does not matter.", []
    best_at = partial(_best_at, ranked, costs)
    for side, factors in (("Below", SLOWER), ("Above", FASTER)):
        near = 1.0
        for far in factors:
            if best_at(far) is ranked[0]:
                near = far
                continue
            for _ in range(4):  # the edge, within a few percent
                middle = (near * far) ** 0.5
                near, far = (middle, far) if best_at(middle) is ranked[0] else (near, middle)
            best = best_at(far)
            return f"{side} {_rounded(network * far)} Gbit/s per node {best.candidate.name} is ahead.", [best]
    least, most = _rounded(network * SLOWER[-1]), _rounded(network * FASTER[-1])
    return f"On no network from {least} to {most} Gbit/s per node is another one ahead.", []


def _rounded(gbit_s: float) -> str:
    """Returns Gbit/s with two or three digits."""
    return f"{gbit_s:.2g}" if gbit_s < 100 else f"{round(gbit_s, -1):,.0f}"


def _best_at(ranked: Sequence[PlanRow], costs: GpuCosts, factor: float) -> PlanRow:
    """Returns the fastest row on a network `factor` times as fast: the first row unless another one is ahead."""
    other = _on_network(costs, factor)
    first, *others = ranked
    rate = _rate(first.fit.timed, other)
    best, best_rate = first, 0.0
    for row in others:
        step = row.fit.timed
        least = rate * step.interval.high  # at which it is ahead
        if factor <= 1 and step.rate() < max(least, best_rate):  # a slower network shortens no step
            continue
        if (own := _rate(step, other)) >= least and own > best_rate:
            best, best_rate = row, own
    return best


@lru_cache
def _on_network(costs: GpuCosts, factor: float) -> GpuCosts:
    return GpuCosts(costs.device, replace(costs.cluster, node_gbit_s=costs.cluster.node_gbit_s * factor))


@lru_cache(4096)
def _rate(step: Step, costs: GpuCosts) -> float:
    """Returns the rate of a step, which is asked for again whenever another row has been judged."""
    return step.rate(costs)


def _larger(row: PlanRow, factor: int) -> Cell:
    """Returns the cell of a row that fits on so many times as many GPUs, with the same micro-batch."""
    cell, config = row.fit.cell, row.fit.config
    return cell.changed(world_size=config.world_size * factor, batch=config.batch and config.batch * factor)


def on_more_gpus(plan: Plan, unjudged: Collection[PlanRow]) -> list[PlanRow]:
    """Returns new rows: the leaders on more GPUs, up to the most ranks of a world, except those that are `unjudged` and
    those whose cells are known.
    """
    leaders, new = _leaders(plan.ranked), list[PlanRow]()
    for row, factor in product(leaders if len(leaders) > 1 else (), MORE_GPUS):
        if row in unjudged:
            continue
        cell = _larger(row, factor)
        if cell.config.cell_id not in plan.larger and not problems_of(cell.config):
            new.append(_only_timed(row.candidate, cell))
            plan.larger[cell.config.cell_id] = new[-1]
    return new


def turn_of_gpus(plan: Plan) -> tuple[str, list[PlanRow]]:
    """Returns a sentence on which of the two leading strategies is ahead on more GPUs, and the rows that are ahead.
    Both are empty if only one strategy fits, or if no larger world may be simulated.
    """
    leaders, gpus_by_result, ahead = _leaders(plan.ranked), dict[str, list[str]](), list[PlanRow]()
    for factor in MORE_GPUS:
        cells = [_larger(row, factor).config for row in leaders]
        rows = [plan.larger[config.cell_id] for config in cells if config.cell_id in plan.larger]
        if len(rows) < LEADERS:
            break
        if problem := next((row.problem for row in rows if row.problem), ""):
            result = f"nothing is predicted: {problem}"
        else:
            first, second = (row.probes[0].timed for row in rows)
            best = leaders[second.rate() > first.rate()]
            result = "it is a tie"
            if first.is_ahead(second) or second.is_ahead(first):
                ahead.append(best)
                result = f"{best.candidate.name} is ahead"
        gpus_by_result.setdefault(result, []).append(f"{cells[0].world_size:,}")
    parts = [f"on {' and '.join(gpus)} GPUs {result}" for result, gpus in gpus_by_result.items()]
    return f"With the same micro-batches, {', '.join(parts)}." if parts else "", ahead
