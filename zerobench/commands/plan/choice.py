"""The goals of a plan, and the row that each recommends.

cost    of a row that fits, the cheapest first: states that leave the device and come back in each step, then what goes
        between GPUs, then blocks that are computed again; between equals the strategy that partitions least
goal    what is looked for first, before the cost
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...config.cell import CellConfig
from ...config.schema import Gpt
from ...sizes import show_bytes
from .axis import Axis, fixed_axis, gpus_axis, layers_axis, micro_batch_axis
from .candidates import STRATEGIES
from .search import Probe, Row

OURS = ("zero1", "zero2", "zero3", "megatron")
"""Strategies of zerobench's engine; a plan that recommends another says so."""

LARGER = 1.02
"""A row with this many times the parameters of a cheaper one is worth its cost; below it is as large."""


@dataclass(frozen=True)
class Goal:
    """`axis`: of a plan for so many GPUs. `value`: of what was found, larger is better; 0 where only cost counts."""

    name: str
    axis: Callable[[int], Axis]
    value: Callable[[Probe], float]
    words: Callable[[Probe], str]
    why: str
    short: Callable[[Probe], str] = lambda _: "yes"


def _layers(config: CellConfig) -> int:
    return config.model.layers if isinstance(config.model, Gpt) else 0


def shape_words(config: CellConfig) -> str:
    """Names a GPT's shape: "48 x 1600"; empty for another model."""
    return f"{config.model.layers} x {config.model.hidden}" if isinstance(config.model, Gpt) else ""


def _model_words(probe: Probe) -> str:
    return f"{probe.used.psi / 1e9:.2f}B parameters, {shape_words(probe.cell.config)}"


GOALS = {
    goal.name: goal
    for goal in (
        Goal(
            "least_traffic", lambda _: fixed_axis(), lambda _: 0.0,
            lambda probe: f"{probe.used.volume_psi:.2f} ψ a step between GPUs", "moves the least of what fits",
        ),
        Goal(
            "largest_model", lambda _: layers_axis(), lambda probe: float(probe.used.psi), _model_words,
            "holds the largest model", lambda probe: f"{probe.used.psi / 1e9:.3g}B, {shape_words(probe.cell.config)}",
        ),
        Goal(
            "largest_batch", lambda _: micro_batch_axis(), lambda probe: float(probe.value),
            lambda probe: f"micro_batch={probe.value}", "holds the largest micro-batch",
        ),
        Goal(
            "fewest_gpus", gpus_axis, lambda probe: -float(probe.value),
            lambda probe: f"{probe.value} GPUs" if probe.value > 1 else "1 GPU", "needs the fewest GPUs",
        ),
    )
}  # fmt: skip
"""Goals by name, the default first."""


def cost(row: Row) -> tuple[bool, float, bool, int]:
    """Returns what a row that fits costs; rows are compared by it in order."""
    assert row.best is not None
    one = row.candidate
    place = STRATEGIES.index(one.strategy) if one.strategy in STRATEGIES else len(STRATEGIES)
    return one.offloads, round(row.best.used.volume_psi, 1), one.recomputes, place


def recommended(rows: Sequence[Row], goal: Goal) -> Row | None:
    """Returns the row to take: the furthest by the goal, of those about as far the cheapest; None where none fits."""
    fitting = [row for row in rows if row.best is not None]
    if not fitting:
        return None
    values = {id(row): goal.value(row.best) for row in fitting if row.best is not None}
    furthest = max(values.values())
    least = furthest / LARGER if furthest > 0 else furthest
    return min((row for row in fitting if values[id(row)] >= least), key=cost)


def sentence(rows: Sequence[Row], goal: Goal, usable_bytes: int) -> str:
    """Returns the recommendation with its reason, in one sentence."""
    row = recommended(rows, goal)
    assert row is not None
    assert row.best is not None
    whose = "" if row.candidate.strategy in OURS else " (PyTorch's own, not a strategy of zerobench)"
    free = show_bytes(usable_bytes - row.best.used.peak_bytes)
    said = f"Take {row.candidate.name}{whose}: it {goal.why} ({goal.words(row.best)}) and leaves {free} free"
    return f"{said}; {_others(rows, row, goal)}."


def _others(rows: Sequence[Row], row: Row, goal: Goal) -> str:
    """Returns why not another: the cheaper one that comes closest."""
    assert row.best is not None
    cheaper = [one for one in rows if one.best is not None and one is not row and cost(one) < cost(row)]
    if cheaper:
        next_ = max(cheaper, key=lambda one: goal.value(one.best) if one.best is not None else 0.0)
        assert next_.best is not None
        return f"{next_.candidate.name}, which costs less, ends at {goal.words(next_.best)}"
    unfit = [one for one in rows if one.best is None and one.candidate.recomputes == row.candidate.recomputes]
    before = [one for one in unfit if _place(one) < _place(row)]
    if before:
        names = ", ".join(dict.fromkeys(one.candidate.strategy for one in before))
        return f"{names} partition{'s' * (len(before) == 1)} less and cannot be had here"
    return "nothing else that was tried costs less"


def _place(row: Row) -> int:
    strategy = row.candidate.strategy
    return STRATEGIES.index(strategy) if strategy in STRATEGIES else len(STRATEGIES)
