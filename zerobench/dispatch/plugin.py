"""Hydra's plugin that launches a job: instantiated with the job's resources, and called with one job.

`launch` of a plugin returns when the job is over, and raises where it was lost; so each job is launched from a thread
of its own. Hydra's private modules are used here, and in config/compose.py, alone.
"""

from __future__ import annotations

import threading
from functools import partial
from importlib import import_module

from hydra._internal.callbacks import Callbacks
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

from ..config.hydra_keys import quoted
from ..config.launcher import LauncherChoice, Resources
from ..config.overrides import Overrides
from .job_folder import JobFolder
from .plan import RAY, settings_for
from .task import run_job

QUIET = ("hydra/hydra_logging=none", "hydra/job_logging=none", "hydra.output_subdir=null")
"""Overrides with which Hydra writes no log and no config of its own."""

SUBMITIT = "submitit_folder"
"""Setting of submitit's plugins: the folder of its files, whose names begin with the job's id.

Their default is a folder by the id, which submitit makes once the job is in the queue: a job that has begun by then
dies without its log.
"""


class Plugin:
    """The plugin of a sweep."""

    def __init__(self, choice: LauncherChoice, check: Overrides) -> None:
        self.choice = choice
        self._config = check.compose_whole([*choice.words, *QUIET])
        self._context = HydraContext(check.loader, Callbacks())
        self._starting = threading.Lock()

    def launch(self, folder: JobFolder, resources: Resources) -> int | None:
        """Runs one job to its end and returns its command's exit code, if it has one. Raises what the plugin raises
        where the job is lost or refused.
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
        """Starts Ray, or joins a cluster, before the first job: its plugin does so in each, and jobs are launched from
        threads.
        """
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
