"""One rank of a cell, simulated on fake tensors: the bytes that a run would use and send.

cell        any resolved cell; it runs as backend=simulated tensors=fake, with the fewest steps that reach steady state
target      the device to simulate: cpu, as this harness runs there (gloo's exchange in pieces, CPU kernels); cuda, as
            it would run on GPUs (NCCL collectives on streams, CUDA's kernels and defaults, memory from the caching
            allocator: fake/as_gpu)
rank        the one that the cell names, or the one that has the peak
execution   that rank's records, as from an accounted pass, or the error message if there are none
parts       of its peak: the categories, but activations and temporaries as wide as the vocabulary are logits, if a
            module with a weight makes them, the output projection, else loss: its fp32 copy, their gradients
processes   simulate many cells side by side, one at a time each, within limits of time and memory. A process whose cell
            was simulated takes the next: its first simulation takes longer than the others, as it imports the model
"""

from __future__ import annotations

import gc
import resource
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch.distributed as dist

from .. import strategies
from ..config.cell import CellConfig
from ..config.schema import Measure
from ..config.schema_memory import CpuOffload
from ..fake.as_gpu import (
    ATTENTION_KERNELS,
    BLAS_WORKSPACE,
    EXPANDABLE,
    SETTINGS,
    Allocations,
    DeviceMemory,
    as_gpu,
)
from ..fake.as_gpu.kernels import fused_rms_norms
from ..host.environment import FAKE, SIMULATED, data_bytes, usable_cores
from ..host.temporary import temporary_folder
from ..predict.build import ModelFacts, facts_if_any
from ..predict.estimate import host_bytes_beyond, simulated_ranks
from ..rank_record import RankRecord
from ..ranks.start_ranks import Failure, RankProcess, dismiss, launch_each
from ..records import CATEGORIES, STATES, LineRow, MemoryRow, TensorRow
from ..sizes import show_bytes
from ..worker import RankJob, run_rank

KINDS = ("cpu", "cuda")


@dataclass(frozen=True)
class Target:
    """The device to simulate. `attention`: kernel of scaled_dot_product_attention on a GPU: math, flash, efficient;
    None: torch's choice. `architecture`: of the GPU, hopper and later or ampere and earlier, for the size of cuBLAS
    workspaces. `fused_norms`: RMS norms of transformers run as one kernel, as in training codes with their own.

    Raises ValueError for an unknown name.
    """

    kind: str = "cpu"
    attention: str | None = None
    architecture: str = "hopper"
    fused_norms: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"device={self.kind}: use one of {', '.join(KINDS)}")
        if self.attention is not None and self.attention not in ATTENTION_KERNELS:
            raise ValueError(f"attention={self.attention}: use one of {', '.join(ATTENTION_KERNELS)}")
        if self.attention is not None and self.kind != "cuda":
            raise ValueError(f"attention={self.attention}: kernels of attention are a GPU's to choose; use device=cuda")
        if self.architecture not in BLAS_WORKSPACE:
            raise ValueError(f"architecture={self.architecture}: use one of {', '.join(BLAS_WORKSPACE)}")

    @contextmanager
    def stands_in(self) -> Iterator[Allocations | None]:
        """Makes fake CPU tensors act as this device's; yields the allocations of a GPU, None for a CPU."""
        if self.kind == "cpu":
            yield None
            return
        norms = fused_rms_norms() if self.fused_norms else nullcontext()
        with as_gpu(self.attention, BLAS_WORKSPACE[self.architecture]) as allocations, norms:
            yield allocations


CPU, CUDA = Target(), Target("cuda")


def settled(config: CellConfig) -> CellConfig:
    """Returns the cell with one measured step, after the steps that the strategy needs to settle. Updates that a run
    would delay after some steps are delayed from the second on.
    """
    if isinstance(config.offload, CpuOffload) and config.offload.delayed:
        config = replace(config, offload=replace(config.offload, delayed_after=1))
    warmup = max(strategies.spec_of(config.strategy.name).settles_after, config.offload.settles_after)
    return replace(config, measure=Measure(steps=1, warmup=warmup, passes="both", events=config.measure.events))


# -- the execution ---------------------------------------------------------------------------------


LOGITS, LOSS = "logits", "loss"

FLEETING = ("activations", "temporary")
"""Categories that logits and loss are taken from."""

PARTS = (*(name for name in CATEGORIES if name not in ("inputs", "temporary")), LOGITS, LOSS, "inputs", "temporary")
"""The parts of a peak, in display order."""


@dataclass(frozen=True)
class Execution:
    """The results for one rank of a cell: its memory and traffic.

    `problem`: an error message if the simulation failed, else empty. `seconds`: time that the simulation took.
    `memory`: a GPU's, under its allocator; None for a CPU. `resident_bytes`: peak memory of the simulating process on
    this machine. `facts`: about the model; None if it cannot be built on the meta device. `others`: executions of
    other ranks, if these were needed to find the peak; states and a GPU's memory are the largest over all of them.
    """

    config: CellConfig
    rank: int
    seconds: float
    record: RankRecord | None
    problem: str = ""
    memory: DeviceMemory | None = None
    resident_bytes: int = 0
    facts: ModelFacts | None = None
    others: tuple[Execution, ...] = ()

    @property
    def allocated_bytes(self) -> int | None:
        """The peak in a GPU's allocator: in blocks of 512 bytes, with cuBLAS workspaces; None for a CPU."""
        sizes = [rank.memory.allocated_bytes for rank in (self, *self.others) if rank.memory is not None]
        return max(sizes, default=None)

    @property
    def reserved(self) -> DeviceMemory | None:
        """A GPU's memory on the rank whose allocator reserves most; None for a CPU, and if it was not asked for."""
        memories = [
            rank.memory for rank in (self, *self.others) if rank.memory and EXPANDABLE in rank.memory.by_setting
        ]
        return max(memories, key=lambda memory: memory.reserved_bytes[::-1], default=None)

    @property
    def reserved_bytes(self) -> tuple[int, int] | None:
        """Bytes that a GPU's allocator reserves, by default and with expandable segments, smaller first, if known."""
        return None if self.reserved is None else self.reserved.reserved_bytes

    @property
    def peak_bytes(self) -> int:
        """The largest sum of live bytes on the device in a step."""
        return self._step["total"].max_bytes

    @property
    def states_bytes(self) -> int:
        """The largest sum of states on the device: parameters, gradients, masters, optimizer, communication."""
        return self._fullest._step["states"].max_bytes

    @property
    def host_bytes(self) -> int:
        """The largest sum of live bytes in host memory in a step, on the rank that uses most host memory."""
        return self._largest_in("host") + host_bytes_beyond(self.config, self.result.schedule, self.rank)

    @property
    def file_bytes(self) -> int:
        """The largest sum of bytes in files in a step."""
        return self._largest_in("nvme")

    @property
    def at_peak(self) -> dict[str, int]:
        """Category -> its bytes at the peak instant; they add up to `peak_bytes`."""
        return {category: self._step[category].at_peak_bytes or 0 for category in CATEGORIES}

    @property
    def at_most_states(self) -> dict[str, int]:
        """Category of states -> its bytes when their sum is largest; they add up to `states_bytes`."""
        return {category: self._fullest._step[category].at_states_peak_bytes or 0 for category in STATES}

    @property
    def tensors(self) -> list[TensorRow]:
        """The largest storages at the peak instant."""
        return self.result.tensors

    @property
    def volume_elements(self) -> float:
        """Elements that the rank moves in a step, by the paper's convention."""
        return sum(row.volume_elements for row in self.result.traffic)

    @property
    def wire_bytes(self) -> float:
        """Bytes that the rank sends in a step, without control traffic."""
        return sum(row.wire_bytes for row in self.result.traffic if not row.control)

    @property
    def result(self) -> RankRecord:
        """The record. Raises ValueError if the simulation failed."""
        if self.record is None:
            raise ValueError(self.problem)
        return self.record

    @cached_property
    def _step(self) -> dict[str, MemoryRow]:
        return {row.category: row for row in self.result.memory if row.phase == "step" and row.tier == "device"}

    @property
    def _fullest(self) -> Execution:
        return max((self, *self.others), key=lambda execution: execution._step["states"].max_bytes)

    def part_of(self, row: LineRow | TensorRow) -> str:
        """Returns the part of a row of its tables. If modules are unknown (the model cannot be built on the meta
        device), logits count as loss.
        """
        if row.category not in FLEETING:
            return row.category
        vocabulary = self.config.model_options.get("vocabulary")
        width = vocabulary if isinstance(vocabulary, int) else self.config.vocabulary or None
        if row.shape.split("x")[-1] != str(width):
            return row.category
        return LOGITS if self.facts and row.module in self.facts.weighted else LOSS

    @property
    def parts_bytes(self) -> dict[str, int]:
        """Part -> its bytes at the peak instant; they add up to `peak_bytes`."""
        parts = dict.fromkeys(PARTS, 0) | self.at_peak
        for row in self.result.lines:
            if row.at == "peak" and (part := self.part_of(row)) != row.category:
                parts[row.category] -= row.bytes
                parts[part] += row.bytes
        return parts

    def _largest_in(self, tier: str) -> int:
        rows = [row for row in self.result.memory if (row.phase, row.tier, row.category) == ("step", tier, "total")]
        return max((row.max_bytes for row in rows), default=0)


def execute(
    config: CellConfig, report: Callable[[dict[str, Any]], None] = lambda _: None, target: Target = CPU,
    operators: bool = False, settings: Collection[str] = SETTINGS.keys(),
) -> Execution:  # fmt: skip
    """Simulates one rank of a resolved cell as on `target`: the one that has the peak. Any failure becomes an error
    message in the result. `report` takes progress. `operators`: whether its events include every compute operator, for
    times; then the rank is the one with the largest states. `settings`: of a GPU's allocator, which is replayed with
    each of them.
    """
    config = replace(settled(config), backend=SIMULATED, device="cpu", tensors=FAKE)
    facts, executions = facts_if_any(config), list[Execution]()
    for rank in simulated_ranks(config, facts)[: 1 if operators else None]:
        begun, record, memory, problem = time.perf_counter(), None, None, ""
        with tempfile.TemporaryDirectory(prefix="zerobench-") as folder:
            try:
                with target.stands_in() as allocations:
                    record = run_rank(RankJob(config, "accounted", rank, "", folder, operators=operators), report)
                memory = allocations.memory(settings) if allocations and settings else None
            except Exception as error:  # a model may be any code: the other cells are executed all the same
                problem = (str(error).strip() or "no message").splitlines()[0]
                if not type(error).__module__.startswith("zerobench"):
                    problem = f"{type(error).__name__}: {problem}"
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        seconds = time.perf_counter() - begun
        executions.append(Execution(config, rank, seconds, record, problem, memory, resident, facts))
        if problem:
            return executions[-1]
    peak = max(executions, key=lambda execution: execution.peak_bytes)
    seconds = sum(execution.seconds for execution in executions)
    return replace(peak, seconds=seconds, others=tuple(other for other in executions if other is not peak))


# -- many cells, in processes ----------------------------------------------------------------------


OUT_OF_MEMORY = ("MemoryError", "can't allocate memory", "bad_alloc")
"""Words in errors of Python, torch and C++ when a process exceeds its memory limit."""

MOST_GARBAGE = 2**28
"""Bytes by which earlier simulations may have enlarged a process before it collects garbage."""


@dataclass(frozen=True)
class Limits:
    """Limits of one cell's process: `seconds`, and `memory_bytes` in addition to its initial memory."""

    seconds: float = 600.0
    memory_bytes: int = 4 * 2**30


LIMITS = Limits()


@dataclass(frozen=True)
class _Job:
    config: CellConfig
    target: Target
    limits: Limits
    folder: str
    operators: bool
    settings: Collection[str]


@contextmanager
def kept_processes() -> Iterator[list[RankProcess]]:
    """Yields a list of processes, empty at first, which the calls of `execute_all` in the block reuse."""
    ready: list[RankProcess] = []
    try:
        yield ready
    finally:
        dismiss(ready)


def execute_all(
    configs: Sequence[CellConfig], target: Target = CPU, jobs: int | None = None,
    tell: Callable[[int, dict[str, Any] | Execution], None] = lambda *_: None, limits: Limits = LIMITS,
    operators: bool | Sequence[bool] = False, processes: list[RankProcess] | None = None,
    settings: Sequence[Collection[str]] = (),
) -> list[Execution]:  # fmt: skip
    """Simulates one rank of each resolved cell, `jobs` in parallel (None: one per core that this process may use).
    `tell` gets a cell's index and its progress (`step` of `steps`) or, at its end, its execution, and may then append
    cells to `configs`. `operators`: whether events include every compute operator, one value for all cells or one each.
    `processes`: from `kept_processes`. `settings`: of a GPU's allocator, for each cell; empty: all. Executions are
    returned in the order of the cells.

    A crash, timeout or excess of memory becomes an error message in that execution's `problem`. Raises
    KeyboardInterrupt when the user interrupts, after all processes have ended. These processes build users' models as a
    sweep's ranks do, from the script or package that registers them.
    """
    work, executions = list[_Job](), dict[int, Execution]()
    with temporary_folder() as folder:

        def add_new() -> None:
            for index, config in enumerate(configs[len(work) :], len(work)):
                every = operators if isinstance(operators, bool) else operators[index]
                replayed = settings[index] if settings else SETTINGS.keys()
                work.append(_Job(config, target, limits, str(folder), every, [*replayed]))

        def report(index: int, news: Any) -> None:
            if isinstance(news, Execution | Failure):
                news = executions[index] = _execution_of(configs[index], news, limits)
            tell(index, news)
            add_new()

        add_new()
        launch_each(run_job, work, folder, limits.seconds, jobs or usable_cores(), report, _is_sound, processes)
    return [executions[index] for index in range(len(work))]


def run_job(job: _Job, report: Callable[[Any], None]) -> Execution:
    """Simulates a cell in a forked process. `limits.memory_bytes` is in addition to the memory at its first cell."""
    # Garbage collection takes a fifth of a simulation's time, and the bytes would depend on when Python collects.
    gc.disable()
    tempfile.tempdir = job.folder  # what a killed process leaves goes with the folder
    limit, most = resource.getrlimit(resource.RLIMIT_DATA)
    if limit == most:
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + job.limits.memory_bytes, most))
    elif data_bytes() + job.limits.memory_bytes > limit + MOST_GARBAGE:
        gc.collect()
    return execute(job.config, report, job.target, job.operators, job.settings)


def _is_sound(execution: Execution) -> bool:
    return not execution.problem


def _execution_of(config: CellConfig, end: Execution | Failure, limits: Limits) -> Execution:
    execution = Execution(config, 0, 0.0, None, end.text) if isinstance(end, Failure) else end
    if any(word in execution.problem for word in OUT_OF_MEMORY):
        problem = f"its execution takes more than {show_bytes(limits.memory_bytes)} of this machine's memory"
    elif execution is end:
        return execution
    else:
        problem = f"its execution {execution.problem}"
    return Execution(execution.config, execution.rank, execution.seconds, None, problem)
