"""The plan of a sweep by a launcher: which launches a job runs, and the resources that it asks the launcher for.

A job runs a cell, all its repeats, or the launches of a group of cells (config/grouping.py) in the order of the sweep,
interleaved. It asks for the least that is enough for each of them.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from functools import reduce

from ..config.grouping import group_of
from ..config.launcher import LauncherChoice, Resources, resources_of
from ..sections import known
from ..sweep.sweep import CellLaunch

AT_ONCE = ("array_parallelism", "n_jobs")
"""Settings of plugins that bound the jobs that run at once."""

NOTE_HERE = (
    "jobs run side by side on this machine, where they disturb one another's times, not bytes and volumes; with"
    " launch.group_by=all one cell runs after the other"
)

RAY = "ray"
"""Setting that Ray's plugins alone have: `init`, the cluster, and `remote`, the resources of a task."""


def groups_of(launches: Sequence[CellLaunch]) -> list[list[CellLaunch]]:
    """Returns the launches of each job, in the order of the first."""
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
    """Returns resources as settings of the plugin, key below hydra.launcher -> value; none of one that knows no
    resources.
    """
    if RAY in choice.settings:
        remote = choice.settings[RAY].get("remote") or {}
        cores = resources.cpus_per_task * resources.tasks_per_node
        own = {"num_cpus": cores, "num_gpus": resources.gpus_per_node}
        return {f"ray.remote.{key}": value for key, value in own.items() if value is not None and key not in remote}
    return {key: value for key, value in vars(resources).items() if value is not None and key in choice.settings}


def at_once(choice: LauncherChoice, wanted: Sequence[Resources]) -> int | None:
    """Returns the bound of the jobs that are launched and not over: the plugin's own setting; for jobs on this machine,
    as many as its cores hold, where there is no such setting; else None.
    """
    bounds = [int(choice.settings.get(key) or 0) for key in AT_ONCE]
    bound = next((bound for bound in bounds if bound > 0), None)
    if bound is None and choice.is_here:
        largest = max((one.cpus_per_task * one.tasks_per_node for one in wanted), default=1)
        return max(1, (os.cpu_count() or 1) // max(1, largest))
    return bound
