"""Watches a launcher's jobs from outside: a launcher with a queue knows why a job waits, or that it is lost.

Fate        the status and reason of launches that a job has lost
JobWatch    for launchers that report nothing; dispatch/slurm.py has the one for SLURM
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config.launcher import LauncherChoice, Resources
from .job_folder import JobFolder
from .task import ENDED


@dataclass(frozen=True)
class Fate:
    """The end of launches without rows. `status`, `reason`: for their rows."""

    status: str
    reason: str


@dataclass
class JobWatch:
    """Watches the jobs of `choice`, identified by their folders."""

    choice: LauncherChoice

    def problems(self, wanted: Sequence[Resources]) -> list[str]:
        """Returns an error message for each request that the launcher would reject, before any job is submitted."""
        return []

    def waiting(self, folders: Sequence[JobFolder]) -> str:
        """Returns a message about jobs that have not begun; "" if nothing is known."""
        return ""

    def fate(self, folder: JobFolder, error: BaseException | None, code: int | None) -> Fate:
        """Returns how a job ended. `error`: raised by its plugin; `code`: its command's exit code."""
        job = f"its job of {self.choice.name}"
        if error is not None:
            words = " ".join(str(error).split()) or "no message"
            return Fate("crash", f"{job} failed: {type(error).__name__}: {words[:600]}")
        if code == ENDED:
            return Fate("interrupted", f"{job} was ended by a signal")
        return Fate("crash", f"{job} ended without a row for it; logs/job.log has its output")

    def withdraw(self, folders: Sequence[JobFolder], whole: bool = False) -> list[JobFolder]:
        """Removes waiting jobs from the queue, or all jobs if `whole`. Returns the jobs that will never run."""
        return []
