"""The launcher of a sweep: our own, which starts ranks on this machine, or a Hydra plugin.

local       our own: one cell after the other, on this machine or over the job that this process is part of
plugin      a Hydra plugin (submitit_slurm, ray, ...): each of its jobs runs a cell, perhaps on an unknown machine
settings    the plugin's config, hydra.launcher; `asked` settings differ from the plugin's defaults
planned     cells are being resolved for a plugin: GPUs and cores are those its jobs request, not this machine's
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf

from .unknown_keys import nearest

LOCAL = "local"
BASIC = "basic"
"""Hydra's name for the built-in launcher."""

GROUP, SETTINGS = "hydra/launcher", "hydra.launcher"

PLUGINS = {
    "submitit_slurm": "hydra-submitit-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "joblib": "hydra-joblib-launcher",
    "ray": "hydra-ray-launcher",
    "ray_aws": "hydra-ray-launcher",
}
"""Launcher -> the package that provides it."""

HERE = ("submitit_local", "joblib")
"""Plugins whose jobs run on this machine."""


@dataclass(frozen=True)
class LauncherChoice:
    """A plugin chosen on the command line. `words`: the Hydra overrides that choose it. `asked`: settings that differ
    from the plugin's defaults.
    """

    name: str
    words: tuple[str, ...]
    settings: Mapping[str, Any]
    asked: Mapping[str, Any]

    @property
    def is_here(self) -> bool:
        """Whether its jobs run on this machine, so that GPUs and cores can be counted."""
        return self.name in HERE

    def wants_gpus(self) -> bool:
        remote = (self.settings.get("ray") or {}).get("remote") or {}
        return bool(remote.get("num_gpus")) or any(
            self.asked.get(key) for key in ("gpus_per_node", "gpus_per_task", "gres")
        )


@dataclass(frozen=True)
class Resources:
    """Resources that a job requests, named as in the SLURM plugin."""

    nodes: int
    tasks_per_node: int
    cpus_per_task: int
    gpus_per_node: int | None

    def together(self, other: Resources) -> Resources:
        """Returns the smallest resources that are enough for either."""
        gpus = [one for one in (self.gpus_per_node, other.gpus_per_node) if one]
        return Resources(
            max(self.nodes, other.nodes), max(self.tasks_per_node, other.tasks_per_node),
            max(self.cpus_per_task, other.cpus_per_task), max(gpus, default=None),
        )  # fmt: skip


def resources_of(
    choice: LauncherChoice, world_size: int, node_size: int | None, threads: int, device: str
) -> Resources:
    """Returns the resources of a cell: on one node, one task starts all ranks; on several nodes, each rank is a task
    and joins the job.

    A world with more ranks than fit on a node (`most_per_node`) uses several nodes, if the launcher supports nodes.
    """
    nodes = nodes_of(choice, world_size, node_size)
    ranks = -(-world_size // nodes)
    gpus = choice.asked.get("gpus_per_node") or (ranks if device == "cuda" and not choice.wants_gpus() else None)
    tasks = min(choice.asked.get("tasks_per_node") or (ranks if nodes > 1 else 1), ranks)
    cpus = choice.asked.get("cpus_per_task") or threads * max(1, ranks // tasks)
    return Resources(nodes, tasks, cpus, None if gpus is None else min(gpus, ranks))


def nodes_of(choice: LauncherChoice, world_size: int, node_size: int | None) -> int:
    """Returns the number of nodes of a cell's job."""
    if choice.is_here or "nodes" not in choice.settings:
        return 1
    most = node_size or most_per_node(choice) or world_size
    return int(choice.asked.get("nodes") or -(-world_size // most))


def most_per_node(choice: LauncherChoice) -> int | None:
    """Returns the maximum number of ranks of a job on one node: its GPUs, or its tasks if several; None: no bound."""
    tasks = int(choice.asked.get("tasks_per_node") or 1)
    return int(choice.asked.get("gpus_per_node") or 0) or (tasks if tasks > 1 else None)


def known_launchers() -> list[str]:
    """Returns the installed launchers; Hydra calls the built-in one "basic"."""
    Plugins.instance()  # which looks for them
    return sorted(name.removesuffix(".yaml") for name in ConfigStore.instance().list(GROUP))


def problem_of_name(name: str) -> str:
    """Returns an error message for a launcher that is not installed, or ""."""
    if name in known_launchers():
        return ""
    if name in PLUGINS:
        return f"{GROUP}={name}: its plugin is not installed; pip install {PLUGINS[name]}"
    return f"{GROUP}={name}: no such launcher; use one of {', '.join(known_launchers())}"


def problem_of_setting(word: str, usual: DictConfig) -> str:
    """Returns an error message for an override below hydra.launcher whose key the plugin lacks, else "". `usual`: the
    plugin's settings without it. If a setting is a mapping with arbitrary names, + adds a name.
    """
    key, _, _ = word.lstrip("+").partition("=")
    node: Any = usual
    parts = key.removeprefix(f"{SETTINGS}.").split(".")
    for place, part in enumerate(parts):
        if not isinstance(node, DictConfig):
            return ""
        if part not in node:
            is_open = OmegaConf.get_type(node) is dict and place > 0
            if is_open and not word.startswith("+"):
                return f"{word}: a new name is added with a plus: +{word}"
            known = [str(one) for one in node if one != "_target_"]
            return "" if is_open else f"{key}: no such key{nearest(part, known, '.'.join([SETTINGS, *parts[:place]]))}"
        node = node[part]
    return ""


def chosen_launcher(hydra: DictConfig, words: tuple[str, ...]) -> LauncherChoice | None:
    """Returns the plugin of a composed config; None for our own launcher."""
    name = hydra.runtime.choices.get(GROUP, BASIC)
    if name == BASIC:
        return None
    settings: Any = OmegaConf.to_container(hydra.launcher, resolve=False)
    defaults: Any = OmegaConf.to_container(ConfigStore.instance().load(f"{GROUP}/{name}.yaml").node, resolve=False)
    asked = {key: value for key, value in settings.items() if value != defaults.get(key)}
    named = {word.partition("=")[0].lstrip("+").removeprefix(f"{SETTINGS}.") for word in words}
    asked |= {key: settings[key] for key in named if key in settings}
    return LauncherChoice(name, words, settings, asked)


_planned: list[LauncherChoice] = []


@contextmanager
def planning_for(choice: LauncherChoice | None) -> Iterator[None]:
    """Within the context, cells are resolved for the machines of a plugin's jobs."""
    _planned.append(choice) if choice else None
    try:
        yield
    finally:
        _planned.pop() if choice else None


def planned() -> LauncherChoice | None:
    """Returns the plugin for whose jobs cells are resolved; None for our own launcher."""
    return _planned[-1] if _planned else None


def elsewhere() -> LauncherChoice | None:
    """Returns the plugin for whose jobs cells are resolved if they run on machines unknown here, else None."""
    choice = planned()
    return None if choice is None or choice.is_here else choice
