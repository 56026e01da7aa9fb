"""The watches that launchers with a queue have."""

from __future__ import annotations

from collections.abc import Callable

from ..config.launcher import LauncherChoice
from .slurm import SlurmWatch
from .watch import JobWatch

WATCHES: dict[str, Callable[[LauncherChoice], JobWatch]] = {"submitit_slurm": SlurmWatch}
"""Launcher -> its watch."""


def watch_of(choice: LauncherChoice) -> JobWatch:
    """Returns the watch over a launcher's jobs."""
    return WATCHES.get(choice.name, JobWatch)(choice)
