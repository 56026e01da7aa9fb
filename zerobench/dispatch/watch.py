"""Watches a launcher's jobs from outside: a launcher with a queue reports why a job waits, or that it is lost.

Fate        the status and the reason of the launches that a job has lost
JobWatch    of a launcher that tells nothing; SLURM's is in dispatch/slurm.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config.launcher import LauncherChoice, Resources
from .job_folder import JobFolder
from .task import ENDED


@dataclass(frozen=True)
class Fate:
    """The end of launches without rows. `status`: of their rows. `reason`: a sentence."""

    status: str
    reason: str


@dataclass
class JobWatch:
    """Watches the jobs of `choice`, each known by its folder."""

    choice: LauncherChoice

    def problems(self, wanted: Sequence[Resources]) -> list[str]:
        """Returns an error message for each request that the launcher would refuse, before any job is submitted."""
        return []

    def waiting(self, folders: Sequence[JobFolder]) -> str:
        """Returns words on jobs that have not begun; "" if nothing is known of such."""
        return ""

    def fate(self, folder: JobFolder, error: BaseException | None, code: int | None) -> Fate:
        """Returns the end of a job that is over. `error`: raised by its plugin; `code`: its command's exit code."""
        job = f"its job of {self.choice.name}"
        if error is not None:
            words = " ".join(str(error).split()) or "no message"
            return Fate("crash", f"{job} failed: {type(error).__name__}: {words[:600]}")
        if code == ENDED:
            return Fate("interrupted", f"{job} was ended by a signal")
        return Fate("crash", f"{job} ended without a row for it; logs/job.log has its output")

    def withdraw(self, folders: Sequence[JobFolder], whole: bool = False) -> list[JobFolder]:
        """Takes jobs that wait from the queue, or all where `whole`. Returns those that do not run, nor will."""
        return []
