"""A cell's step in time: its schedule is simulated on fake tensors and laid out on a device.

schedule   the events of one simulated step, with every operator that computes (probes/operator_stream.py)
reduced    a deep model is simulated with MODEL_LAYERS[0] and MODEL_LAYERS[1] blocks, many micro-batches as 3: blocks
           are alike, and so are micro-batches except the first and the last, so the rest of a step is a multiple of
           the difference. Automatic buckets keep the size that the whole model gives them
interval   factors around the step, by its kind of run. zerobench/hardware/validated.yaml has those that contained 90 %
           of the published runs left out when scales were fitted, and the number of runs (`make predicted-runs`).
           Beyond the most ranks and the longest sequence of these runs it is wider
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from ..config.cell import CellConfig
from ..predict.build import facts_of
from ..probes.operator_stream import FORMULAS
from ..records import EventRow
from ..records.long_rows import COMPUTE
from ..strategies import predicts, shape_of
from ..theory.strategy import AUTO, settle
from .costs import HALVES, SHORT, GpuCosts, costs_at
from .execute import Execution, Limits
from .hardware import Device, validated
from .timeline import PLAIN, Declared, PhaseTime, Timeline, lay_out

MODEL_LAYERS = (4, 8)
MOST_MICRO_BATCHES = 3

PHASES = ("forward", "backward", "update")

LIMITS = Limits(seconds=1800.0)


@dataclass(frozen=True)
class Reduced:
    """A cell as simulated: `configs`, the last with most blocks; `blocks` of each; `whole_blocks`: the model's."""

    configs: tuple[CellConfig, ...]
    blocks: tuple[int, ...]
    whole_blocks: int
    whole_micro_batches: int

    @property
    def more(self) -> float:
        """Factor of extrapolation: blocks beyond the larger simulated number, over the difference of the two."""
        least, most = self.blocks
        return (self.whole_blocks - most) / (most - least)


def reduced(config: CellConfig) -> Reduced:
    """Returns the reduced cell to simulate for a cell."""
    micro_batches, config, shape = config.accumulation, with_few_micro_batches(config), config.huggingface
    if shape is not None:
        layers = 0 if shape.config else shape.layers
    else:
        layers = int(getattr(config.model, "layers", 0)) if config.model.kind in ("gpt", "gpt_moe") else 0
    if layers <= MODEL_LAYERS[-1] + 1:
        return Reduced((config,), (layers,), layers, micro_batches)
    section = config.strategy.values()
    if predicts(section) and shape_of(section).bucket_bytes == AUTO:  # which would follow the few blocks
        settled = settle(shape_of(section), facts_of(config).shapes, config.groups.shard_ranks)
        changes: dict[str, Any] = {"bucket_bytes": settled.bucket_bytes}
        config = replace(config, strategy=replace(config.strategy, **changes))
    group = "model" if shape is None else "huggingface"
    sections = ({group: replace(getattr(config, group), layers=blocks)} for blocks in MODEL_LAYERS)
    return Reduced(tuple(replace(config, **section) for section in sections), MODEL_LAYERS, layers, micro_batches)


def with_few_micro_batches(config: CellConfig) -> CellConfig:
    """Returns the cell with at most MOST_MICRO_BATCHES micro-batches in a step."""
    if config.accumulation <= MOST_MICRO_BATCHES:
        return config
    batch = config.micro_batch * MOST_MICRO_BATCHES * config.world_size
    return replace(config, accumulation=MOST_MICRO_BATCHES, batch=batch)


@dataclass(frozen=True)
class StepSchedule:
    """The simulated events of a reduced cell. `problem`: if there are none, an error message with the reason."""

    cell: Reduced
    events: tuple[tuple[EventRow, ...], ...]
    problem: str = ""

    @property
    def without_formula(self) -> list[str]:
        """Operators whose time does not follow from their FLOPs or bytes: products without a formula, and others that
        move more than LEAST_SHARE of the step's bytes and are not known to take as long as these. Also attention with a
        mask in half precision, such as a sliding window's: it does not run on flash, whose rates are measured.
        """
        moved, flops, masked = Counter[str](), Counter[str](), set[str]()
        for event in self.events[-1] if self.events else ():
            if event.kind == COMPUTE:
                moved[event.operator] += event.bytes
                flops[event.operator] += event.flops
                if "efficient_attention" in event.operator and SHORT.get(event.dtype) in HALVES:
                    masked.add(event.operator)
        least = LEAST_SHARE * moved.total()
        unknown = [name for name in sorted(moved) if not flops[name] and not _has_formula(name)]
        return sorted(masked) + [name for name in unknown if IS_PRODUCT.search(name) or moved[name] > least]


LEAST_SHARE = 0.02
IS_PRODUCT = re.compile(r"(mm|mv|dot|matmul|linear|convolution|attention|attn)(?![a-z0-9])")
BY_BYTES = re.compile(
    r"(fsdp\.|_fused_(adam|sgd|adagrad)|(_amp)?_foreach_|native_\w*(norm|dropout)|_fused_rms_norm|_?(log_|safe_)?softmax|nll_loss|"
    r"embedding|index|gather|scatter|copy|_to_copy|clone|cat|stack|split|slice|select|new_|zero|one|full|fill|arange|"
    r"constant_pad|repeat|roll|flip|tri[lu]|masked_|cum(sum|prod)|normal_|uniform_|bernoulli|random_)"
)
"""Names of operators that take as long as their bytes, other than those that torch tags as pointwise or reductions."""
AS_THEIR_BYTES = {torch.Tag.pointwise, torch.Tag.reduction}


def _has_formula(name: str) -> bool:
    packet: Any = getattr(torch.ops.aten, name, None)
    if IS_PRODUCT.search(name):
        return packet in flop_registry or packet in FORMULAS
    overloads = packet.overloads() if packet is not None else ()
    tagged = any(AS_THEIR_BYTES & set(getattr(packet, overload).tags) for overload in overloads)
    return tagged or BY_BYTES.match(name) is not None


def schedule_of(cell: Reduced, executed: Sequence[Execution]) -> StepSchedule:
    """Returns the schedule from the executions of `cell.configs`."""
    if problem := next((execution.problem for execution in executed if execution.problem), ""):
        return StepSchedule(cell, (), problem)
    return StepSchedule(cell, tuple(tuple(execution.result.events) for execution in executed))


@dataclass(frozen=True)
class StepTime:
    """A predicted step, in seconds; `phases`: by phase. `timeline`: of the simulated cell, not scaled."""

    step_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    host_s: float
    phases: dict[str, PhaseTime]
    timeline: Timeline = field(repr=False)

    @property
    def binds(self) -> str:
        """The part that takes most of the step: compute, communication or host."""
        return PhaseTime(self.step_s, self.exposed_s, self.host_s).binds


def step_time(schedule: StepSchedule, costs: GpuCosts, declared: Declared = PLAIN) -> StepTime:
    """Lays out a schedule; a single GPU has rates of its own. Raises ValueError if the schedule has a `problem`."""
    if schedule.problem:
        raise ValueError(schedule.problem)
    cell = schedule.cell
    costs = costs_at(costs, cell.configs[-1].world_size)
    timelines = [lay_out(events, costs, declared) for events in schedule.events]
    totals = []
    for timeline in timelines:  # micro-batches between the first and the last are alike
        total = timeline.totals()
        if more := cell.whole_micro_batches - cell.configs[-1].accumulation:
            first, then = timeline.marks[1:3]
            total = {key: value + more * (then.get(key, 0.0) - first.get(key, 0.0)) for key, value in total.items()}
        totals.append(total)
    whole = totals[-1]
    if len(totals) == 2:
        few = totals[0]
        whole = {key: max(0.0, size + cell.more * (size - few[key])) for key, size in whole.items()}
    parts = ("total_s", "exposed_s", "host_s")
    phases = {name: PhaseTime(*(whole[name, part] for part in parts)) for name in PHASES if (name, "total_s") in whole}
    exposed_s, host_s = (sum(size for key, size in whole.items() if key[0] and key[1] == part) for part in parts[1:])
    # on one GPU the step takes as long as the slower of device and host
    longer = max(0.0, whole["", "issued_s"] + costs.loop_s - whole["", "step_s"]) if costs.one_stream else 0.0
    return StepTime(
        whole["", "step_s"] + longer, whole["", "compute_s"], whole["", "communication_s"], exposed_s, host_s + longer,
        phases, timelines[-1],
    )  # fmt: skip


# -- the interval of a step ------------------------------------------------------------------------


WIDER = 2.0
"""Factor by which both ends of an interval that published runs do not validate move away from 1, in logarithms."""
UNKNOWN = 0.5, 2.0
"""Interval for a device that has no measured tables, if no run on its type was compared."""
NOT_VALIDATED = "not validated"


@dataclass(frozen=True)
class StepInterval:
    """`low`, `high`: factors on the step; `basis`: of them, as text."""

    low: float
    high: float
    basis: str


def kind_of(device: Device, spans_nodes: bool) -> str:
    """Returns the kind of run that would validate a prediction."""
    return f"{device.type}, {'several nodes' if spans_nodes else 'one node'}"


def interval_of(costs: GpuCosts, config: CellConfig, without_formula: Sequence[str] = ()) -> StepInterval:
    """Returns the interval of a cell's prediction. `without_formula`: operators whose time is unknown, and counted by
    their bytes alone. No published run is on one GPU; the host may bind its step.
    """
    doubts = [f"no formula for the time of {', '.join(without_formula)}"] if without_formula else []
    if config.world_size == 1:
        return interval(costs, f"{costs.device.type}, one GPU", doubts)
    for name, most in validated().get("most", {}).items():
        if (value := getattr(config, name)) > most:
            doubts.append(f"{name}={value:,}, and no published run has more than {most:,}")
    return interval(costs, kind_of(costs.device, config.world_size > costs.cluster.devices_per_node), doubts)


def interval(costs: GpuCosts, kind: str, doubts: Sequence[str] = ()) -> StepInterval:
    """Returns the interval of a prediction for a kind of run, which `doubts` make wider."""
    intervals = validated().get("intervals", {})
    if kind in intervals:
        low, high = intervals[kind]["low"], intervals[kind]["high"]
        if not doubts:
            return StepInterval(low, high, f"{intervals[kind]['runs']} published runs on {kind}")
        return StepInterval(low**WIDER, high**WIDER, f"{NOT_VALIDATED}: {'; '.join(doubts)}; {WIDER:g} times as wide")
    if costs.device.matmul_table:
        all_kinds = intervals.get("all", {"low": 0.8, "high": 1.25})
        low, high = (math.exp(WIDER * math.log(all_kinds[end])) for end in ("low", "high"))
        measured = "" if costs.device.collectives_table else "; no table of its collectives"
        reason = f"no published run on {kind}{measured}; {WIDER:g} times as wide"
    else:
        low, high = UNKNOWN
        reason = f"never compared with a run on {kind}; a roofline of its peak and memory speed; from half to twice"
    return StepInterval(low, high, "; ".join([f"{NOT_VALIDATED}: {reason}", *doubts]))
