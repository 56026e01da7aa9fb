"""A job of the launcher, as the composing process sees it.

waiting    in the order of jobs; it has no folder yet
under way  launched from a thread; `error` is what the plugin has raised, `code` the exit code of the job's command
over       the plugin has returned; or all rows are taken, AFTER_S ago, as of a job that is requeued for nothing
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from ..config.launcher import Resources
from ..sweep.sweep import CellLaunch
from .job_folder import JobFolder

AFTER_S = 30.0
"""Time, in seconds, for a job to end after its last row."""


@dataclass(eq=False)
class Job:
    """A job of the launcher. `taken`: number of its launches whose rows have been taken. `started`: place -> time,
    since the epoch, of those that have begun. `has_begun`: its command has come to a launch, if only to await another
    sweep's. `again`: launches that another job is to run.
    """

    number: int
    launches: list[CellLaunch]
    resources: Resources
    folder: JobFolder | None = None
    error: BaseException | None = None
    code: int | None = None
    taken: int = 0
    complete_since: float | None = None
    started: dict[int, float] = field(default_factory=dict)
    has_begun: bool = False
    again: list[CellLaunch] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def has_ended(self) -> bool:
        """True once the plugin says so."""
        return self.ended.is_set()

    @property
    def is_left_over(self) -> bool:
        """True where all rows were taken long ago and the plugin still waits."""
        return self.complete_since is not None and time.monotonic() > self.complete_since + AFTER_S
