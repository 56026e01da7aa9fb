"""Simulated cells, and the memory of one GPU that they must fit into.

capacity   bytes of the device, and of host memory and disk, per GPU; None: unlimited
usable     the device minus a fraction for memory that no allocator of torch's counts: CUDA's context, libraries, NCCL
held       what must fit: the bytes that a GPU's caching allocator reserves, by default or with expandable segments,
           whichever is more; its peak of allocated bytes is less. On a CPU, which has no such allocator, the peak
load       the largest of the ratios held / usable: 1 is full
few blocks a cell whose load is only bracketed, or whose step is predicted (timing/prediction.py). What the allocator
           reserves is not linear in blocks (up to 40 % off), so no fit is judged by it with few blocks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...config.cell import Cell
from ...config.schema import Transformer
from ...fake_execution import Execution
from ...records import TensorRow
from ...results.options import dollars_per_million
from ...sizes import show_bytes
from ...timing.costs import GpuCosts
from ...timing.interval import StepInterval, interval_of
from ...timing.prediction import (
    Reduced,
    StepSchedule,
    StepTime,
    reduced,
    schedule_of,
    step_time,
    with_few_micro_batches,
)

RESERVE = 0.08
"""Fraction of the device that is kept from the allocator by default; the GPU suite leaves as much."""


@dataclass(frozen=True)
class Step:
    """A simulated cell's schedule, and its predicted time on a cluster. `tokens`: of a step, per GPU."""

    schedule: StepSchedule
    time: StepTime
    interval: StepInterval
    tokens: int

    def rate(self, costs: GpuCosts | None = None) -> float:
        """Returns the tokens per second and GPU, also at other costs."""
        return self.tokens / (self.time if costs is None else step_time(self.schedule, costs)).step_s

    def is_ahead(self, other: Step) -> bool:
        """Returns True if this step is faster by more than its interval; otherwise the two are a tie."""
        return self.rate() >= other.rate() * self.interval.high

    def priced(self, price: float | None) -> dict[str, float]:
        """Returns the price of a million tokens with its interval; empty without the price of a GPU hour."""
        if price is None:
            return {}
        return dollars_per_million(price, self.rate(), self.interval.low, self.interval.high)


@dataclass(frozen=True)
class Simulated:
    """A cell, and the bytes at the peak of one simulated rank and those that it sends in a step.

    `psi`: number of trainable parameters, `frozen`: of the others. `peak_bytes`: as counted by the device's allocator,
    on a GPU in blocks of 512 bytes and with cuBLAS's workspaces. `at_peak`: category -> bytes of tensors at the peak
    instant. `largest`: the largest storage at that instant. `reserved_bytes`: most that a GPU's caching allocator
    reserves for the step, None for a CPU. `step`: None unless it is to be predicted; `timed` is then known to be there.
    `whole`: simulated with all blocks.
    """

    cell: Cell
    psi: int
    peak_bytes: int
    host_bytes: int
    file_bytes: int
    at_peak: dict[str, int]
    largest: TensorRow | None
    volume_elements: float
    wire_bytes: float
    reserved_bytes: int | None = None
    frozen: int = 0
    step: Step | None = None
    whole: bool = True

    @property
    def timed(self) -> Step:
        """The predicted step of goal fastest."""
        assert self.step is not None
        return self.step

    @property
    def volume_psi(self) -> float:
        """Elements that the rank moves in a step, over psi."""
        return self.volume_elements / self.psi if self.psi else 0.0

    @property
    def shape(self) -> str:
        """A GPT's shape: "48 x 1600"; empty for another model."""
        model = self.cell.config.model
        return f"{model.layers} x {model.hidden}" if isinstance(model, Transformer) else ""

    @property
    def held_bytes(self) -> int:
        """Bytes that must fit the device."""
        return self.reserved_bytes or self.peak_bytes

    @property
    def held_words(self) -> str:
        """These bytes as text: "9.66 GiB reserved"."""
        return f"{show_bytes(self.held_bytes)} {'reserved' if self.reserved_bytes else 'at its peak'}"

    @property
    def bytes_in(self) -> dict[str, int]:
        """Tier -> bytes that must fit it."""
        return {"device": self.held_bytes, "host": self.host_bytes, "nvme": self.file_bytes}

    @property
    def binding(self) -> str:
        """The category with the largest share of the peak."""
        return max(self.at_peak, key=lambda category: self.at_peak[category])

    @property
    def largest_name(self) -> str:
        """A short name of the largest storage: its label or the line that made it, and its module."""
        if (tensor := self.largest) is None:
            return "–"
        name = tensor.name or tensor.source.replace("zerobench/", "", 1) or tensor.module or tensor.category
        return f"{name} in {tensor.module}" if tensor.module and tensor.module not in name else name


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
        loads = {tier: 0.0 if (limit := limits[tier]) is None else size / limit for tier, size in held.items()}
        return max(loads.items(), key=lambda item: item[1], default=("device", 0.0))

    def load(self, held: Mapping[str, int]) -> float:
        """Returns the load of the fullest tier."""
        return self.fullest(held)[1]


Execute = Callable[..., list[Execution]]
"""Simulates configs and, as each is done, passes its place and its execution to `tell`, which may add configs
(fake_execution/many.py).
"""


@dataclass(frozen=True)
class Work:
    """A cell to simulate, as `small`. `whole`: with all its blocks. `timed`: for its step, else for its memory."""

    cell: Cell
    small: Reduced
    whole: bool
    timed: bool = False

    @classmethod
    def of_step(cls, cell: Cell) -> Work:
        """Returns the work that predicts a cell's step, with few blocks and few micro-batches."""
        small = reduced(cell.config)
        return cls(cell, small, len(small.configs) == 1, timed=True)

    @classmethod
    def of(cls, cell: Cell, whole: bool, few_micro_batches: bool = False) -> Work:
        """Returns the work for a cell's memory: `whole`, or with few blocks if that saves half of the time."""
        config, small = cell.config, reduced(cell.config)
        if not whole and small.whole_blocks > 2 * sum(small.blocks):
            return cls(cell, small, False)
        config = with_few_micro_batches(config) if few_micro_batches else config
        return cls(cell, Reduced((config,), (0,), 0, 1), True)

    def answer(self, executions: Sequence[Execution], costs: GpuCosts | None) -> Simulated | str:
        """Returns the simulated cell, or why there is none, from the executions of its configs."""
        if problem := next((execution.problem for execution in executions if execution.problem), ""):
            return problem
        found = whole_of(self.small, [simulated_by(self.cell, execution) for execution in executions])
        if not self.timed or costs is None:
            return replace(found, whole=self.whole)
        config, schedule = self.cell.config, schedule_of(self.small, executions)
        interval = interval_of(costs, config, schedule.without_formula)
        tokens = config.micro_batch * config.accumulation * config.sequence
        step = Step(schedule, step_time(schedule, costs), interval, tokens)
        return replace(found, whole=self.whole, step=step)


def simulated_by(cell: Cell, execution: Execution) -> Simulated:
    """Returns the memory and traffic of an execution."""
    facts, reserved = execution.facts, execution.reserved_bytes
    psi, frozen = (facts.psi, facts.frozen) if facts is not None else (0, 0)
    return Simulated(
        cell, psi, execution.allocated_bytes or execution.peak_bytes, execution.host_bytes, execution.file_bytes,
        execution.at_peak,
        max((row for row in execution.tensors if row.tier == "device"), key=lambda row: row.bytes, default=None),
        execution.volume_elements, execution.wire_bytes, max(reserved) if reserved else None, frozen,
    )  # fmt: skip


def whole_of(small: Reduced, parts: Sequence[Simulated]) -> Simulated:
    """Returns what a cell with all its blocks uses: blocks are alike, so that each adds as much as another."""
    if len(parts) == 1:
        return parts[0]
    (few, many), (least, most) = parts, small.blocks
    more = (small.whole_blocks - most) / (most - least)

    def at(low: Any, high: Any) -> Any:
        return type(high)(high + more * (high - low))

    numbers = {name: at(getattr(few, name), size) for name, size in vars(many).items() if isinstance(size, int | float)}
    if many.reserved_bytes is not None:  # not linear in blocks: the extrapolation may be below the peak
        numbers["reserved_bytes"] = max(numbers["reserved_bytes"], numbers["peak_bytes"])
    at_peak = {category: at(few.at_peak[category], size) for category, size in many.at_peak.items()}
    return replace(many, at_peak=at_peak, **numbers)
