"""The answer of a plan: its goal, the row that it recommends, and the plan as text and JSON.

cost    of a row that fits, cheapest first: states that leave the device and return in each step, then traffic between
        GPUs, then recomputed blocks; among equals the strategy that partitions least
goal    the quantity that is optimized first, before the cost
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...config.cell import Cell
from ...config.schema import Transformer
from ...host.terminal import print_on, stdout_console
from ...results.grid import Grid
from ...results.options import show_price
from ...sizes import counted, show_bytes, show_count
from ...strategies.table import names_with
from ..predict import show_time
from ..reserved import reserved_table
from ..simulated import SimulatedCell, Step
from . import search
from .candidates import AXES
from .fastest import leading

OURS = ("zero1", "zero2", "zero3", "megatron")
"""Strategies of zerobench's engine; a plan that recommends another one says so."""

LARGER = 1.02
"""A row is worth its cost if it has this many times the parameters of a cheaper one; otherwise they count as equal."""

FASTEST, LEAST_TRAFFIC = "fastest", "least_traffic"

CUT_OFF = ("largest_model", "largest_batch")
"""Goals whose search ends at a largest value that is tried, though a larger one might fit."""

CUT_SHORT = f"{search.INTERRUPTED}: the table has the rows that were complete, and none is recommended"

BYTES_ALONE = (
    "Only bytes were compared, with the same micro-batch for all. Which is fastest depends on the cluster and on the "
    "micro-batch that fits: add --goal fastest --cluster NAME (names: zerobench predict --help)"
)


@dataclass(frozen=True)
class Goal:
    """`varies`: keys that the search varies, so that the user must not set them. `value`: rates a result, larger is
    better; 0 if only cost counts. `slack`: results within this factor of the best one count as equal to it.
    """

    axis: Callable[[Cell], search.PlanAxis]
    varies: tuple[str, ...]
    value: Callable[[SimulatedCell], float]
    detail: Callable[[SimulatedCell], str]
    why: str
    short: Callable[[SimulatedCell], str] = lambda _: "yes"
    slack: float = LARGER


def _traffic(cell: SimulatedCell) -> str:
    text, elements = f"{cell.volume_psi:.2f} ψ a step between GPUs", cell.volume_elements
    frozen = f", {elements:,.0f} elements beside {cell.frozen:,} frozen parameters" if cell.frozen else ""
    return text + frozen


def _micro_batch(cell: SimulatedCell) -> str:
    return f"micro_batch={cell.config.micro_batch}"


def _gpus(cell: SimulatedCell) -> str:
    return show_count(cell.config.world_size, "GPU")


def _shape(cell: SimulatedCell) -> str:
    """Returns a GPT's shape: "48 x 1600"; empty for another model."""
    model = cell.config.model
    return f"{model.layers} x {model.hidden}" if isinstance(model, Transformer) else ""


def _held(cell: SimulatedCell) -> str:
    """Returns the bytes that must fit as text: "9.66 GiB reserved"."""
    return f"{show_bytes(cell.held_bytes)} {'reserved' if cell.reserved_high_bytes else 'at its peak'}"


def _binding(cell: SimulatedCell) -> str:
    """Returns the category with the largest share of the peak."""
    return max(cell.at_peak, key=lambda category: cell.at_peak[category])


def _largest(cell: SimulatedCell) -> str:
    """Returns a short name of the largest storage: its label or the line that made it, and its module."""
    if (tensor := cell.largest) is None:
        return "–"
    name = tensor.name or tensor.source.replace("zerobench/", "", 1) or tensor.module or tensor.category
    return f"{name} in {tensor.module}" if tensor.module and tensor.module not in name else name


GOALS = {
    LEAST_TRAFFIC: Goal(lambda _: search.FIXED, (), lambda _: 0.0, _traffic, "sends the least of those that fit"),
    "largest_model": Goal(
        lambda _: search.LAYERS, ("model.layers",), lambda cell: float(cell.psi + cell.frozen),
        lambda cell: f"{(cell.psi + cell.frozen) / 1e9:.2f}B parameters, {_shape(cell)}", "holds the largest model",
        lambda cell: f"{(cell.psi + cell.frozen) / 1e9:.3g}B, {_shape(cell)}",
    ),
    "largest_batch": Goal(
        lambda _: search.MICRO_BATCHES, ("micro_batch", "batch"), lambda cell: float(cell.config.micro_batch),
        _micro_batch, "holds the largest micro-batch", lambda cell: str(cell.config.micro_batch),
    ),
    "fewest_gpus": Goal(
        search.gpus_axis, ("batch",), lambda cell: -float(cell.config.world_size), _gpus, "needs the fewest GPUs", _gpus
    ),
    FASTEST: Goal(search.timed_axis, ("micro_batch",), lambda cell: cell.timed.rate(), _micro_batch, "", slack=1),
}  # fmt: skip
"""Goals by name, the default first."""


def recommended(plan: search.Plan) -> search.PlanRow | None:
    """Returns the cheapest of the rows that are about the best by the goal; None if none fits, or not all are known."""
    if not plan.fitting or plan.interrupted:
        return None
    goal = GOALS[plan.goal]
    furthest = max(goal.value(row.fit) for row in plan.fitting)
    least = furthest / goal.slack if furthest > 0 else furthest
    return min((row for row in plan.fitting if goal.value(row.fit) >= least), key=cost)


def cost(row: search.PlanRow) -> tuple[bool, float, bool, int]:
    """Returns the cost of a row that fits, as a sort key."""
    candidate = row.candidate
    return candidate.offloads, round(row.fit.volume_psi, 1), candidate.recomputes, candidate.rank


# -- sentences -------------------------------------------------------------------------------------


def result_of(row: search.PlanRow, goal: Goal) -> str:
    """Returns what fits of a row, or why nothing does."""
    if row.best is not None:
        return f"fits, {goal.detail(row.best)}, {_held(row.best)}"
    return f"does not fit, {_held(row.beyond)}" if row.beyond else row.problem


def sentence(plan: search.Plan) -> str:
    """Returns the recommendation with its reason, or why nothing is recommended."""
    row = recommended(plan)
    if row is None:
        return nothing_fits(plan)
    if plan.goal == FASTEST:
        return _fastest_sentence(plan)
    whose = "" if row.candidate.strategy in OURS else " (PyTorch's own, not a strategy of zerobench)"
    free = show_bytes(plan.capacity.usable_bytes - row.fit.held_bytes)
    goal = GOALS[plan.goal]
    why = f"it {goal.why} ({goal.detail(row.fit)}) and leaves {free} free"
    unfit = (other for other in plan.rows.values() if other.best is None and other.problem != search.DOMINATED)
    alike = (other.candidate for other in unfit if other.candidate.recomputes == row.candidate.recomputes)
    names = dict.fromkeys(other.strategy for other in alike if other.rank < row.candidate.rank)
    others = "nothing else that was tried costs less"
    if cheaper := [other for other in plan.fitting if cost(other) < cost(row)]:
        closest = max(cheaper, key=lambda other: goal.value(other.fit))
        others = f"{closest.candidate.name}, which costs less, ends at {goal.detail(closest.fit)}"
    elif names:
        others = f"{', '.join(names)} partition{'s' * (len(names) == 1)} less, but cannot be used here"
    return f"Take {row.candidate.name}{whose}: {why}; {others}."


def _fastest_sentence(plan: search.Plan) -> str:
    """Returns why the first wins, whether the interval says so, and when another would."""

    def per_token(step: Step) -> dict[str, float]:
        waits = {"waits longer for collectives": step.time.exposed_s, "waits longer for the host": step.time.host_s}
        parts = waits | {"computes longer": step.time.step_s - sum(waits.values())}
        return {name: seconds / step.tokens for name, seconds in parts.items()}

    first, ranked = plan.ranked[0], plan.ranked
    step, tokens = first.fit.timed, counted([first.fit.config.sequence])
    message = f"Take {first.candidate.name} with {_micro_batch(first.fit)}: {step.rate():,.0f}"
    message += f" {tokens}/s per GPU, its step bound by {step.time.binds}"
    if len(ranked) > 1:
        second = leading(ranked)[1]
        other = second.fit.timed
        here, there = per_token(step), per_token(other)
        why = max(here, key=lambda part: there[part] - here[part])
        least = "" if second.fit.whole else "at least "
        message += f"; {second.candidate.name} is {least}{step.rate() / other.rate() - 1:.1%} behind, because it {why}"
        message += "" if step.is_ahead(other) else "; that is within the interval: a tie"
    return " ".join(filter(None, (f"{message}.", *plan.turns, f"The interval: {step.interval.basis}.")))


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


def nothing_fits(plan: search.Plan) -> str:
    """Returns why nothing is recommended; if nothing fits, the smallest device that would do and what would help."""
    capacity, rows = plan.capacity, plan.rows.values()
    if plan.interrupted:
        return CUT_SHORT
    if plan.least is None:
        return f"no cell could be simulated: {'; '.join(dict.fromkeys(row.problem for row in rows))}"
    least, row = plan.least
    if (tier := capacity.fullest(least.bytes_in)[0]) != "device":
        held, key = least.bytes_in[tier], {"host": "--host-memory", "nvme": "--disk"}[tier]
        return f"nothing fits: {row.candidate.name} needs {show_bytes(held)} of {tier} per GPU; raise {key}"
    binding, smallest = _binding(least), math.ceil(least.held_bytes / (1 - capacity.reserve))
    return (
        f"nothing fits {show_bytes(capacity.device_bytes)}: the least is {row.candidate.name} with {_held(least)}, "
        f"so the smallest device that would do has {show_bytes(smallest)}; "
        f"the largest category is {binding} ({show_bytes(least.at_peak[binding])}; the largest tensor has "
        f"{show_bytes(least.largest.bytes if least.largest else None)}: {_largest(least)}); "
        f"to reduce it, try {HELPS[binding]}"
    )


# -- the table -------------------------------------------------------------------------------------


HEADER = ["strategy", "fits", "peak", "reserved", "free", "host", "files", "ψ moved", "binds", "largest tensor"]
SOMETIMES = ("reserved", "host", "files")
"""Columns that are shown only if any row has such bytes."""

FIRST_TO_GO = ("largest tensor", "peak", "host", "files", "free", "ψ moved")
LEFT = ("strategy", "fits", "binds", "largest tensor")
"""Columns of text."""

NAME_WIDTH = 44
"""Characters of a tensor's name in the table; JSON has all of them."""

PRICE = "$/M tokens"
TIMED = [
    "strategy", "micro-batch", "peak", "reserved", "step", "90 % interval", "tokens/s/GPU", PRICE, "exposed", "host",
    "binds",
]  # fmt: skip
"""Columns under goal fastest."""

SHOWN = 10
"""Rows that are shown under goal fastest."""


def table_of(plan: search.Plan, columns: Sequence[str] | None = None) -> Grid:
    """Returns the table, without empty columns and interrupted rows; under goal fastest of the fastest rows."""
    if plan.goal == FASTEST:
        ranked = plan.ranked[:SHOWN]
        tokens = counted(row.fit.config.sequence for row in ranked)
        header = [name.replace("tokens", tokens) for name in TIMED if plan.price is not None or name != PRICE]
        return Grid(header, [_timed_line(row, plan.price) for row in ranked], LEFT)
    lines = [_line(row, plan) for row in plan.rows.values() if row.over]
    kept = [n for n, name in enumerate(HEADER) if name not in SOMETIMES or any(line[n] != "–" for line in lines)]
    shown = [[line[n] for n in kept] for line in lines]
    return Grid([HEADER[n] for n in kept], shown, LEFT, FIRST_TO_GO, columns)


def _line(row: search.PlanRow, plan: search.Plan) -> list[str]:
    cell = row.best or row.beyond
    if cell is None:
        fits = "bound" if row.problem == search.DOMINATED else "no"
        bound = f"states {show_bytes(row.bound_bytes)}" if row.bound_bytes else "–"
        return [row.candidate.name, fits, bound, *["–"] * (len(HEADER) - 3)]
    fits = GOALS[plan.goal].short(row.best) if row.best else "no"
    if row.at_end and plan.goal in CUT_OFF:
        fits += " or more"
    sizes = [cell.device_peak_bytes, cell.reserved_high_bytes, plan.capacity.usable_bytes - cell.held_bytes]
    sizes += [cell.host_bytes or None, cell.file_bytes or None]
    binding = _binding(cell)
    binds = f"{binding} {cell.at_peak[binding] / (sum(cell.at_peak.values()) or 1):.0%}"
    largest = f"{show_bytes(cell.largest.bytes)} {_largest(cell)[:NAME_WIDTH]}" if cell.largest else "–"
    return [row.candidate.name, fits, *map(show_bytes, sizes), f"{cell.volume_psi:.2f}", binds, largest]


def _timed_line(row: search.PlanRow, price: float | None) -> list[str]:
    config, step = row.fit.config, row.fit.timed
    low, high = (show_time(step.time.step_s * factor) for factor in (step.interval.low, step.interval.high))
    bound = "" if row.fit.whole else "≤ "
    accumulated = f" × {config.accumulation}" if config.accumulation > 1 else ""
    return [
        row.candidate.name, f"{bound}{config.micro_batch}{accumulated}",
        show_bytes(row.fit.device_peak_bytes), show_bytes(row.fit.reserved_high_bytes), show_time(step.time.step_s),
        f"{low} – {high}", f"{step.rate():,.0f}", *([] if price is None else [show_price(step.columns(price))]),
        show_time(step.time.exposed_s), show_time(step.time.host_s), step.time.binds,
    ]  # fmt: skip


def print_plan(plan: search.Plan, columns: Sequence[str] | None = None) -> None:
    """Prints the table, the rule by which rows fit, the recommendation and the commands that confirm it."""
    console, capacity, best = stdout_console(), plan.capacity, recommended(plan)
    if plan.goal != FASTEST or plan.ranked:
        console.print(table_of(plan, columns))
    if best is not None and best.fit.reserved is not None:
        console.print(reserved_table({best.candidate.name: best.fit.reserved}))
    what = "what the allocator reserves" if plan.device == "cuda" else "its peak"
    usable = f"{show_bytes(capacity.usable_bytes)} of {show_bytes(capacity.device_bytes)}"
    rule = f"a row fits if {what} is at most {usable} ({capacity.reserve:.0%} are kept free)"
    rule += f"; {show_count(sum(len(row.probes) for row in plan.rows.values()), 'cell')} simulated"
    if any(row.bound_bytes and not row.probes for row in plan.rows.values()):
        rule += "; a row with its states alone was not simulated"
    if plan.goal == FASTEST and not all(row.fit.whole for row in plan.ranked[:SHOWN]):
        rule += "; rows that can win were judged so; a row with ≤ by its peak alone, since it is slower even with the "
        rule += "micro-batch that this allows"
    reasons: dict[str, list[str]] = {}
    for row in plan.rows.values():
        if row.reason:
            reasons.setdefault(row.reason, []).append(row.candidate.name)
    lines = [rule, *(f"not simulated: {', '.join(names)}: {why}" for why, names in reasons.items()), *plan.notes]
    lines += [""] * (best is not None) + [sentence(plan)]
    if best is not None and plan.goal != FASTEST:
        commands = commands_of(plan, best)
        lines += ["", f"To confirm it{', one rank of it, then all' * (len(commands) > 1)}:"]
        lines += [f"  {command}" for command in commands]
    if plan.goal == LEAST_TRAFFIC:
        lines += ["", BYTES_ALONE]
    for line in lines:
        print_on(console, line)


def commands_of(plan: search.Plan, row: search.PlanRow) -> list[str]:
    """Returns the commands that confirm a plan: one rank on one device, except of a peer, then the whole world."""
    config, changed = row.fit.config, dict[str, Any]()
    if plan.goal == "largest_model":
        changed = {f"model.{key}": getattr(config.model, key) for key in ("layers", "hidden", "heads")}
    elif plan.goal == "largest_batch":
        changed = {"micro_batch": config.micro_batch}
    own = {key: value for key in AXES if (value := getattr(row.candidate, key)) != "none"}
    without = (*changed, "world_size", "backend", "tensors", "device", "draw_on")
    kept = [word for word in plan.overrides if word.partition("=")[0] not in without]
    overrides = [*(f"{key}={value}" for key, value in own.items()), *kept, *(f"{k}={v}" for k, v in changed.items())]
    line, ranks, device = " ".join(map(shlex.quote, overrides)), config.world_size, plan.device
    one_rank = f"zerobench {line} world_size={ranks} device={device} backend=simulated measure.warmup=2 measure.steps=1"
    one_rank += " draw_on=device" if device == "cuda" else ""
    per_node = next(number for number in range(min(ranks, 8), 0, -1) if ranks % number == 0)
    rendezvous = f" --nnodes {ranks // per_node} --rdzv-backend c10d --rdzv-endpoint HOST:29400"
    nodes = rendezvous if ranks > per_node else ""
    whole = f"torchrun{nodes} --nproc-per-node {per_node} -m zerobench {line} device={device}"
    return [*([one_rank] if config.strategy.name in names_with("simulated") else []), whole]


# -- JSON ------------------------------------------------------------------------------------------


def as_json(plan: search.Plan) -> dict[str, Any]:
    """Returns the plan as plain values: sizes in bytes, times in seconds, volumes in ψ."""
    capacity, best = plan.capacity, recommended(plan)
    columns: dict[str, Any] = {
        "goal": plan.goal, "device": plan.device, "overrides": list(plan.overrides),
        "device_bytes": capacity.device_bytes, "usable_bytes": capacity.usable_bytes,
        "host_bytes": capacity.host_bytes, "disk_bytes": capacity.disk_bytes,
    }  # fmt: skip
    if plan.costs is not None:
        columns["cluster"] = asdict(plan.costs.cluster)
        columns["rows"] = [{"name": row.candidate.name} | _columns_of(row.fit, plan.price) for row in plan.ranked]
    else:
        columns["rows"] = [
            {
                **{key: getattr(row.candidate, key) for key in AXES}, "problem": row.reason,
                "best": row.best and _columns_of(row.best), "beyond": row.beyond and _columns_of(row.beyond),
                "at_end": row.at_end, "bound_bytes": row.bound_bytes, "executed": len(row.probes),
            }
            for row in plan.rows.values()
        ]  # fmt: skip
    columns |= {"recommended": best.candidate.name if best else None, "sentence": sentence(plan)}
    return columns | ({"commands": commands_of(plan, best)} if best and plan.costs is None else {})


def _columns_of(cell: SimulatedCell, price: float | None = None) -> dict[str, Any]:
    columns = {
        "psi": cell.psi, "frozen": cell.frozen, "peak_bytes": cell.device_peak_bytes,
        "reserved_bytes": cell.reserved_high_bytes, "host_bytes": cell.host_bytes, "file_bytes": cell.file_bytes,
        "at_peak": cell.at_peak, "volume_psi": cell.volume_psi, "wire_bytes": cell.wire_bytes, "shape": _shape(cell),
        "gpus": cell.config.world_size, "micro_batch": cell.config.micro_batch,
        "accumulation": cell.config.accumulation, "binds": _binding(cell), "largest_tensor": _largest(cell),
        "largest_tensor_bytes": cell.largest.bytes if cell.largest else None,
    }  # fmt: skip
    if (step := cell.step) is None:
        return columns
    time = step.time
    return columns | step.columns(price) | {"exposed_s": time.exposed_s, "host_s": time.host_s, "binds": time.binds}
