"""Simulates cells side by side, each in its own process: a failure becomes an error message in the cell's result.

limits      time and memory of each process; one that exceeds them ends, and the others go on
in order    executions come back as the cells were given, whichever was done first
"""

from __future__ import annotations

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
"""Words of Python's, torch's and C++'s errors where a process may not have more memory."""


@dataclass(frozen=True)
class Limits:
    """Bounds of the process of one cell: `seconds`, and `memory_bytes` on top of what it begins with."""

    seconds: float = 600.0
    memory_bytes: int = 4 * 2**30


LIMITS = Limits()

Told = Callable[[int, "dict[str, Any] | Execution"], None]
"""Takes a cell's place among the given ones, and its progress (`step` of `steps`) or, at its end, its execution."""


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
    operators: bool = False,
) -> list[Execution]:
    """Executes one rank of each resolved cell, `jobs` of them at once (None: one per core that this process may use).
    `operators`: whether their events have every operator that computes.

    A crash, a timeout, too much memory: a sentence in that execution's `problem`. Raises KeyboardInterrupt when the
    user interrupts; no process is left then. Users' models are built in these processes as in a sweep's ranks: from the
    script or package that registers them.
    """
    at_once = jobs or usable_cores()

    def heard(number: int, news: Any) -> None:
        tell(number, _execution_of(configs[number], news, limits) if isinstance(news, Outcome) else news)

    with temporary_folder() as folder:
        work = [_Job(config, target, limits, str(folder), operators) for config in configs]
        outcomes = launch_each(run_job, work, folder, limits.seconds, at_once, heard)
    return [_execution_of(config, outcome, limits) for config, outcome in zip(configs, outcomes, strict=True)]


def run_job(job: _Job, tell: Callable[[Any], None]) -> Execution:
    """Executes a cell in a process that is forked for it."""
    tempfile.tempdir = job.folder  # what a killed process leaves goes with the folder
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + job.limits.memory_bytes, most))
    return execute(job.config, tell, job.target, job.operators)


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
