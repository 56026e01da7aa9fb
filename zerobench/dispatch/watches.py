"""The watches that launchers with a queue have."""

from __future__ import annotations

from collections.abc import Callable

from ..config.launcher import LauncherChoice
from .slurm import SlurmWatch
from .watch import Watch

WATCHES: dict[str, Callable[[LauncherChoice], Watch]] = {"submitit_slurm": SlurmWatch}
"""Launcher -> its watch."""


def watch_of(choice: LauncherChoice) -> Watch:
    """Returns the watch over a launcher's jobs."""
    return WATCHES.get(choice.name, Watch)(choice)
