"""A plugin of Hydra's that proposes cells, for tests where Optuna and Nevergrad are not installed.

It goes through the combinations of its axes in order, again from the first after the last, `n_jobs` at a time.
"""

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from omegaconf import OmegaConf

MODULE = "hydra_plugins.made_up_sweeper"

told: list[Any] = []
"""Per trial the value that the sweeper was told."""


class MadeUpSweeper(Sweeper):
    """Proposes `n_trials` combinations, `n_jobs` at a time."""

    def __init__(self, n_trials: int, n_jobs: int, sampler: Any) -> None:
        self.n_trials, self.n_jobs = n_trials, n_jobs

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.where = config.hydra.sweep.dir
        self.launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> None:
        axes = {
            one.key_or_group: list(one.sweep_iterator()) for one in OverridesParser.create().parse_overrides(arguments)
        }
        combinations = itertools.cycle(itertools.product(*axes.values()))
        for number in range(0, self.n_trials, self.n_jobs):
            batch = [[f"{key}={value}" for key, value in zip(axes, next(combinations), strict=True)]
                     for _ in range(min(self.n_jobs, self.n_trials - number))]  # fmt: skip
            returns = self.launcher.launch(batch, initial_job_idx=number)
            told.extend(done.return_value for done in returns)
        OmegaConf.save(OmegaConf.create({"name": "made_up"}), f"{self.where}/optimization_results.yaml")


@dataclass
class MadeUpConfig:
    _target_: str = f"{MODULE}.MadeUpSweeper"
    n_trials: int = 4
    n_jobs: int = 2
    sampler: Any = None


@dataclass
class SamplerConfig:
    _target_: str = "builtins.dict"
    width: int = 1


@contextmanager
def installed() -> Iterator[None]:
    """Installs the plugin for the duration of the context."""
    module = ModuleType(MODULE)
    module.MadeUpSweeper = MadeUpSweeper  # type: ignore[attr-defined]
    MadeUpSweeper.__module__ = MODULE
    store, plugins, group = ConfigStore.instance(), Plugins.instance(), ConfigStore.instance().repo["hydra"]["sweeper"]
    sys.modules[MODULE] = module
    plugins.register(MadeUpSweeper)
    store.store(group="hydra/sweeper", name="made_up", node=MadeUpConfig)
    store.store(group="hydra/sweeper/sampler", name="made_up", node=SamplerConfig)
    told.clear()
    try:
        yield
    finally:
        del sys.modules[MODULE], group["made_up.yaml"], group["sampler"]["made_up.yaml"]
        del plugins.class_name_to_class[f"{MODULE}.MadeUpSweeper"]
        plugins.plugin_type_to_subclass_list[Sweeper].remove(MadeUpSweeper)
