"""Launchers that are not zerobench's: a package of plugins, as Hydra finds it on sys.path."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher


class Processes(Launcher):
    """Runs each job in a process of its own."""

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.task, self.config = task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        found = []
        for _ in job_overrides:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found.append(JobReturn(status=JobStatus.COMPLETED, _return_value=pool.apply(self.task, (None,))))
        return found


class Closed(Processes):
    """Refuses every job."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        raise RuntimeError("the cluster is closed\nuntil Monday")


class Forgetful(Processes):
    """Says that jobs are done, and runs none."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        return []


for _kind in (Processes, Closed, Forgetful):
    _node = {"_target_": f"{__name__}.{_kind.__name__}", "limit": 0}
    ConfigStore.instance().store(group="hydra/launcher", name=_kind.__name__.lower(), node=_node, provider="tests")
