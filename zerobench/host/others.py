"""CPU time of other processes on this machine, such as another user's: times on a busy machine cannot be compared."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import NamedTuple

import psutil

BUSY = ("user", "nice", "system", "irq", "softirq", "steal")
"""Kinds of CPU time in which a core is busy; `steal`: for another machine on the same host. `user` includes guests."""


class _Reading(NamedTuple):
    at: float
    machine_s: float
    own_s: float


class OtherProcesses:
    """CPU time of other processes since creation: the machine's minus that of this process and its descendants."""

    def __init__(self) -> None:
        self._before = _read()

    def cores(self) -> float | None:
        """Returns the average number of cores that they kept busy; None if no time has passed."""
        now, before = _read(), self._before
        if now.at <= before.at:
            return None
        busy = (now.machine_s - before.machine_s) - (now.own_s - before.own_s)
        return max(0.0, busy / (now.at - before.at))


def _read() -> _Reading:
    machine = psutil.cpu_times()
    me = psutil.Process()
    own = 0.0
    for one in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended: its time is its parent's now
            own += sum(one.cpu_times()[:4])  # its own, and that of children which have ended
    return _Reading(time.monotonic(), sum(getattr(machine, kind, 0.0) for kind in BUSY), own)
