"""Simulates cells side by side, one at a time in a process: a failure becomes an error message in the cell's result.

limits      time of each cell and memory of each process; one that exceeds them ends, and the others continue
again       a process whose cell was simulated takes the next: its first simulation takes longer than the others
in order    executions are returned in the order of the cells, whichever finishes first
"""

from __future__ import annotations

import gc
import resource
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..config.cell import CellConfig
from ..host.environment import data_bytes, usable_cores
from ..host.temporary import temporary_folder
from ..launch.start_ranks import Outcome, launch_each
from ..sizes import show_bytes
from .execute import CPU, Execution, Target, execute

OUT_OF_MEMORY = ("MemoryError", "can't allocate memory", "bad_alloc")
"""Words in errors of Python, torch and C++ when a process exceeds its memory limit."""


@dataclass(frozen=True)
class Limits:
    """Limits of one cell's process: `seconds`, and `memory_bytes` in addition to its initial memory."""

    seconds: float = 600.0
    memory_bytes: int = 4 * 2**30


LIMITS = Limits()

MOST_GARBAGE = 2**28
"""Bytes by which earlier simulations may have left a process larger before it searches for garbage."""

Told = Callable[[int, "dict[str, Any] | Execution"], None]
"""Takes a cell's index, and its progress (`step` of `steps`) or, at its end, its execution."""


@dataclass(frozen=True)
class _Job:
    config: CellConfig
    target: Target
    limits: Limits
    folder: str
    operators: bool = False


def execute_all(
    configs: Sequence[CellConfig],
    target: Target = CPU,
    jobs: int | None = None,
    tell: Told = lambda *_: None,
    limits: Limits = LIMITS,
    operators: bool | Sequence[bool] = False,
) -> list[Execution]:
    """Simulates one rank of each resolved cell, `jobs` in parallel (None: one per core that this process may use), and
    of those that `tell` adds to `configs` at the end of one. `operators`: whether their events include every compute
    operator, of all or one by one.

    A crash, timeout or excess of memory becomes an error message in that execution's `problem`. Raises
    KeyboardInterrupt when the user interrupts, after all processes have ended. These processes build users' models as a
    sweep's ranks do, from the script or package that registers them.
    """
    at_once, work = jobs or usable_cores(), list[_Job]()
    with temporary_folder() as folder:

        def add_new() -> None:
            for number, config in enumerate(configs[len(work) :], len(work)):
                every = operators if isinstance(operators, bool) else operators[number]
                work.append(_Job(config, target, limits, str(folder), every))

        def heard(number: int, news: Any) -> None:
            tell(number, _execution_of(configs[number], news, limits) if isinstance(news, Outcome) else news)
            add_new()

        add_new()
        outcomes = launch_each(run_job, work, folder, limits.seconds, at_once, heard, _is_sound)
    return [_execution_of(config, outcome, limits) for config, outcome in zip(configs, outcomes, strict=True)]


def run_job(job: _Job, tell: Callable[[Any], None]) -> Execution:
    """Simulates a cell in a forked process. `limits.memory_bytes` is in addition to the memory at its first cell."""
    # To search for garbage in cycles takes a fifth of a simulation, whose bytes would depend on when Python searches.
    gc.disable()
    tempfile.tempdir = job.folder  # what a killed process leaves goes with the folder
    limit, most = resource.getrlimit(resource.RLIMIT_DATA)
    if limit == most:
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + job.limits.memory_bytes, most))
    elif data_bytes() + job.limits.memory_bytes > limit + MOST_GARBAGE:
        gc.collect()
    return execute(job.config, tell, job.target, job.operators)


def _is_sound(execution: Execution) -> bool:
    return not execution.problem


def _execution_of(config: CellConfig, outcome: Outcome, limits: Limits) -> Execution:
    if outcome.status != "ok":
        return Execution(config, 0, 0.0, None, _problem_of(outcome.reason, limits))
    found: Execution = outcome.results[0]
    if any(word in found.problem for word in OUT_OF_MEMORY):
        return Execution(found.config, found.rank, found.seconds, None, _problem_of(found.problem, limits))
    return found


def _problem_of(reason: str, limits: Limits) -> str:
    if any(word in reason for word in OUT_OF_MEMORY):
        return f"its execution takes more than {show_bytes(limits.memory_bytes)} of this machine's memory"
    return f"its execution {reason}"
