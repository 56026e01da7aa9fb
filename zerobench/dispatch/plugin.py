"""The Hydra plugin that launches a job: instantiated with the job's resources, and called with one job.

A plugin's `launch` returns when the job is over, and raises if it was lost, so each job is launched from its own
thread.

Also the plan of a dispatched sweep: the launches of each job, and the resources that it requests.

A job runs all repeats of a cell, or the launches of a group of cells (config/grouping.py), interleaved in the order of
the sweep. It requests the smallest resources that are enough for each launch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable, Sequence
from functools import partial, reduce
from importlib import import_module

from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from omegaconf import DictConfig, OmegaConf, open_dict

from ..config.compose import compose_plugin
from ..config.grouping import group_of
from ..config.hydra_keys import quoted
from ..config.launcher import LauncherChoice, Resources, resources_of
from ..config.overrides import Overrides
from ..sections import known
from ..sweep.sweep import CellLaunch
from .job_folder import JobFolder
from .task import run_job

SUBMITIT = "submitit_folder"
"""Setting of submitit's plugins: the folder for its files, whose names begin with the job's id.

The default is a folder named after the id, which submitit creates once the job is in the queue; a job that begins
before then dies for lack of its log.
"""


class Plugin:
    """The plugin of a sweep."""

    def __init__(self, choice: LauncherChoice, check: Overrides) -> None:
        self.choice = choice
        self._config, self._context = compose_plugin(check, choice.words)
        self._starting = threading.Lock()

    def launch(self, folder: JobFolder, resources: Resources) -> int | None:
        """Runs one job to its end and returns its command's exit code, if any. Raises the plugin's exception if the job
        is lost or rejected.
        """
        order = folder.order()
        task = partial(run_job, str(folder.path), order["command"], order["cwd"])
        config = self._configured(folder, resources)
        if RAY in self.choice.settings:
            self._start_ray()
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=self._context, task_function=task, config=config
        )
        where = f"hydra.sweep.dir={quoted(str(folder.path))}"  # where Hydra, in the job, makes folders
        codes = []
        for done in launcher.launch([[where, "hydra.sweep.subdir=hydra"]], initial_job_idx=0):
            if done.status is JobStatus.FAILED:
                raise done._return_value  # the public property prints a line before it raises
            codes.append(done._return_value)
        return next((code for code in codes if isinstance(code, int)), None)

    def _start_ray(self) -> None:
        """Starts or joins Ray before the first job: its plugin would do so for each job, concurrently from threads."""
        with self._starting:
            start = import_module("hydra_plugins.hydra_ray_launcher._launcher_util").start_ray
            start(self._config.hydra.launcher.ray.init)

    def _configured(self, folder: JobFolder, resources: Resources) -> DictConfig:
        config = self._config.copy()
        with open_dict(config):
            config.hydra.sweep.dir = str(folder.path)
            config.hydra.job.name = folder.name
            for key, value in settings_for(resources, self.choice).items():
                OmegaConf.update(config.hydra.launcher, key, value, force_add=True)
            if RAY in config.hydra.launcher:
                remote = config.hydra.launcher.ray.remote
                remote.max_retries = remote.get("max_retries", 0)  # another attempt is launch.retry's
            if SUBMITIT in config.hydra.launcher:
                (folder.path / ".submitit").mkdir(exist_ok=True)  # a job that begins at once has its logs there
                config.hydra.launcher[SUBMITIT] = str(folder.path / ".submitit")
        return config


AT_ONCE = ("array_parallelism", "n_jobs")
"""Plugin settings that limit the number of concurrent jobs."""

NOTE_HERE = (
    "jobs run side by side on this machine and disturb each other's times, not bytes and volumes; with"
    " launch.group_by=all one cell runs after the other"
)

RAY = "ray"
"""Setting that only Ray's plugins have: `init`, the cluster, and `remote`, the resources of a task."""


def groups_of(launches: Sequence[CellLaunch]) -> list[list[CellLaunch]]:
    """Returns the launches of each job, in the order of their first launches."""
    groups: dict[Hashable, list[CellLaunch]] = {}
    for launch in launches:
        groups.setdefault(group_of(launch.cell), []).append(launch)
    return list(groups.values())


def resources_for(launches: Sequence[CellLaunch], choice: LauncherChoice) -> Resources:
    """Returns the resources that are enough for each of a job's launches."""
    configs = [launch.cell.config for launch in launches]
    wanted = [resources_of(choice, c.world_size, c.node_size, known(c.launch.threads), c.device) for c in configs]
    return reduce(Resources.together, wanted)


def settings_for(resources: Resources, choice: LauncherChoice) -> dict[str, int]:
    """Returns resources as plugin settings, by key below hydra.launcher; {} if the plugin has no such settings."""
    if RAY in choice.settings:
        remote = choice.settings[RAY].get("remote") or {}
        cores = resources.cpus_per_task * resources.tasks_per_node
        own = {"num_cpus": cores, "num_gpus": resources.gpus_per_node}
        return {f"ray.remote.{key}": value for key, value in own.items() if value is not None and key not in remote}
    return {key: value for key, value in vars(resources).items() if value is not None and key in choice.settings}


def at_once(choice: LauncherChoice, wanted: Sequence[Resources]) -> int | None:
    """Returns the maximum number of concurrent jobs: the plugin's own setting; without one, for jobs on this machine,
    as many as its cores allow; else None.
    """
    bounds = [int(choice.settings.get(key) or 0) for key in AT_ONCE]
    bound = next((bound for bound in bounds if bound > 0), None)
    if bound is None and choice.is_here:
        largest = max((one.cpus_per_task * one.tasks_per_node for one in wanted), default=1)
        return max(1, (os.cpu_count() or 1) // max(1, largest))
    return bound
