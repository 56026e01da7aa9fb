"""Executes cells on fake tensors, or runs them in real worlds; each outcome is handed on as it comes, with progress.

executed   one rank of each cell, the fullest, in a process of its own: no values, no memory, any number of ranks
real       gloo, tensors with values, a process per rank, all at once
fake       chosen ranks of a cell as it is, without what an execution changes: to compare with the same real ones
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zerobench.config.cell import CellConfig
from zerobench.fake.as_gpu import SETTINGS
from zerobench.host.environment import FAKE, SIMULATED
from zerobench.host.terminal import progress_bar
from zerobench.rank_record import RankRecord
from zerobench.ranks.start_ranks import LaunchError, launch
from zerobench.simulation.execute import LIMITS, Execution, Limits, Target, execute_all
from zerobench.worker import RankJob, run_rank

Work = tuple[CellConfig, Target]
"""A cell, and the device that it is executed for."""

Records = dict[str, dict[int, RankRecord | str]]
"""Name of a cell -> rank -> its record, or where there is none the error."""


def execute_cells(
    what: str, work: Sequence[Work], limits: Limits = LIMITS,
    take: Callable[[int, Execution], None] = lambda *_: None, operators: bool = False,
    settings: Collection[str] = SETTINGS.keys(),
) -> list[Execution]:  # fmt: skip
    """Executes cells, one per core at a time, and returns their executions in order. `take` gets each one as it ends,
    with its index; `operators`: with every compute operator; `settings`: of a GPU's allocator. Whatever goes wrong is
    the `problem` of an execution.
    """
    executed: dict[int, Execution] = {}
    with progress_bar(what, len(work), "cells") as advance:
        for target in dict.fromkeys(target for _, target in work):
            indices = [index for index, (_, its) in enumerate(work) if its == target]

            def heard(number: int, news: Any, indices: Sequence[int] = indices) -> None:
                if isinstance(news, Execution):
                    advance()
                    take(indices[number], news)

            executions = execute_all(
                [work[index][0] for index in indices], target, None, heard, limits, operators,
                settings=[settings] * len(indices),
            )  # fmt: skip
            executed |= zip(indices, executions, strict=True)
    return [executed[index] for index in range(len(work))]


def run_real(configs: Mapping[str, CellConfig], folder: Path, timeout_s: float = 280) -> Records:
    """Returns every rank's accounted pass in real worlds, one world after the other in one launch of ranks."""
    (ranks,) = {config.world_size for config in configs.values()}
    return _run(configs, range(ranks), folder / "real", timeout_s)


def run_fake(configs: Mapping[str, CellConfig], folder: Path, timeout_s: float = 280) -> Records:
    """Returns the accounted pass of the first rank and the last, simulated on fake tensors."""
    (ranks,) = {config.world_size for config in configs.values()}
    faked = {name: replace(config, backend=SIMULATED, tensors=FAKE) for name, config in configs.items()}
    return _run(faked, (0, ranks - 1), folder / "fake", timeout_s)


def _run(configs: Mapping[str, CellConfig], ranks: Sequence[int], folder: Path, timeout_s: float) -> Records:
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [(dict(configs), rank, str(folder)) for rank in ranks]
    try:
        results = launch(_of_rank, jobs, folder / "logs", timeout_s)
    except LaunchError as error:
        raise ValueError(str(error)) from error
    return {name: {rank: of[name] for rank, of in zip(ranks, results, strict=True)} for name in configs}


def _of_rank(job: tuple[dict[str, CellConfig], int, str], tell: Any) -> dict[str, RankRecord | str]:
    import_module("validation.variants")  # it registers models, which a fresh process does not know

    configs, rank, folder = job
    records: dict[str, RankRecord | str] = {}
    for number, (name, config) in enumerate(configs.items()):
        gc.collect()  # garbage of the cell before would be freed in the midst of this one, as the allocator sees it
        try:
            job_of_cell = RankJob(config, "accounted", rank, f"{folder}/rendezvous-{number}", folder)
            records[name] = run_rank(job_of_cell, lambda _: None)
        except Exception:
            if dist.is_initialized():
                dist.destroy_process_group()
            records[name] = traceback.format_exc()
    return records
