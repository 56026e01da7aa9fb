"""CPU time that other processes of this machine take, as of another user: a machine that they keep busy has no times
worth a comparison.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import NamedTuple

import psutil

BUSY = ("user", "nice", "system", "irq", "softirq", "steal")
"""Kinds of CPU time in which a core does something, `steal` for another machine of the host; a guest's is in `user`."""


class _Reading(NamedTuple):
    at: float
    machine_s: float
    own_s: float


class OtherProcesses:
    """CPU time of other processes since this was made: the machine's, less that of this process and all below it."""

    def __init__(self) -> None:
        self._before = _read()

    def cores(self) -> float | None:
        """Returns how many cores they have kept busy, on average; None if no time has passed."""
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
