"""Executes cells in a real world of N ranks, and the first and the last of them on fake tensors, a process per rank.

real    gloo, tensors with values, every rank at once
fake    the first or the last of them alone, backend=simulated tensors=fake
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

import tests.distributed.variants  # noqa: F401  # registers models, which a rank's process must know as well
from zerobench.config.cell import CellConfig
from zerobench.launch.start_ranks import launch
from zerobench.worker import RankJob, RankRecord, run_rank

Records = dict[str, dict[int, RankRecord | str]]
"""Name of a cell -> rank -> its record, or where there is none what went wrong."""


def run_real(configs: Mapping[str, CellConfig], folder: Path, timeout_s: float = 280) -> Records:
    """Returns every rank's accounted pass in real worlds, one world after the other in one launch of ranks."""
    (ranks,) = {config.world_size for config in configs.values()}
    return _run(configs, range(ranks), folder / "real", timeout_s)


def run_fake(configs: Mapping[str, CellConfig], folder: Path, timeout_s: float = 280) -> Records:
    """Returns the accounted pass of the first rank and the last, executed on fake tensors."""
    (ranks,) = {config.world_size for config in configs.values()}
    faked = {name: replace(one, backend="simulated", tensors="fake") for name, one in configs.items()}
    return _run(faked, (0, ranks - 1), folder / "fake", timeout_s)


def _run(configs: Mapping[str, CellConfig], ranks: Sequence[int], folder: Path, timeout_s: float) -> Records:
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [(dict(configs), rank, str(folder)) for rank in ranks]
    outcome = launch(_of_rank, jobs, folder / "logs", timeout_s)
    assert outcome.status == "ok", outcome.reason
    return {name: {rank: of[name] for rank, of in zip(ranks, outcome.results, strict=True)} for name in configs}


def _of_rank(job: tuple[dict[str, CellConfig], int, str], tell: Any) -> dict[str, RankRecord | str]:
    configs, rank, folder = job
    return {
        name: _record(RankJob(config, "accounted", rank, f"{folder}/rendezvous-{number}", folder))
        for number, (name, config) in enumerate(configs.items())
    }


def _record(job: RankJob) -> RankRecord | str:
    gc.collect()  # what the cell before has left would be freed in the midst of this one, as the allocator sees it
    try:
        return run_rank(job, lambda _: None)
    except Exception:
        if dist.is_initialized():
            dist.destroy_process_group()
        return traceback.format_exc()
