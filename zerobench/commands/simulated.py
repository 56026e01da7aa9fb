"""Cells of a command line, simulated for a device: the bytes of one rank and, on a cluster, the time of its step.

question    cells that are composed for the device, which need not be in this machine
work        the configs to simulate for a cell. With few blocks, its load is only bracketed, or its step is predicted
            (simulation/prediction.py): what the allocator reserves is not linear in blocks, up to 40 % off
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from ..config.cell import Cell, CellConfig
from ..config.compose import RefusedError, compose_cells
from ..config.flat import name_strategies
from ..fake.as_gpu import DEFAULT, EXPANDABLE, SETTINGS, DeviceMemory
from ..host.environment import FAKE, SIMULATED
from ..host.terminal import progress_bar
from ..predict.estimate import closed_form
from ..records import TensorRow
from ..results.options import dollars_per_million
from ..simulation.costs import GpuCosts
from ..simulation.execute import CUDA, Execution, Limits, Target, execute_all, settled
from ..simulation.prediction import (
    Reduced,
    StepInterval,
    StepSchedule,
    StepTime,
    interval_of,
    reduced,
    schedule_of,
    step_time,
    with_few_micro_batches,
)

DEFAULTS = {"strategy": "ddp,zero1,zero2,zero3,fsdp2", "world_size": "8", "data": "synthetic"}
"""Key -> its values if the command line does not set it."""

PLACED = {"device": "cpu", "backend": SIMULATED, "tensors": FAKE}
"""Keys that a question sets itself."""

DEVICE = "cuda"
"""The default device to simulate: memory is scarce there."""


@dataclass(frozen=True)
class Question:
    """Cells, and the device that they are simulated for."""

    cells: tuple[Cell, ...]
    target: Target


def ask(
    overrides: Sequence[str],
    device: str | None = None,
    attention: str | None = None,
    defaults: dict[str, str] = DEFAULTS,
) -> Question:
    """Returns the cells of a command line. Raises RefusedError, or ValueError if it is wrong."""
    given = {word.partition("=")[0]: word.partition("=")[2] for word in overrides}
    for key in ("backend", "tensors"):
        if key in given:
            raise ValueError(f"{key}={given[key]}: an estimate runs no ranks; leave {key} out")
    if given.get("search.memory_limit", "null") not in ("null", ""):
        raise ValueError("search.memory_limit: a search runs cells; zerobench plan searches over estimates")
    device = device or given.get("device") or DEVICE
    target = Target("cpu" if device == "auto" else device, attention)
    own = {} if "experiment" in given else {key: value for key, value in defaults.items() if key not in given}
    keys = [f"{key}={value}" for key, value in (own | PLACED).items()]
    kept = [word for word in overrides if not word.startswith("device=")]
    cells = compose_cells(["-m", *keys, *kept], target=target.kind)
    if not cells:
        raise RefusedError(["these words make no cell; zerobench estimate --help shows some that do"])
    return Question(tuple(cells), target)


# -- a simulated cell ------------------------------------------------------------------------------


LARGEST = 5
"""Number of tensors at the peak that are listed individually."""

SETTING: dict[str, tuple[Callable[[CellConfig], Any], str]] = {
    "strategy": (lambda config: config.strategy.name, "Choice of the key `strategy`."),
    "model": (
        lambda config: (
            f"{config.model_name} {config.huggingface.architecture}"
            if config.model_name == "huggingface" and config.huggingface is not None
            else config.model_name
        ),
        "Choice of the key `model`.",
    ),
    "world_size": (lambda config: config.world_size, "Ranks."),
    "micro_batch": (lambda config: config.micro_batch, "Sequences per rank in one forward."),
    "accumulation": (lambda config: config.accumulation, "Micro-batches per step."),
    "sequence": (lambda config: config.sequence, "Tokens per sequence."),
    "precision": (lambda config: config.precision.label, "dtypes of the training."),
    "optimizer": (lambda config: config.optimizer_label, "Optimizer and its implementation on the device."),
    "systems": (
        lambda config: config.systems_label,
        "Further axes that are not at their defaults: offload, activation, ...",
    ),
}
"""Column -> its value in a config, and its meaning."""


def setting_of(config: CellConfig) -> dict[str, Any]:
    """Returns the columns of SETTING."""
    return {column: value(config) for column, (value, _) in SETTING.items()}


@dataclass(frozen=True)
class LargeTensor:
    """A storage that lives at the peak instant."""

    bytes: int
    """Its size."""
    part: str
    """Its part of the peak, as in parts_bytes."""
    name: str
    """Its label, a parameter's name or a unit; empty for activations."""
    module: str
    """The module that ran when it was made; empty for the model itself."""
    shape: str
    """Shape of the first tensor that used this storage, "4x1024x768"."""
    source: str
    """The line that made it."""

    @property
    def where(self) -> str:
        """Its name and the module that made it, if known."""
        return " in ".join(filter(None, dict.fromkeys([self.name, self.module]))) or "the model itself"


@dataclass(frozen=True, eq=False)
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

    def columns(self, price: float | None) -> dict[str, float]:
        """Returns the step, its interval and its rate as columns of JSON. `price`: dollars per GPU hour; if it is not
        None, the columns include the price of a million tokens.
        """
        seconds, rate, low, high = self.time.step_s, self.rate(), self.interval.low, self.interval.high
        columns = {"step_s": seconds, "low_s": seconds * low, "high_s": seconds * high, "tokens_per_s_gpu": rate}
        return columns | ({} if price is None else dollars_per_million(price, rate, low, high))


@dataclass(frozen=True)
class SimulatedCell:
    """A cell and the figures of the rank that was simulated. Figures have no meaning if `problem` is not empty.

    `at_peak`: category -> bytes at the peak instant, without the parts of `parts_bytes`. `largest`: the largest storage
    on the device at that instant. `step`: None unless it is to be predicted. `whole`: simulated with all blocks.
    """

    cell: Cell
    target: Target = CUDA
    name: str = ""
    """The strategy, and the keys in which cells of one strategy differ."""
    problem: str = ""
    """An error message if there is no estimate."""
    rank: int | None = None
    """The rank that was executed, the fullest."""
    psi: int = 0
    """Trainable parameters."""
    frozen: int = 0
    """Parameters that are not trained."""
    peak_bytes: int = 0
    """Largest sum of live bytes on the device in a step."""
    parts_bytes: dict[str, int] = field(default_factory=dict)
    """Part -> its bytes at the peak instant; their sum is peak_bytes."""
    states_bytes: int = 0
    """Largest sum of parameters, gradients, masters, optimizer states and communication buffers."""
    formula_bytes: int | None = None
    """The paper's formula for these states; None if there is none for the strategy."""
    host_bytes: int = 0
    """Peak in host memory of the bytes that were sent there, on the rank with the most."""
    file_bytes: int = 0
    """Peak in files."""
    volume_elements: float = 0.0
    """Elements that the rank moves in a step, by the paper's convention."""
    wire_bytes: float = 0.0
    """Bytes that the rank sends in a step."""
    allocated_bytes: int | None = None
    """Peak of torch.cuda.memory_allocated: blocks of 512 bytes; cuda alone."""
    reserved_low_bytes: int | None = None
    """Least that the caching allocator reserves for it; cuda alone."""
    reserved_high_bytes: int | None = None
    """Most that it reserves; cuda alone."""
    reserved: DeviceMemory | None = None
    """What it reserves by default, by cause; when it grew last; what other settings reserve. cuda alone."""
    tensors: tuple[LargeTensor, ...] = ()
    """The largest storages at the peak."""
    seconds: float = 0.0
    """Time that the execution took."""
    at_peak: dict[str, int] = field(default_factory=dict)
    largest: TensorRow | None = None
    step: Step | None = None
    whole: bool = True

    @classmethod
    def of(cls, cell: Cell, execution: Execution) -> SimulatedCell:
        """Returns the memory and traffic of an execution."""
        if execution.problem:
            return cls(cell, problem=execution.problem)
        facts, (low, high) = execution.facts, execution.reserved_bytes or (None, None)
        on_device = (row for row in execution.tensors if row.tier == "device")
        same = (
            "rank", "peak_bytes", "parts_bytes", "states_bytes", "host_bytes", "file_bytes", "volume_elements",
            "wire_bytes", "allocated_bytes", "reserved", "seconds", "at_peak",
        )  # fmt: skip
        return cls(
            cell, **{name: getattr(execution, name) for name in same}, reserved_low_bytes=low, reserved_high_bytes=high,
            psi=facts.psi if facts else 0, frozen=facts.frozen if facts else 0,
            formula_bytes=closed_form(execution.config, facts) if facts else None,
            largest=max(on_device, key=lambda row: row.bytes, default=None),
            tensors=tuple(
                LargeTensor(row.bytes, execution.part_of(row), row.name, row.module, row.shape, row.source)
                for row in execution.tensors
            ),
        )  # fmt: skip

    @property
    def config(self) -> CellConfig:
        """The cell, as config.yaml of a run has it."""
        return self.cell.config

    @property
    def in_flight_bytes(self) -> int | None:
        """states_bytes less formula_bytes: gathered units, buckets, temporaries of an update."""
        return None if self.formula_bytes is None else self.states_bytes - self.formula_bytes

    @property
    def volume_psi(self) -> float:
        """Elements that the rank moves in a step, by the paper's convention, over psi."""
        return self.volume_elements / self.psi if self.psi else 0.0

    @property
    def device_peak_bytes(self) -> int:
        """The peak as counted by the device's allocator."""
        return self.allocated_bytes or self.peak_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that must fit the device: the most that its allocator reserves, if known, else the peak."""
        return self.reserved_high_bytes or self.device_peak_bytes

    @property
    def bytes_in(self) -> dict[str, int]:
        """Tier -> bytes that must fit it."""
        return {"device": self.held_bytes, "host": self.host_bytes, "nvme": self.file_bytes}

    @property
    def timed(self) -> Step:
        """The step, if it was predicted."""
        assert self.step is not None
        return self.step

    def as_dict(self) -> dict[str, Any]:
        """Returns the columns of an estimate as plain values for JSON."""
        columns = {column: getattr(self, column) for column in FIGURES}
        columns |= {"tensors": [asdict(tensor) for tensor in self.tensors]}
        columns |= {"reserved": None if self.reserved is None else asdict(self.reserved)}
        if self.problem or not self.psi:  # without figures, or of a model that cannot be built without memory
            columns |= dict.fromkeys(UNKNOWN if self.problem else ("psi", "frozen", "volume_psi"))
        config = self.config if self.cell.problems else settled(self.config)
        target = {"device": self.target.kind, "attention": self.target.attention, "problem": self.problem}
        return {"name": self.name} | setting_of(config) | target | columns | {"config": config.as_dict()}


FIGURES = (
    "rank", "psi", "frozen", "peak_bytes", "parts_bytes", "states_bytes", "formula_bytes", "in_flight_bytes",
    "host_bytes", "file_bytes", "volume_psi", "volume_elements", "wire_bytes", "allocated_bytes", "reserved_low_bytes",
    "reserved_high_bytes", "reserved", "tensors", "seconds",
)  # fmt: skip
"""Columns of an estimate that a simulation finds."""

UNKNOWN = [column for column in FIGURES if column not in ("parts_bytes", "host_bytes", "file_bytes", "tensors")]
"""Columns that are None if the simulation failed."""


# -- the simulation --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """A cell to simulate, as `small`. `whole`: with all its blocks. `timed`: for its step, too."""

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
    def of(cls, cell: Cell, whole: bool = True, with_step: bool = False) -> Work:
        """Returns the work for a cell's memory: `whole`, or with few blocks if that saves half of the time.
        `with_step`: with few micro-batches, and also for the step if the same configs serve both: recording operators
        changes no bytes. Not for an optimizer of whole matrices: any rank may have its peak, and only one is timed.
        """
        config = with_few_micro_batches(cell.config) if with_step else cell.config
        small = reduced(cell.config) if with_step or not whole else Reduced((config,), (0,), 0, 1)
        few = not whole and small.whole_blocks > 2 * sum(small.blocks)
        if few or small.configs == (config,):
            return cls(cell, small, not few, timed=with_step and cell.config.optimizer.takes_elements)
        return cls(cell, Reduced((config,), (0,), 0, 1), True)

    @property
    def settings(self) -> Collection[str]:
        """Settings of a GPU's allocator: if blocks are left out, for its reserved bytes or, with a step, for none."""
        return SETTINGS.keys() if self.whole else (DEFAULT,) if self.timed else (DEFAULT, EXPANDABLE)

    def answer(self, executions: Sequence[Execution], costs: GpuCosts | None) -> SimulatedCell:
        """Returns the simulated cell from the executions of its configs."""
        parts = [SimulatedCell.of(self.cell, execution) for execution in executions]
        whole = next((part for part in parts if part.problem), None) or whole_of(self.small, parts)
        if whole.problem or not self.timed or costs is None:
            return replace(whole, whole=self.whole)
        config, schedule = self.cell.config, schedule_of(self.small, executions)
        interval = interval_of(costs, config, schedule.without_formula)
        tokens = config.micro_batch * config.accumulation * config.sequence
        return replace(whole, whole=self.whole, step=Step(schedule, step_time(schedule, costs), interval, tokens))


def whole_of(small: Reduced, parts: Sequence[SimulatedCell]) -> SimulatedCell:
    """Returns what a cell with all its blocks uses: blocks are alike, so that each adds as much as another."""
    if len(parts) == 1:
        return parts[0]
    few, many = parts

    def at(low: Any, high: Any) -> Any:
        if isinstance(high, Mapping):
            return {key: at(low[key], size) for key, size in high.items()}
        return type(high)(high + small.more * (high - low)) if isinstance(high, int | float) else high

    whole = replace(many, **{name: at(getattr(few, name), size) for name, size in vars(many).items()})
    if many.reserved_high_bytes is None:
        return whole
    # not linear in blocks: the extrapolation may be below the peak
    return replace(
        whole, reserved=None, reserved_high_bytes=max(whole.reserved_high_bytes or 0, whole.device_peak_bytes)
    )


def run_works(
    works: Sequence[Work], execute: Callable[..., Any], take: Callable[[int, SimulatedCell], None],
    costs: GpuCosts | None = None, note: Callable[[int, Any], None] = lambda *_: None,
) -> None:  # fmt: skip
    """Simulates works, also those that `take` adds, which gets each work's index and answer. `execute`: execute_all for
    a device. `note` gets the index of a config, and its progress or its execution.
    """
    configs, operators, executed = list[CellConfig](), list[bool](), dict[int, Execution]()
    settings: list[Collection[str]] = []
    jobs: list[range] = []  # of each work: indices of its configs

    def add_new() -> None:
        for work in works[len(jobs) :]:
            jobs.append(range(len(configs), len(configs) + len(work.small.configs)))
            configs.extend(work.small.configs)
            operators.extend([work.timed] * len(work.small.configs))
            settings.extend([work.settings] * len(work.small.configs))

    def report(job: int, news: dict[str, Any] | Execution) -> None:
        note(job, news)
        if isinstance(news, Execution):
            executed[job] = news
            index = next(index for index, own in enumerate(jobs) if job in own)
            if executed.keys() >= {*jobs[index]}:
                take(index, works[index].answer([executed.pop(own) for own in jobs[index]], costs))
                add_new()

    add_new()
    execute(configs, tell=report, operators=operators, settings=settings)


def simulate(
    verb: str, question: Question, jobs: int | None = None, timeout_s: float = Limits().seconds,
    tensors: int = LARGEST, costs: GpuCosts | None = None,
) -> list[SimulatedCell]:  # fmt: skip
    """Simulates the cells of a question: their memory or, with `costs`, their steps. Cells with problems are returned
    as they are. Progress is on standard error. `tensors`: number of tensors to list.
    """
    target, names = question.target, name_strategies([cell.config for cell in question.cells])
    named = zip(question.cells, names, strict=True)
    cells = [SimulatedCell(cell, target, name, "; ".join(cell.problems)) for cell, name in named]
    due = [index for index, cell in enumerate(cells) if not cell.problem]
    works = [Work.of(cells[index].cell) if costs is None else Work.of_step(cells[index].cell) for index in due]
    measures = [settled(config).measure for work in works for config in work.small.configs]
    steps, done = [measure.warmup + measure.steps for measure in measures], dict[int, int]()
    with progress_bar(verb, sum(steps), "steps") as show_done:

        def note(job: int, news: dict[str, Any] | Execution) -> None:
            done[job] = steps[job] if isinstance(news, Execution) else news["step"]
            if not isinstance(news, Execution):
                show_done(sum(done.values()))

        def take(index: int, cell: SimulatedCell) -> None:
            name = names[due[index]]
            cells[due[index]] = replace(cell, target=target, name=name, tensors=cell.tensors[:tensors])
            show_done(sum(done.values()), name=name)

        execute = partial(execute_all, target=target, jobs=jobs, limits=Limits(seconds=timeout_s))
        run_works(works, execute, take, costs, note)
    return cells
