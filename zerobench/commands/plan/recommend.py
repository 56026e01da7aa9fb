"""The goals of a plan, the row that each recommends, and the plan as text (the table of candidates, the commands that
confirm it) and as JSON.

cost    of a row that fits, cheapest first: states that leave the device and return in each step, then traffic between
        GPUs, then recomputed blocks; among equals the strategy that partitions least
goal    the quantity that is optimized first, before the cost
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...config.cell import CellConfig
from ...config.schema import Gpt
from ...sizes import show_bytes
from .candidates import AXES, STRATEGIES, Capacity, name_of
from .search import INTERRUPTED, ExecutedCell, PlanAxis, PlanRow, fixed_axis, gpus_axis, layers_axis, micro_batch_axis

OURS = ("zero1", "zero2", "zero3", "megatron")
"""Strategies of zerobench's engine; a plan that recommends another one says so."""

LARGER = 1.02
"""A row is worth its cost if it has this many times the parameters of a cheaper one; otherwise they count as equal."""


FASTEST = "fastest"
"""Goal of the shortest step on a described cluster (fastest.py)."""

LEAST_TRAFFIC = "least_traffic"

CUT_SHORT = f"{INTERRUPTED}: the table has the rows that were complete, and none is recommended"


@dataclass(frozen=True)
class Goal:
    """`axis`: for a given number of GPUs. `value`: of a result, larger is better; 0 if only cost counts."""

    name: str
    axis: Callable[[int], PlanAxis]
    value: Callable[[ExecutedCell], float]
    words: Callable[[ExecutedCell], str]
    why: str
    short: Callable[[ExecutedCell], str] = lambda _: "yes"


def shape_words(config: CellConfig) -> str:
    """Formats a GPT's shape: "48 x 1600"; empty for another model."""
    return f"{config.model.layers} x {config.model.hidden}" if isinstance(config.model, Gpt) else ""


def _model_words(probe: ExecutedCell) -> str:
    return f"{probe.used.numel / 1e9:.2f}B parameters, {shape_words(probe.cell.config)}"


def _traffic_words(probe: ExecutedCell) -> str:
    used = probe.used
    words, elements = f"{used.volume_psi:.2f} ψ a step between GPUs", used.volume_psi * used.psi
    return words + f", {elements:,.0f} elements beside {used.frozen:,} frozen parameters" * (used.frozen > 0)


GOALS = {
    goal.name: goal
    for goal in (
        Goal(
            LEAST_TRAFFIC, lambda _: fixed_axis(), lambda _: 0.0,
            _traffic_words, "sends the least of those that fit",
        ),
        Goal(
            "largest_model", lambda _: layers_axis(), lambda probe: float(probe.used.numel), _model_words,
            "holds the largest model", lambda probe: f"{probe.used.numel / 1e9:.3g}B, {shape_words(probe.cell.config)}",
        ),
        Goal(
            "largest_batch", lambda _: micro_batch_axis(), lambda probe: float(probe.value),
            lambda probe: f"micro_batch={probe.value}", "holds the largest micro-batch",
        ),
        Goal(
            "fewest_gpus", gpus_axis, lambda probe: -float(probe.value),
            lambda probe: f"{probe.value} GPUs" if probe.value > 1 else "1 GPU", "needs the fewest GPUs",
        ),
        Goal(
            FASTEST, lambda _: micro_batch_axis(), lambda probe: float(probe.value),
            lambda probe: f"micro_batch={probe.value}", "is predicted to be the fastest",
        ),
    )
}  # fmt: skip
"""Goals by name, the default first."""


def cost(row: PlanRow) -> tuple[bool, float, bool, int]:
    """Returns the cost of a row that fits, as a sort key."""
    assert row.best is not None
    candidate = row.candidate
    return candidate.offloads, round(row.best.used.volume_psi, 1), candidate.recomputes, _place(row)


def recommended(rows: Sequence[PlanRow], goal: Goal) -> PlanRow | None:
    """Returns the cheapest of the rows that are about the best by the goal; None if none fits, or not all are known."""
    fitting = [row for row in rows if row.best is not None]
    if not fitting or is_interrupted(rows):
        return None
    values = {id(row): goal.value(row.best) for row in fitting if row.best is not None}
    furthest = max(values.values())
    least = furthest / LARGER if furthest > 0 else furthest
    return min((row for row in fitting if values[id(row)] >= least), key=cost)


def rule_of(capacity: Capacity, device: str) -> str:
    """Returns the rule by which a row fits."""
    what = "what the allocator reserves" if device == "cuda" else "its peak"
    usable = f"{show_bytes(capacity.usable_bytes)} of {show_bytes(capacity.device_bytes)}"
    return f"a row fits if {what} is at most {usable} ({capacity.reserve:.0%} are kept free)"


def is_interrupted(rows: Sequence[PlanRow]) -> bool:
    """Returns True if the user interrupted the search of a row."""
    return any(row.problem == INTERRUPTED for row in rows)


def found_words(row: PlanRow, goal: Goal) -> str:
    """Returns the end of a row's search in words: what fits, or why nothing does."""
    if row.best is not None:
        return f"fits, {goal.words(row.best)}, {row.best.used.held_words}"
    return f"does not fit, {row.beyond.used.held_words}" if row.beyond else row.problem


def sentence(rows: Sequence[PlanRow], goal: Goal, usable_bytes: int) -> str:
    """Returns the recommendation with its reason."""
    row = recommended(rows, goal)
    assert row is not None
    assert row.best is not None
    whose = "" if row.candidate.strategy in OURS else " (PyTorch's own, not a strategy of zerobench)"
    free = show_bytes(usable_bytes - row.best.used.held_bytes)
    take = f"Take {row.candidate.name}{whose}: it {goal.why} ({goal.words(row.best)}) and leaves {free} free"
    return f"{take}; {_others(rows, row, goal)}."


def _others(rows: Sequence[PlanRow], row: PlanRow, goal: Goal) -> str:
    """Returns why the alternatives were not chosen: for cheaper rows, the one that comes closest."""
    cheaper = {other.candidate.name: other.best for other in rows if other.best and cost(other) < cost(row)}
    if cheaper:
        name = max(cheaper, key=lambda name: goal.value(cheaper[name]))
        return f"{name}, which costs less, ends at {goal.words(cheaper[name])}"
    unfit = [r for r in rows if r.best is None and r.candidate.recomputes == row.candidate.recomputes]
    names = [other.candidate.strategy for other in unfit if _place(other) < _place(row)]
    if names:
        return f"{', '.join(dict.fromkeys(names))} partition{'s' * (len(names) == 1)} less and cannot be had here"
    return "nothing else that was tried costs less"


def _place(row: PlanRow) -> int:
    strategy = row.candidate.strategy
    return STRATEGIES.index(strategy) if strategy in STRATEGIES else len(STRATEGIES)


# -- the plan in words -----------------------------------------------------------------------------


HEADER = ["strategy", "fits", "peak", "reserved", "free", "host", "files", "ψ moved", "binds", "largest tensor"]
SOMETIMES = ("reserved", "host", "files")
"""Columns that are shown only if any row has such bytes."""

FIRST_TO_GO = ("largest tensor", "peak", "host", "files", "free", "ψ moved")
WORDS = ("strategy", "fits", "binds", "largest tensor")

NAME_WIDTH = 44
"""Characters of a tensor's name in the table; JSON has all of them."""

HELPS = {
    "activations": "activation=checkpoint, a smaller micro_batch or sequence, model.mlp_chunks=8",
    "temporary": "model.loss_chunks=8 (logits and the loss), a smaller micro_batch, model.tiles=4 under zero3",
    "parameters": "model.tiles=4 under zero3 (each matrix is gathered in parts), offload=cpu, more --gpus",
    "gradients": "zero2 or zero3, model.tiles=4 under zero3, offload=cpu, more --gpus",
    "master": "zero1 or beyond, offload=cpu or nvme, more --gpus",
    "optimizer": "zero1 or beyond, offload=cpu or nvme, more --gpus",
    "communication": "smaller buckets (strategy.bucket_bytes), model.tiles=4 under zero3",
    "inputs": "a smaller micro_batch or sequence",
}
"""Category that binds -> settings that make it smaller."""


def table_of(rows: Sequence[PlanRow], capacity: Capacity, goal: Goal) -> tuple[list[str], list[list[str]]]:
    """Returns header and lines of the table, without empty columns and interrupted rows."""
    lines = [_line(row, capacity, goal) for row in rows if row.problem != INTERRUPTED]
    kept = [n for n, name in enumerate(HEADER) if name not in SOMETIMES or any(line[n] != "–" for line in lines)]
    return [HEADER[n] for n in kept], [[line[n] for n in kept] for line in lines]


def _line(row: PlanRow, capacity: Capacity, goal: Goal) -> list[str]:
    shown = row.best or row.beyond
    if shown is None:
        states = f"states alone {show_bytes(row.bound_bytes)}" if row.bound_bytes else "–"
        return [row.candidate.name, "no", *["–"] * (len(HEADER) - 3), states]
    used, fits = shown.used, goal.short(shown) if row.best else "no"
    sizes = [used.peak_bytes, used.reserved_bytes, capacity.usable_bytes - used.held_bytes]
    sizes += [used.host_bytes or None, used.file_bytes or None]
    binds = f"{used.binding} {used.at_peak[used.binding] / (sum(used.at_peak.values()) or 1):.0%}"
    largest = f"{show_bytes(used.largest.bytes)} {name_of(used.largest)[:NAME_WIDTH]}" if used.largest else "–"
    fits = "≥ " * (row.at_end and fits != "yes") + fits
    return [row.candidate.name, fits, *map(show_bytes, sizes), f"{used.volume_psi:.2f}", binds, largest]


def notes_of(rows: Sequence[PlanRow]) -> list[str]:
    """Returns why rows were not simulated, one line per reason."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.problem and row.bound_bytes is None:
            reasons.setdefault(row.problem, []).append(row.candidate.name)
    return [f"not simulated: {', '.join(names)}: {why}" for why, names in reasons.items()]


def nothing_fits(rows: Sequence[PlanRow], capacity: Capacity) -> str:
    """Returns why nothing is recommended; if nothing fits, the smallest device that would do and what would help."""
    if is_interrupted(rows):
        return CUT_SHORT
    tried = [probe for row in rows for probe in row.probes]
    if not tried:
        return f"no cell could be simulated: {'; '.join(dict.fromkeys(row.problem for row in rows))}"
    least = min(tried, key=lambda probe: (capacity.load(probe.used), probe.used.held_bytes))
    used, tier = least.used, capacity.fullest(least.used)
    row = next(row for row in rows if least in row.probes)
    if tier != "device":
        held, key = used.bytes_in(tier), {"host": "--host-memory", "nvme": "--disk"}[tier]
        return f"nothing fits: {row.candidate.name} needs {show_bytes(held)} of {tier} per GPU; raise {key}"
    needed = show_bytes(capacity.smallest_device(used))
    return (
        f"nothing fits {show_bytes(capacity.device_bytes)}: the least is {row.candidate.name} with "
        f"{used.held_words}, so the smallest device that would do has {needed}; "
        f"what binds most is {used.binding} ({show_bytes(used.at_peak[used.binding])}; the largest tensor has "
        f"{show_bytes(used.largest.bytes if used.largest else None)}: {name_of(used.largest)}), and what would help is "
        f"{HELPS[used.binding]}"
    )


def overrides_of(probe: ExecutedCell, row: PlanRow, words: Sequence[str], goal: Goal) -> list[str]:
    """Returns the overrides that compose to a simulated cell, without the device and the world."""
    model, candidate, changed = probe.cell.config.model, row.candidate, dict[str, Any]()
    if goal.name == "largest_model":
        changed = {f"model.{key}": getattr(model, key) for key in ("layers", "hidden", "heads")}
    elif goal.name == "largest_batch":
        changed = {"micro_batch": probe.value}
    own = {key: getattr(candidate, key) for key in AXES if getattr(candidate, key) != "none"}
    without = (*changed, "world_size", "backend", "tensors", "device", "draw_on")
    kept = [word for word in words if word.partition("=")[0] not in without]
    return [*(f"{key}={value}" for key, value in own.items()), *kept, *(f"{k}={v}" for k, v in changed.items())]


def commands_of(probe: ExecutedCell, row: PlanRow, words: Sequence[str], goal: Goal, device: str) -> list[str]:
    """Returns the commands that confirm a plan: one rank on one device first, then the whole world."""
    overrides, ranks = overrides_of(probe, row, words, goal), probe.cell.config.world_size
    line = " ".join(shlex.quote(word) for word in overrides)
    one_rank = f"zerobench {line} world_size={ranks} device={device} backend=simulated measure.warmup=2 measure.steps=1"
    one_rank += " draw_on=device" * (device == "cuda")
    per_node = min(ranks, 8)
    nodes = f" --nnodes {ranks // per_node} --rdzv-backend c10d --rdzv-endpoint HOST:29400" * (ranks > per_node)
    whole = f"torchrun{nodes} --nproc-per-node {per_node} -m zerobench {line} device={device}"
    return [one_rank, whole]


def as_json(
    rows: Sequence[PlanRow], capacity: Capacity, goal: Goal, words: Sequence[str], device: str
) -> dict[str, Any]:
    """Returns the plan as plain values: sizes in bytes, volumes in ψ."""
    best = recommended(rows, goal)
    plan: dict[str, Any] = {
        "goal": goal.name, "device": device, "overrides": list(words), "device_bytes": capacity.device_bytes,
        "usable_bytes": capacity.usable_bytes, "host_bytes": capacity.host_bytes, "disk_bytes": capacity.disk_bytes,
        "rows": [
            {
                **{key: getattr(row.candidate, key) for key in AXES}, "problem": row.problem,
                "best": _probe_as_json(row.best), "beyond": _probe_as_json(row.beyond), "at_end": row.at_end,
                "bound_bytes": row.bound_bytes, "executed": len(row.probes),
            }
            for row in rows
        ],
        "recommended": best.candidate.name if best else None,
        "sentence": sentence(rows, goal, capacity.usable_bytes) if best else nothing_fits(rows, capacity),
    }  # fmt: skip
    if best is not None and best.best is not None:
        plan["commands"] = commands_of(best.best, best, words, goal, device)
    return plan


def _probe_as_json(probe: ExecutedCell | None) -> dict[str, Any] | None:
    if probe is None:
        return None
    used, config = probe.used, probe.cell.config
    return {key: value for key, value in vars(used).items() if key != "largest"} | {
        "shape": shape_words(config), "gpus": config.world_size, "micro_batch": config.micro_batch,
        "binds": used.binding, "largest_tensor": name_of(used.largest),
        "largest_tensor_bytes": used.largest.bytes if used.largest else None,
    }  # fmt: skip
