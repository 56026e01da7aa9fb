"""Executes cells in a real world of N ranks, and each of those ranks on fake tensors, a process per rank.

real    gloo, tensors with values, every rank at once
fake    the rank alone, backend=simulated tensors=fake
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zerobench.config.cell import CellConfig
from zerobench.launch.processes import launch
from zerobench.worker import RankJob, RankRecord, run_rank

Records = dict[str, list[RankRecord | str]]
"""Name of a cell -> a record per rank, or a sentence where there is none."""


def run_real(configs: Mapping[str, CellConfig], folder: Path, timeout_s: float = 280) -> Records:
    """Returns every rank's accounted pass in real worlds, one world after the other in one launch of ranks."""
    return _run(configs, folder, "real", timeout_s)


def run_fake(configs: Mapping[str, CellConfig], folder: Path, timeout_s: float = 280) -> Records:
    """Returns the accounted pass of each rank, executed on fake tensors."""
    faked = {name: replace(one, backend="simulated", tensors="fake") for name, one in configs.items()}
    return _run(faked, folder, "fake", timeout_s)


def _run(configs: Mapping[str, CellConfig], folder: Path, kind: str, timeout_s: float) -> Records:
    (ranks,) = {config.world_size for config in configs.values()}
    jobs = [(dict(configs), rank, str(folder / kind)) for rank in range(ranks)]
    (folder / kind).mkdir(parents=True, exist_ok=True)
    outcome = launch(_of_rank, jobs, folder / kind / "logs", timeout_s)
    assert outcome.status == "ok", outcome.reason
    return {name: [one[name] for one in outcome.results] for name in configs}


def _of_rank(job: tuple[dict[str, CellConfig], int, str], tell: Any) -> dict[str, RankRecord | str]:
    configs, rank, folder = job
    return {
        name: _record(RankJob(config, "accounted", rank, f"{folder}/rendezvous-{number}", folder))
        for number, (name, config) in enumerate(configs.items())
    }


def _record(job: RankJob) -> RankRecord | str:
    try:
        return run_rank(job, lambda _: None)
    except Exception:
        if dist.is_initialized():
            dist.destroy_process_group()
        return traceback.format_exc()
