"""Hydra plugins that a command line chooses: a sweep's launcher, and the objective of a sweeper that proposes cells.

local       our own launcher: one cell after the other, on this machine or over the job that this process is part of
plugin      a Hydra plugin (submitit_slurm, ray, ...): each of its jobs runs a cell, perhaps on an unknown machine
settings    the plugin's config, hydra.launcher; `asked` settings differ from the plugin's defaults
objective   columns of the table of runs. A sweeper (Optuna, Nevergrad, ...) gets the column's value times the sign
            before the name, and minimizes it: `peak_bytes`, `-tokens_per_s`. `+tokens_per_s` is for a sweeper whose own
            setting is to maximize
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from ..records.describe import columns_of
from .keys import nearest

LOCAL = "local"
BASIC = "basic"
"""Hydra's name for the built-in launcher and sweeper."""

LAUNCHER, SETTINGS = "hydra/launcher", "hydra.launcher"

SWEEPER = "hydra/sweeper"

HERE = ("submitit_local", "joblib")
"""Plugins whose jobs run on this machine."""

RAY = "ray"
"""Setting that only Ray's plugins have: `init`, the cluster, and `remote`, the resources of a task."""

AT_ONCE = ("array_parallelism", "n_jobs")
"""Plugin settings that limit the number of concurrent jobs."""


@dataclass(frozen=True)
class LauncherChoice:
    """A plugin that a command line or its experiment chooses. `asked`: settings that differ from the defaults."""

    name: str
    settings: Mapping[str, Any]
    asked: Mapping[str, Any]

    @property
    def is_here(self) -> bool:
        """Whether its jobs run on this machine, so that GPUs and cores can be counted."""
        return self.name in HERE

    def wants_gpus(self) -> bool:
        remote = (self.settings.get(RAY) or {}).get("remote") or {}
        return bool(remote.get("num_gpus")) or any(
            self.asked.get(key) for key in ("gpus_per_node", "gpus_per_task", "gres")
        )


def chosen_launcher(hydra: DictConfig, overrides: Iterable[str]) -> LauncherChoice | None:
    """Returns the plugin of a composed config, None for our own launcher. `overrides`: of the command line, whose
    settings count as asked for even if they repeat a default.
    """
    name = hydra.runtime.choices.get(LAUNCHER, BASIC)
    if name == BASIC:
        return None
    settings: Any = OmegaConf.to_container(hydra.launcher, resolve=False)
    # by its class: a yaml of the user's own, which begins with a plugin's, has another name
    stored: Any = [plugin.node for plugin in ConfigStore.instance().repo["hydra"]["launcher"].values()]
    plugins, target = {node.get("_target_"): node for node in stored}, settings.get("_target_")
    if target not in plugins:
        raise ValueError(
            f"{name}.yaml has _target_={target}, which is no installed launcher's; begin it with one's yaml"
        )
    defaults: Any = OmegaConf.to_container(plugins[target], resolve=False)
    given = {word.partition("=")[0].lstrip("+").removeprefix(f"{SETTINGS}.") for word in overrides}
    asked = {key: value for key, value in settings.items() if key in given or value != defaults.get(key)}
    return LauncherChoice(name, settings, asked)


@dataclass(frozen=True)
class Resources:
    """Resources that a job requests, named as in the SLURM plugin."""

    nodes: int
    tasks_per_node: int
    cpus_per_task: int
    gpus_per_node: int | None

    def settings(self, choice: LauncherChoice) -> dict[str, int]:
        """Returns them by key below hydra.launcher; {} if the plugin has no such settings."""
        if RAY in choice.settings:
            remote = choice.settings[RAY].get("remote") or {}
            own = {"num_cpus": self.cpus_per_task * self.tasks_per_node, "num_gpus": self.gpus_per_node}
            return {f"ray.remote.{key}": value for key, value in own.items() if value is not None and key not in remote}
        return {key: value for key, value in vars(self).items() if value is not None and key in choice.settings}


def requested_resources(
    choice: LauncherChoice, world_size: int, node_size: int | None, threads: int, device: str
) -> Resources:
    """Returns the resources of a cell: on one node, one task starts all ranks; on several nodes, each rank is a task
    and joins the job.

    A world with more ranks than fit on a node uses several nodes, if the launcher supports nodes.
    """
    nodes = job_nodes(choice, world_size, node_size)
    ranks = -(-world_size // nodes)
    gpus = choice.asked.get("gpus_per_node") or (ranks if device == "cuda" and not choice.wants_gpus() else None)
    tasks = min(choice.asked.get("tasks_per_node") or (ranks if nodes > 1 else 1), ranks)
    cpus = choice.asked.get("cpus_per_task") or threads * max(1, ranks // tasks)
    return Resources(nodes, tasks, cpus, None if gpus is None else min(gpus, ranks))


def job_nodes(choice: LauncherChoice, world_size: int, node_size: int | None) -> int:
    """Returns the number of nodes of a cell's job: as requested, or as many as its ranks need. A node has at most
    node_size ranks, else gpus_per_node, else tasks_per_node if that is above 1, else all ranks.
    """
    if choice.is_here or "nodes" not in choice.settings:
        return 1
    tasks, gpus = (int(choice.asked.get(key) or 0) for key in ("tasks_per_node", "gpus_per_node"))
    most = node_size or gpus or (tasks if tasks > 1 else world_size)
    return int(choice.asked.get("nodes") or -(-world_size // most))


def at_once(choice: LauncherChoice, wanted: Iterable[Resources]) -> int | None:
    """Returns the maximum number of concurrent jobs: the plugin's own setting; without one, for jobs on this machine,
    as many as its cores allow; else None.
    """
    bound = next((count for key in AT_ONCE if (count := int(choice.settings.get(key) or 0)) > 0), None)
    if bound is None and choice.is_here:
        largest = max((job.cpus_per_task * job.tasks_per_node for job in wanted), default=1)
        return max(1, (os.cpu_count() or 1) // max(1, largest))
    return bound


OBJECTIVE = "objective"

LARGER_UNITS, LARGER = ("tokens / s", "tokens / J"), ("mfu", "hfu", "overlap")
"""Units, and columns without a unit of their own, of which larger values are better."""


@dataclass(frozen=True)
class Objective:
    """A column to optimize, and the sign before its name: "-", "+" or ""."""

    column: str
    sign: str

    def directed(self, figure: float) -> float:
        """Returns the sweeper's value of a run's figure."""
        return -float(figure) if self.sign == "-" else float(figure)

    @property
    def worst(self) -> float:
        """The value for the sweeper of an infeasible cell."""
        return -inf if self.sign == "+" else inf


def parse_objectives(text: str) -> tuple[Objective, ...]:
    """Returns the objectives that `text` names, separated by commas. Raises ValueError for a name that is not a column
    of numbers, and for one without a sign of which larger values are better.
    """
    numbers = {column.name: column for column in columns_of("runs") if column.kind in ("int", "float")}
    objectives = []
    for part in map(str.strip, text.split(",")):
        name = part.removeprefix("-").removeprefix("+")
        sign = part.removesuffix(name)
        if name not in numbers:
            raise ValueError(f"{OBJECTIVE}={part}: no such column of numbers{nearest(name, list(numbers))}")
        if not sign and (numbers[name].unit in LARGER_UNITS or name in LARGER):
            write = f"write {OBJECTIVE}=-{name}, or +{name} if the sweeper's own setting is to maximize"
            raise ValueError(f"{OBJECTIVE}={name}: sweepers minimize, and larger is better; {write}")
        objectives.append(Objective(name, sign))
    return tuple(objectives)
